"""NVTX ranges: phases of the engine on the timeline of a GPU profiler."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

VARIABLE = "ARBOR_NVTX"


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Within it, a profiler that reads NVTX (Nsight Systems) shows ``arbor.NAME``; phases nest.

    A null context unless the variable `VARIABLE` is set and not 0, and torch sees a GPU.

    Args:
        name: ``prefill``, ``decode``, ``verify``, ``rehydrate``, ``fetch`` or ``policy``.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0") or not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.nvtx.range(f"arbor.{name}")
