"""HostCopies: KV between a device and host memory beside what the device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy to page-locked host memory that is under way.

    Attributes:
        target: holds the rows once it is done.
        ended: the event after it.
    """

    target: Tensor
    ended: Any

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.ended.query())

    def rows(self) -> Tensor:
        """What was copied; waits for it."""
        self.ended.synchronize()
        return self.target


class HostCopies:
    """Copies that neither the host nor the device's other work waits for.

    Rows leave on a stream of their own, after what was asked of the device before, and arrive on
    the stream that reads them.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def down(self, rows: Tensor) -> HostCopy:
        """Begin to copy rows of the device; they may be given up at once."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        target = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(rows, non_blocking=True)
            ended = self._stream.record_event()
        rows.record_stream(self._stream)
        return HostCopy(target, ended)

    def up(self, rows: Tensor, index: Tensor, device: torch.device) -> Tensor:
        """Chosen rows on a device; what it is asked next waits for them, the host does not.

        They are gathered in page-locked memory, from which they leave without another copy.

        Args:
            rows: [n, numbers], of host memory.
            index: int64 [m], of the rows.
            device: the one given, or the CPU.
        """
        if device.type == "cpu":
            return rows.index_select(0, index)
        chosen = torch.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, pin_memory=True)
        torch.index_select(rows, 0, index, out=chosen)
        return chosen.to(device, non_blocking=True)
