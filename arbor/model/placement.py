"""Device, dtype and attention backend of a model, checked before anything loads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arbor import registry
from arbor.errors import UsageError
from arbor.kernels.native import NUMBERS, head_dim_fits, native_library, native_state
from arbor.model.names import INT8, check_device

if TYPE_CHECKING:
    import torch

    from arbor.model.model_info import ModelInfo

FLASHINFER = "flashinfer"  # both the backend and its package
INVARIANT = "invariant"
TRITON = "triton"
NATIVE = "native"
HALF = ("float16", "bfloat16")
WIDEST_ON_CUDA = 256  # channels of a head
INT8_BACKENDS = ("native", "torch", "rowwise")  # those that read 8-bit KV on a CPU


def resolve_device(device: str) -> torch.device:
    """A device by name; ``auto`` is CUDA where available.

    Raises:
        UsageError: an unknown or unavailable device.
    """
    check_device(device)

    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device", f"--device {device}, but torch sees no GPU.", "Use --device cpu."
        )
    if not number:
        return torch.device(kind)
    last = torch.cuda.device_count() - 1
    if int(number) > last:
        seen = f"{last + 1} GPUs, cuda:0 to cuda:{last}" if last else "1 GPU, cuda:0"
        raise UsageError(
            "device",
            f"--device {device}, but torch sees {seen}.",
            f"Use --device cuda:{last}.",
            gpus=last + 1,
        )
    return torch.device(kind, int(number))


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within, a device is torch's current one.

    Triton and FlashInfer launch there, wherever their tensors are.
    """
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_of_model(model: Any, dtype: str, device: str) -> torch.device:
    """The device of a ready model, which stays as it is.

    Raises:
        UsageError: the settings name another dtype or device, or the weights are on several
            devices.
    """
    weight: torch.Tensor = next(model.parameters())
    devices = sorted({str(each.device) for each in model.parameters()})
    if len(devices) > 1:
        raise UsageError(
            "device",
            f"the ready model's weights are on several devices: {', '.join(devices)}.",
            "Load it onto one, as with from_pretrained(…, device_map={'': 'cuda:0'}).",
            devices=devices,
        )
    if dtype not in ("auto", dtype_name(weight.dtype)):
        raise UsageError(
            "dtype",
            f"dtype={dtype}, and the ready model's is {dtype_name(weight.dtype)}.",
            f"Leave dtype out, or pass model.to(torch.{dtype}).",
        )
    if device != "auto":
        chosen = resolve_device(device)
        if chosen.type != weight.device.type or chosen.index not in (None, weight.device.index):
            raise UsageError(
                "device",
                f"device={device}, and the ready model is on {weight.device}.",
                f"Leave device out, or pass model.to('{device}').",
            )
    return weight.device


def check_backend(backend: str) -> str:
    """An attention backend by name; whether it can run here is checked by `resolve_backend`.

    Raises:
        UnknownName: unknown backend.
    """
    special = ("auto", FLASHINFER)
    if backend not in (*special, *registry.names("backend")) and ":" not in backend:
        raise registry.unknown("backend", backend, special)
    return backend


def resolve_backend(backend: str, device: torch.device, deterministic: bool) -> str:
    """An attention backend by name, checked; ``auto`` stays, because it depends on the model.

    Raises:
        UnknownName: unknown backend.
        UsageError: it contradicts other settings, or cannot run here.
    """
    check_backend(backend)
    if deterministic:
        _check_deterministic(backend, device)
    if backend == NATIVE and (device.type != "cpu" or native_library() is None):
        state = native_state() if device.type == "cpu" else f"the device is {device}"
        raise UsageError(
            "backend",
            f"--backend native needs the native kernels on a CPU: {state}.",
            "Use --backend torch, or install arbor where there is a C++ compiler.",
        )
    if backend in (INVARIANT, TRITON) and (device.type != "cuda" or find_spec("triton") is None):
        raise UsageError(
            "backend",
            f"--backend {backend} needs a GPU and the package triton.",
            f"Use --backend {'rowwise' if backend == INVARIANT else 'torch'}.",
        )
    if backend == FLASHINFER and (device.type != "cuda" or find_spec(FLASHINFER) is None):
        raise UsageError(
            "backend",
            "--backend flashinfer needs a GPU and the package flashinfer.",
            "Use --backend torch, or install arbor-search[cuda] on a machine with a GPU.",
        )
    return backend


def flashinfer_computes(info: ModelInfo) -> bool:
    """Whether FlashInfer is installed, and has kernels for a model."""
    if find_spec(FLASHINFER) is None:
        return False
    from arbor.kernels.attention.flashinfer_cascade import HEAD_DIMS

    return info.dtype in HALF and set(info.head_dims) <= set(HEAD_DIMS)


def triton_computes(info: ModelInfo) -> bool:
    """Whether Triton is installed, and measured to be the fastest for such models."""
    widest = max(info.head_dims, default=0)
    return find_spec("triton") is not None and info.dtype in HALF and widest <= WIDEST_ON_CUDA


def _check_deterministic(backend: str, device: torch.device) -> None:
    """Refuse `deterministic` with a backend or on a device that has no such kernels.

    Raises:
        UsageError: names it.
    """
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            "deterministic",
            f"--deterministic runs on a CPU or on CUDA, and the device is {device}.",
            "Use --device cpu, or leave --deterministic out.",
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise UsageError(
            "deterministic",
            "--deterministic on CUDA needs the package triton.",
            "Install triton, or use --device cpu.",
        )
    own = NATIVE if device.type == "cpu" else INVARIANT
    allowed = ("auto", "rowwise", own)
    if backend not in allowed:
        raise UsageError(
            "backend",
            f"--deterministic needs attention whose rows ignore each other; --backend {backend} does not have it.",
            f"Leave one of them out, or use --backend {'rowwise' if own == NATIVE else own}.",
        )


def check_int8(
    backend: str, device: str, deterministic: bool, head_dims: Sequence[int] = ()
) -> None:
    """Refuse 8-bit KV where nothing reads it.

    Args:
        backend: by name, or ``auto``.
        device: by name, or ``auto``, which may become a GPU.
        deterministic: as in `Solver`.
        head_dims: channels of the model's heads, once they are known.

    Raises:
        UsageError: names the value that works.
    """
    if device.startswith("cuda"):
        if deterministic:
            raise UsageError(
                "kv-dtype",
                f"kv_dtype={INT8}: on a GPU --deterministic does not read 8-bit KV.",
                "Leave one of them out, or use --device cpu.",
            )
        if backend in ("auto", TRITON) and find_spec("triton") is not None:
            odd = next((dim for dim in head_dims if dim % 2), None)
            if odd is None:
                return
            raise UsageError(
                "kv-dtype",
                f"kv_dtype={INT8}: on a GPU heads need an even number of channels, and the "
                f"model's have {odd}.",
                "Leave kv_dtype out, or use --device cpu.",
            )
        raise UsageError(
            "kv-dtype",
            f"kv_dtype={INT8}: on a GPU the package triton and --backend {TRITON} read 8-bit KV, "
            f"not {backend}.",
            f"Use --backend {TRITON}, or leave kv_dtype out.",
        )
    if backend not in ("auto", *INT8_BACKENDS) and (device, backend) != ("auto", TRITON):
        raise UsageError(
            "kv-dtype",
            f"kv_dtype={INT8}: --backend {backend} does not read 8-bit KV.",
            f"Use --backend auto, {', '.join(INT8_BACKENDS[:-1])} or {INT8_BACKENDS[-1]}.",
        )


def runs_native(info: ModelInfo, device: torch.device) -> bool:
    """Whether the native kernels are there and compute a model's attention on a device."""
    if device.type != "cpu" or native_library() is None or info.dtype not in NUMBERS:
        return False
    return all(head_dim_fits(dim) for dim in info.head_dims)


def refuse_batch_dependent(model: Any, device: torch.device) -> None:
    """Refuse `deterministic` for a model whose layers depend on the batch.

    Raises:
        UsageError: names the layers, or a dtype without kernels.
    """
    import torch

    from arbor.kernels.linear.layers import batch_dependent

    half_or_single = (torch.float32, torch.float16, torch.bfloat16)
    if device.type == "cuda" and model.dtype not in half_or_single:
        raise UsageError(
            "deterministic",
            f"--deterministic on CUDA has no kernels for {dtype_name(model.dtype)}.",
            "Use --dtype bfloat16, float16 or float32.",
        )
    found = batch_dependent(model)
    if found:
        raise UsageError(
            "deterministic",
            f"--deterministic: in model_type '{model.config.model_type}' a row's result depends on the other rows of the "
            f"batch in {' and '.join(dict.fromkeys(found.values()))} ({next(iter(found))}, {len(found)} in all).",
            "Leave --deterministic out, or take a model without experts and quantized layers.",
            layers=list(found),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
