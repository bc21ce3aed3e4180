"""RecordTable: the token of each record of a store, and the free records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of blocks.

    Attributes:
        row: int [n], the row of each token's block.
        offset: int [n], which of its tokens.
        depth: int [n], layers that hold its K/V.
    """

    row: NDArray[np.integer]
    offset: NDArray[np.integer]
    depth: NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.row)

    def of(self, places: NDArray[np.integer]) -> Tokens:
        """Some of them."""
        return Tokens(self.row[places], self.offset[places], self.depth[places])


class RecordTable:
    """`(block, token)` per record of a store, and the records in use.

    Args:
        records: how many there are.

    Attributes:
        records: how many there are.
        used: records in use.
        row: int32 [records], the row of the block whose token it is; meaningless if free.
        offset: int32 [records], which of its tokens.
        depth: int16 [records], layers that hold the token's K/V.
        in_use: bool [records].
    """

    def __init__(self, records: int) -> None:
        self.records = records
        self.used = 0
        self.row = np.zeros(records, np.int32)
        self.offset = np.zeros(records, np.int32)
        self.depth = np.zeros(records, np.int16)
        self.in_use = np.zeros(records, np.bool_)
        self._written = np.zeros(records, np.int64)  # when, by a clock that counts writes
        self._clock = 0
        self._fresh = 0  # records from here on were never used
        self._free: list[int] = []  # of the others, as a stack

    @property
    def free(self) -> int:
        """Records not in use."""
        return self.records - self.used

    def take(self, tokens: Tokens) -> Records:
        """Records for n tokens, int32 [n]; there are as many free ones."""
        count = len(tokens)
        assert count <= self.free, f"{count} records wanted, {self.free} free"
        again = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(again)]
        taken.extend(range(self._fresh, self._fresh + count - again))
        self._fresh += count - again
        records = np.array(taken, np.int32)
        self.row[records], self.offset[records] = tokens.row, tokens.offset
        self.depth[records] = tokens.depth
        self.in_use[records] = True
        self._clock += 1
        self._written[records] = self._clock
        self.used += count
        return records

    def tokens(self, records: Records) -> Tokens:
        """The tokens of records."""
        return Tokens(self.row[records], self.offset[records], self.depth[records])

    def release(self, records: Records) -> None:
        """Make distinct records in use free."""
        assert self.in_use[records].all(), "a record was released twice"
        self.in_use[records] = False
        self.used -= len(records)
        self._free.extend(records.tolist())

    def oldest(self, count: int, spared: Records) -> Records:
        """Up to `count` records in use, those written first; of one write the last tokens first,
        since what comes after a missing token is computed again sooner or later.

        Args:
            count: how many.
            spared: int32, records that are not given.

        Returns:
            int32, the oldest first.
        """
        offered = self.in_use.copy()
        offered[spared] = False
        candidates = np.flatnonzero(offered)
        if len(candidates) > count:
            written = self._written[candidates]
            last = np.partition(written, count - 1)[count - 1]
            candidates = candidates[written <= last]
        order = np.lexsort((-self.offset[candidates], self._written[candidates]))
        return candidates[order[:count]].astype(np.int32)
