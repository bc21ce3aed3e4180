"""Stopwatch: seconds of work on a device, without waiting each time; and ranges for profilers."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Stopwatch:
    """Adds up stretches of work on a device.

    A CUDA call returns when its work is queued, so there a stretch lies between two events in the
    queue, which are read once the device has passed them. Elsewhere the work is done when the call
    returns, and the host's clock measures it.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        # events around stretches not read yet, in the order of the queue
        self._unread: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the work within, unless it fails."""
        if self._device.type == "cuda":
            begin = self._event()
            yield
            self._unread.append((begin, self._event()))
            while self._unread and self._unread[0][1].query():
                self._read()
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds of all stretches since the last call; waits for the device to finish them."""
        if self._unread:
            self._unread[-1][1].synchronize()
        while self._unread:
            self._read()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        begin, end = self._unread.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3


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
