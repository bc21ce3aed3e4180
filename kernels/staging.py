"""Copies between host and device that do not block: the integers of a step, and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


class Staging:
    """Copies a step's integers to a device through one pinned buffer and with one copy.

    The copy does not block the host; the next one waits until the buffer has been read. On a CPU
    nothing is copied.

    Args:
        device: where the integers are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: Tensor | None = None
        self._copied: Any = None  # event after the last copy

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device.

        Args:
            parts: on the CPU, of any integer dtypes.

        Returns:
            views of one tensor of the device; on a CPU the parts themselves.
        """
        if self.device.type == "cpu":
            return list(parts)
        begins: list[int] = []
        size = 0
        for part in parts:
            begins.append(size)
            size += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()
        if self._host is None or self._host.numel() < size:
            with torch.inference_mode(False):  # written to again, whatever the caller's mode
                self._host = pinned(2 * size)
        for part, begin in zip(parts, begins, strict=True):
            _part(self._host, begin, part).copy_(part)
        there = upload(self._host[:size], self.device)
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self.device))
        return [_part(there, begin, part) for part, begin in zip(parts, begins, strict=True)]


def pinned(size: int) -> Tensor:
    """Page-locked memory of the host, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; does not wait for it."""
    return host.to(device, non_blocking=True)


def download(there: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """A copy on the host, and what waits until it is there; later work of the device is not waited
    for."""
    if not there.is_cuda:
        return there, bool
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    host.copy_(there, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(there.device))
    return host, copied.synchronize


def _part(whole: Tensor, begin: int, like: Tensor) -> Tensor:
    return whole[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
