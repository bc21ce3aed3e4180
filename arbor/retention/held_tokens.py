"""Which tokens of each block are on the device, for many blocks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Ints
from arbor.support.growable import grown


class HeldTokens:
    """The offsets of resident tokens, block after block in one growable array.

    A changed block is written again by `update`.
    """

    def __init__(self) -> None:
        # where the used part of `_offset` ends
        self._end = 0
        self._offset = np.array([], np.int64)
        # by row; the tokens of block i lie at base[i] ... base[i] + count[i]
        self._base = np.array([], np.int64)
        self._count = np.array([], np.int64)
        self._capacity = np.array([], np.int64)

    def update(self, ids: Ints, lengths: Ints, counts: Ints, offsets: Ints) -> None:
        """Set the resident tokens of some blocks.

        Args:
            ids: int64 [P], rows, P >= 1.
            lengths: int64 [P], tokens of each block.
            counts: int64 [P], tokens of these on the device.
            offsets: int64 [sum(counts)], their places in their blocks, block after block.
        """
        self._reserve(int(ids.max()) + 1)
        for at in np.flatnonzero(counts > self._capacity[ids]).tolist():
            row = int(ids[at])
            self._place(row, max(int(lengths[at]), 2 * int(self._capacity[row])))
        shift = self._base[ids] - (np.cumsum(counts) - counts)
        self._offset[np.repeat(shift, counts) + np.arange(len(offsets))] = offsets
        self._count[ids] = counts

    def of(self, ids: NDArray[np.int64]) -> tuple[Ints, Ints]:
        """The resident tokens of some blocks, each of which has been updated.

        Args:
            ids: int64 [P], rows.

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
        self._base = grown(self._base, size)
        self._count = grown(self._count, size)
        self._capacity = grown(self._capacity, size)

    def _place(self, row: int, capacity: int) -> None:
        self._base[row], self._end = self._end, self._end + capacity
        self._capacity[row] = capacity
        self._offset = grown(self._offset, self._end)
