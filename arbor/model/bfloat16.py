"""The dtype that meets weights in blocks of a GGUF file: bfloat16 where it is multiplied fast."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from arbor.kernels.native import native_library
from arbor.model.gguf.header import GGUFHeader

NATIVE_FLAGS = {"avx512_bf16", "amx_bf16"}  # as Linux names them
# kernels that multiply bfloat16 by codes as whole numbers (kernels/csrc/block_linear.h)
CODE_KERNELS = {"avx2", "avx_vnni", "avx512", "avx512_vnni", "neon_dot", "neon_bf16"}
CPU_INFO = Path("/proc/cpuinfo")
GPU_FILES = ("nvidia0", "dxg")  # of Linux, and of Linux under Windows


def auto_dtype(header: GGUFHeader, device: str) -> str:
    """The dtype that ``auto`` is for a GGUF file; ``auto`` where its config decides, as float32.

    What weights in blocks of a few bits meet loses nothing that they had by being bfloat16 instead
    of float32, and KV takes half the memory. So it is where the device multiplies bfloat16
    natively, or arbor's kernels multiply it by codes.

    Args:
        header: of the file.
        device: by name, or ``auto``.
    """
    stored_so = any(each.type_name == "BF16" for each in header.tensors)
    if (header.quantized or stored_so) and multiplies_bfloat16(device):
        return "bfloat16"
    kernels = native_library() if header.quantized and not is_gpu(device) else None
    return "bfloat16" if kernels is not None and kernels.name in CODE_KERNELS else "auto"


def multiplies_bfloat16(device: str) -> bool:
    """Whether a device, by name, has instructions for bfloat16."""
    if not is_gpu(device):
        return _cpu_multiplies_bfloat16()
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def is_gpu(device: str) -> bool:
    """Whether a device is a GPU that torch sees; torch is imported only where there may be one.

    Args:
        device: by name, or ``auto``: a GPU where there is one.
    """
    if not (device.startswith("cuda") or (device == "auto" and _may_have_gpu())):
        return False
    import torch

    return torch.cuda.is_available()


def _may_have_gpu() -> bool:
    """False where no GPU can be: without a driver's device file on Linux."""
    linux = sys.platform.startswith("linux")
    return not linux or any(Path("/dev", name).exists() for name in GPU_FILES)


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively: AVX-512 BF16 or AMX."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((each for each in lines if each.startswith("flags")), "")
    return bool(NATIVE_FLAGS & set(flags.partition(":")[2].split()))
