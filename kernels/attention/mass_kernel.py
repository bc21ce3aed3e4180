"""The attention mass kernel on CUDA, until it fails there."""

from __future__ import annotations

import functools
import importlib
import logging
from importlib.util import find_spec

import torch
from torch import Tensor

from arbor.kernels.attention.mass_work import MassWork

logger = logging.getLogger(__name__)

# float32 products of a tile spill registers, so that matmuls are better there.
DTYPES = (torch.float16, torch.bfloat16)


class MassKernel:
    """Calls `triton_mass`, which is imported at first use; a failure is logged once and final.

    Triton compiles the kernel at first use, which takes a C compiler and a supported GPU.
    """

    def __init__(self) -> None:
        self._failed = False

    def runs(self, q: Tensor) -> bool:
        """Whether the kernel is to be used for these queries.

        Not where torch is asked for deterministic algorithms: the kernel's sums are atomic.
        """
        return (
            q.device.type == "cuda"
            and q.dtype in DTYPES
            and not self._failed
            and not torch.are_deterministic_algorithms_enabled()
            and _installed()
        )

    def __call__(
        self, work: MassWork, q: Tensor, k_pool: Tensor, lse: Tensor, heads: Tensor | None
    ) -> Tensor | None:
        """See `triton_mass`; None if it failed, now or before."""
        if self._failed:
            return None
        try:
            module = importlib.import_module("arbor.kernels.attention.triton_mass")
            mass: Tensor = module.triton_mass(work, q, k_pool, lse, heads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, loaders and CUDA fail in many ways
            self._failed = True
            lines = str(error).strip().splitlines() or [""]
            logger.warning(
                "Attention mass runs on torch: triton failed (%s: %s).",
                type(error).__name__,
                lines[0],
            )
            return None
        return mass


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None
