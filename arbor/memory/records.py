"""RecordTable: the token of each record of a store, and the free records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.int32]
RECORD_BYTES = 20  # of a record's columns in `RecordTable`


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
        lent: bool [records], in use while the token is on the device.
    """

    def __init__(self, records: int) -> None:
        self.records = records
        self.used = 0
        self.row = np.zeros(records, np.int32)
        self.offset = np.zeros(records, np.int32)
        self.depth = np.zeros(records, np.int16)
        self.in_use = np.zeros(records, np.bool_)
        self.lent = np.zeros(records, np.bool_)
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
        self._note(records, tokens)
        return records

    def _note(self, records: Records, tokens: Tokens) -> None:
        """Records that are in use from now on."""
        self.row[records], self.offset[records] = tokens.row, tokens.offset
        self.depth[records] = tokens.depth
        self.in_use[records] = True
        self._clock += 1
        self._written[records] = self._clock
        self.used += len(records)

    def tokens(self, records: Records) -> Tokens:
        """The tokens of records."""
        return Tokens(self.row[records], self.offset[records], self.depth[records])

    def release(self, records: Records) -> None:
        """Make distinct records in use free."""
        self._unuse(records)
        self._free.extend(records.tolist())

    def _unuse(self, records: Records) -> None:
        assert self.in_use[records].all(), "a record was released twice"
        self.in_use[records] = self.lent[records] = False
        self.used -= len(records)

    def oldest(self, count: int, spared: Records) -> Records:
        """Up to `count` records in use and not lent, those written first; of one write the last
        tokens first, since what comes after a missing token is computed again sooner or later.

        Args:
            spared: int32, records that are not given.

        Returns:
            int32, the oldest first.
        """
        offered = self.in_use & ~self.lent
        offered[spared] = False
        candidates = np.flatnonzero(offered)
        if len(candidates) > count:
            written = self._written[candidates]
            last = np.partition(written, count - 1)[count - 1]
            candidates = candidates[written <= last]
        order = np.lexsort((-self.offset[candidates], self._written[candidates]))
        return candidates[order[:count]].astype(np.int32)


class GroupedRecords(RecordTable):
    """Records that are used in order, group by group, and are free only as a whole group.

    Args:
        records: how many there are.
        group: records of a group; the last one may have fewer.
    """

    def __init__(self, records: int, group: int) -> None:
        super().__init__(records)
        self.group = group
        groups = -(-records // group)
        self._count = np.zeros(groups, np.int64)  # records in use
        self._empty = list(range(groups - 1, -1, -1))  # groups, as a stack
        self._in_empty = records  # records of these
        self._next = self._end = 0  # what the open group has left

    @property
    def free(self) -> int:
        """Records that can be taken."""
        return self._end - self._next + self._in_empty

    def _size(self, group: int) -> int:
        return min(self.group, self.records - group * self.group)

    def _is_open(self, group: int) -> bool:
        return self._next < self._end and self._next // self.group == group

    def _taken(self, group: int) -> int:
        """Records of a group in use that would be free without it."""
        return self._next - group * self.group if self._is_open(group) else self._size(group)

    def take(self, tokens: Tokens) -> Records:
        """See `RecordTable`; a group is full before the next one begins."""
        assert len(tokens) <= self.free, f"{len(tokens)} records wanted, {self.free} free"
        taken: list[int] = []
        while len(taken) < len(tokens):
            if self._next == self._end:
                first = self._empty.pop()
                self._next = first * self.group
                self._end = self._next + self._size(first)
                self._in_empty -= self._size(first)
            stop = min(self._end, self._next + len(tokens) - len(taken))
            taken.extend(range(self._next, stop))
            self._next = stop
        records = np.array(taken, np.int32)
        np.add.at(self._count, records // self.group, 1)
        self._note(records, tokens)
        return records

    def release(self, records: Records) -> None:
        """Let go of distinct records in use; a group none of which is in use is free."""
        self._unuse(records)
        np.subtract.at(self._count, records // self.group, 1)
        for group in np.unique(records // self.group).tolist():
            if self._count[group]:
                continue
            if self._is_open(group):
                self._next = group * self.group
            else:
                self._empty.append(group)
                self._in_empty += self._size(group)

    def oldest(self, count: int, spared: Records) -> Records:
        """The records in use of groups that make `count` of them free, or of as many as can: those
        written last longest ago, without groups of which a record is spared or lent."""
        groups = len(self._count)
        of = np.arange(self.records) // self.group
        stays = self._count == 0
        stays[np.unique(of[np.flatnonzero(self.lent)])] = True
        stays[np.unique(spared // self.group)] = True
        last = np.zeros(groups, np.int64)
        np.maximum.at(last, of, np.where(self.in_use, self._written, 0))
        candidates = np.flatnonzero(~stays)
        candidates = candidates[np.argsort(last[candidates], kind="stable")]
        sizes = np.array([self._taken(group) for group in candidates.tolist()], np.int64)
        gone = candidates[: int(np.searchsorted(np.cumsum(sizes), count)) + 1]
        return np.flatnonzero(self.in_use & np.isin(of, gone)).astype(np.int32)
