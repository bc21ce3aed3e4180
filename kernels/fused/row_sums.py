"""Sums from which the probabilities of rows of logits follow, where a device has a kernel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from arbor.kernels.triton_module import triton_module

logger = logging.getLogger(__name__)


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
    logits = 5 * torch.randn(3, 9000, generator=generator, device=device)
    logits[1, 17:] = -torch.inf
    for temperature in (1.0, 0.7):
        found, right = kernel(logits, temperature), by_torch(logits, temperature)
        if not torch.allclose(found, right, rtol=1e-12, atol=0):
            return False
    return True


def by_torch(logits: Tensor, temperature: float) -> Tensor:
    """The same in torch, with float64 copies of the logits: the reference."""
    wide = logits.double()
    top = wide.amax(-1, keepdim=True)
    sums = [((wide - top) / divisor).exp().sum(-1) for divisor in (1.0, temperature)]
    return torch.stack((top.squeeze(-1), *sums))
