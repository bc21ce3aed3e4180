"""Which tokens of each block are on the device, for many blocks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Ints

_NOWHERE = -1


class HeldTokens:
    """The offsets of resident tokens, block after block in one growable array.

    A changed block is written again by `update`.
    """

    def __init__(self) -> None:
        # where the used part of `_offset` ends
        self._end = 0
        self._offset = np.zeros(0, np.int64)
        # by node id; the tokens of block i lie at base[i] ... base[i] + count[i]
        self._base = np.full(0, _NOWHERE, np.int64)
        self._count = np.zeros(0, np.int64)
        self._capacity = np.zeros(0, np.int64)

    def update(self, ids: Ints, lengths: Ints, counts: Ints, offsets: Ints) -> None:
        """Set the resident tokens of some blocks.

        Args:
            ids: int64 [P], node ids, P >= 1.
            lengths: int64 [P], tokens of each block.
            counts: int64 [P], tokens of these on the device.
            offsets: int64 [sum(counts)], their places in their blocks, block after block.
        """
        self._reserve(int(ids.max()) + 1)
        for at in np.flatnonzero(counts > self._capacity[ids]).tolist():
            node_id = int(ids[at])
            self._place(node_id, max(int(lengths[at]), 2 * int(self._capacity[node_id])))
        shift = self._base[ids] - (np.cumsum(counts) - counts)
        self._offset[np.repeat(shift, counts) + np.arange(len(offsets))] = offsets
        self._count[ids] = counts

    def of(self, ids: NDArray[np.int64]) -> tuple[Ints, Ints]:
        """The resident tokens of some blocks, each of which has been updated.

        Args:
            ids: int64 [P], node ids.

        Returns:
            int64 [P], how many tokens of each block, and int64 [T], their offsets, block after
            block.
        """
        counts = self._count[ids]
        shift = self._base[ids] - (np.cumsum(counts) - counts)
        at = np.repeat(shift, counts)
        at += np.arange(len(at))
        # faster than indexing
        return counts, self._offset.take(at)

    def _reserve(self, size: int) -> None:
        if size > len(self._base):
            more = max(size, 2 * len(self._base), 64) - len(self._base)
            self._base = np.concatenate([self._base, np.full(more, _NOWHERE, np.int64)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int64)])
            self._capacity = np.concatenate([self._capacity, np.zeros(more, np.int64)])

    def _place(self, node_id: int, capacity: int) -> None:
        self._base[node_id], self._end = self._end, self._end + capacity
        self._capacity[node_id] = capacity
        if self._end > len(self._offset):
            more = max(self._end, 2 * len(self._offset)) - len(self._offset)
            self._offset = np.concatenate([self._offset, np.zeros(more, np.int64)])
