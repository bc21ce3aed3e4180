"""Which tokens of each block are on the device, for many blocks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Bools, Ints

_NOWHERE = -1


class HeldTokens:
    """The offsets of resident tokens, block after block in one growable array; a block is read again when it has changed."""

    def __init__(self) -> None:
        self._end = 0  # of the part of `_offset` in use
        self._offset = np.zeros(0, np.int64)
        # by node id; what block i holds lies at base[i] ... base[i] + count[i]
        self._base = np.full(0, _NOWHERE, np.int64)
        self._count = np.zeros(0, np.int64)
        self._capacity = np.zeros(0, np.int64)

    def read(self, node_id: int, resident: Bools) -> int:
        """Take note of what a block holds, bool [n]; returns how many tokens that is."""
        held = np.flatnonzero(resident)
        if node_id >= len(self._base):
            more = max(node_id + 1, 2 * len(self._base), 64) - len(self._base)
            self._base = np.concatenate([self._base, np.full(more, _NOWHERE, np.int64)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int64)])
            self._capacity = np.concatenate([self._capacity, np.zeros(more, np.int64)])
        if len(held) > self._capacity[node_id]:
            self._place(node_id, max(len(resident), 2 * int(self._capacity[node_id])))
        base = int(self._base[node_id])
        self._offset[base : base + len(held)] = held
        self._count[node_id] = len(held)
        return len(held)

    def of(self, ids: NDArray[np.int64]) -> tuple[Ints, Ints]:
        """What some blocks that have been read hold.

        Args:
            ids: int64 [P], node ids.

        Returns:
            int64 [P], how many tokens each holds, and int64 [T], their offsets, block after block.
        """
        counts = self._count[ids]
        shift = self._base[ids] - (np.cumsum(counts) - counts)
        at = np.repeat(shift, counts)
        at += np.arange(len(at))
        return counts, self._offset[at]

    def _place(self, node_id: int, capacity: int) -> None:
        self._base[node_id], self._end = self._end, self._end + capacity
        self._capacity[node_id] = capacity
        if self._end > len(self._offset):
            more = max(self._end, 2 * len(self._offset)) - len(self._offset)
            self._offset = np.concatenate([self._offset, np.zeros(more, np.int64)])
