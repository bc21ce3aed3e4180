"""The choice of tokens by a device's kernels: native on a CPU, sums of logits in Triton on CUDA."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from arbor.kernels.native import NUMBERS, ChoiceJob, Library, LogitSumsJob, native_library
from arbor.kernels.triton_module import triton_module

logger = logging.getLogger(__name__)


class NativeChoice:
    """One token per row, by its number; a row's bits depend on nothing but the row."""

    def __init__(self, library: Library) -> None:
        self._choose = library.choose

    def __call__(
        self,
        logits: Tensor,
        uniforms: list[float],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> Tensor | None:
        """The choice; None where the kernel does not read the logits.

        Args:
            logits: [n, V].
            uniforms: n numbers in [0, 1).
            temperature, top_k, top_p, min_p: as in `Sampling`.

        Returns:
            [5, n] float64: the fields of `Draws`; NaN as the probabilities of a row that is not
            finite.
        """
        number = _number_of(logits)
        if number is None:
            return None
        rows, vocabulary = logits.shape
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        out = torch.empty(5, rows, dtype=torch.float64)
        job = ChoiceJob(
            *(logits.data_ptr(), numbers.data_ptr(), out.data_ptr(), logits.stride(0)),
            *(temperature, top_p, min_p, min(top_k, vocabulary), rows, vocabulary, number),
        )
        self._choose(ctypes.addressof(job), torch.get_num_threads())
        return out


def native_choice() -> NativeChoice | None:
    """The choice of the library; None without one."""
    library = native_library()
    return None if library is None else NativeChoice(library)


def logit_sums(logits: Tensor) -> Tensor | None:
    """What the probabilities of each row follow from, before temperature and cut-offs.

    Args:
        logits: [n, V].

    Returns:
        [4, n] float64: the largest logit, the sum of exp(logit - largest), the entropy, and the
        first token with the largest logit. Sums of a row that is not finite are NaN.
    """
    library, number = native_library(), _number_of(logits)
    if library is None or number is None:
        return None
    rows, vocabulary = logits.shape
    out = torch.empty(4, rows, dtype=torch.float64)
    job = LogitSumsJob(
        *(logits.data_ptr(), out.data_ptr(), logits.stride(0)), *(rows, vocabulary, number)
    )
    library.sum_logits(ctypes.addressof(job), torch.get_num_threads())
    return out


def _number_of(logits: Tensor) -> int | None:
    """The kernels' number of the dtype; None for logits that they do not read."""
    if logits.is_cuda or logits.stride(-1) != 1 or not logits.shape[-1]:
        return None
    return NUMBERS.get(str(logits.dtype).removeprefix("torch."))


def row_sums(logits: Tensor, temperature: float) -> Tensor | None:
    """The largest logit of each row and sums of exponentials, see `triton_sampling.row_sums`.

    Args:
        logits: [n, V].
        temperature: above 0.

    Returns:
        [3, n] float64; None without a kernel.

    Example:
        >>> row_sums(torch.zeros(1, 4), 0.5) is None
        True
    """
    kernel = _kernel(logits.device) if logits.is_cuda else None
    if kernel is None:
        return None
    return kernel(logits if logits.stride(-1) == 1 else logits.contiguous(), temperature)


Kernel = Callable[[Tensor, float], Tensor]


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    """The kernel of a device, if it computes what torch does."""
    module = triton_module("fused.triton_sampling", "sums of logits")
    if module is None:
        return None
    try:
        reason = "" if agrees(module.row_sums, device) else "its sums are not torch's"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and CUDA fail in many ways
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
    if reason:
        logger.warning("the kernel for sums of logits is not used: %s", reason)
        return None
    return cast(Kernel, module.row_sums)


@torch.inference_mode()
def agrees(kernel: Kernel, device: torch.device) -> bool:
    """Whether a kernel gives torch's sums for random logits, some of them impossible."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 5 * torch.randn(3, 9000, generator=generator, dtype=torch.float32, device=device)
    logits[1, 17:] = -torch.inf
    for temperature in (1.0, 0.7):
        found, right = kernel(logits, temperature), sums_by_torch(logits, temperature)
        if not torch.allclose(found, right, rtol=1e-12, atol=0):
            return False
    return True


def sums_by_torch(logits: Tensor, temperature: float) -> Tensor:
    """The same in torch, with float64 copies of the logits: the reference."""
    wide = logits.double()
    top = wide.amax(-1, keepdim=True)
    sums = [((wide - top) / divisor).exp().sum(-1) for divisor in (1.0, temperature)]
    return torch.stack((top.squeeze(-1), *sums))
