"""Attention received by each token of some trees: flat arrays that survive eviction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arbor.retention.alpha import DEFAULT_ALPHA
from arbor.retention.base import Floats, Ints
from arbor.retention.token_kv import LATELY
from arbor.support.growable import grown

_CLOSED = -1  # capacity of a block that was never opened


class AttentionColumns(NamedTuple):
    """Statistics of T tokens; the fields are those of `Tokens`.

    Attributes:
        mass: float64 [T], attention received from queries that could see it, summed; its own
            included, as in H2O (ArborKV counts those after the block only).
        latest: float64 [T], attention received from the last query that could see it: the mean over
            the rows of the last forward that could.
        queries: int64 [T], queries that could see it, its own included.
        activated: int64 [T], `queries` when `latest` last reached the threshold, or else after the
            forward that wrote it; 0 = not written yet.
        recurrence: int64 [T], most queries between two such times (LazyEviction's MRI); 0 = the
            threshold was not reached since it was written.
        lately: float64 [T], attention from the last queries that could see it: a sum in which each
            weighs `TokenStatistics.fading` of the one after it; rows of one forward weigh alike.
        credit: float64 [T], what an allocator remembers of it; 0 at first.
    """

    mass: Floats
    latest: Floats
    queries: Ints
    activated: Ints
    recurrence: Ints
    lately: Floats
    credit: Floats


_COUNTS = ("queries", "activated", "recurrence")


class TokenStatistics:
    """Attention statistics of all tokens of a forest, block after block in growable arrays.

    Eviction and rehydration change nothing here: a token that comes back has the figures it had.
    Only queries that could see a token age it, so an inactive branch does not age.

    Args:
        threshold: mean attention from which a token counts as activated; None: `DEFAULT_ALPHA`.
        lately: queries that `Tokens.lately` is about of.

    Attributes:
        fading: weight of a query's attention in `Tokens.lately`, once another one followed.
    """

    def __init__(self, threshold: float | None = None, lately: int = LATELY) -> None:
        self.threshold = DEFAULT_ALPHA if threshold is None else threshold
        self.fading = 1 - 1 / lately
        # where the used part of the token arrays ends; the first entry stands for unknown tokens
        self._end = 1
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(self._end, np.int64 if name in _COUNTS else np.float64)
            for name in AttentionColumns._fields
        }
        # by row; the token of block i at position p lies at shift[i] + p, shift = base - start
        self._base = np.array([], np.int64)
        self._shift = np.array([], np.int64)
        self._capacity = np.array([], np.int64)
        self._room = np.array([], np.int64)  # capacity of the stretch at `_base`, forgotten or not
        # mass of all tokens of the block, and queries that could see some token of it
        self._received = np.array([], np.float64)
        self._readers = np.array([], np.int64)

    def open(self, row: int, start: int, capacity: int) -> None:
        """Make room for a block of `capacity` tokens; an open block grows if it has to.

        Args:
            row: of the block.
            start: position of its first token on the path.
            capacity: tokens it may have.
        """
        size = row + 1
        self._base = grown(self._base, size)
        self._shift = grown(self._shift, size)
        self._received = grown(self._received, size)
        self._readers = grown(self._readers, size)
        self._capacity = grown(self._capacity, size, _CLOSED)
        self._room = grown(self._room, size)
        if self._capacity[row] == _CLOSED:
            if 0 < capacity <= self._room[row]:
                self._reuse(row, start)
            else:
                self._place(row, start, capacity)
        else:
            self.grow(row, capacity)

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the blocks of a tree that was dropped; other blocks may have their rows later."""
        known = [row for row in rows if row < len(self._capacity)]
        self._capacity[known] = _CLOSED
        self._received[known] = 0
        self._readers[known] = 0

    def grow(self, row: int, count: int) -> None:
        """Make room for an open block to have `count` tokens; moves its figures if it has to."""
        capacity = int(self._capacity[row])
        assert capacity != _CLOSED, f"block {row} is not open"
        if count <= capacity:
            return
        base = int(self._base[row])
        start = base - int(self._shift[row])
        self._place(row, start, max(count, 2 * capacity))
        moved = int(self._base[row])
        for values in self._columns.values():
            values[moved : moved + capacity] = values[base : base + capacity]

    def observe(
        self,
        owner: NDArray[np.integer],
        position: NDArray[np.integer],
        mass: NDArray[np.floating],
        queries: NDArray[np.integer],
    ) -> None:
        """Add the attention of one forward; one call per forward.

        Args:
            owner: int32 [S], row of each token seen; the tokens are distinct.
            position: int32 [S], their places on the path.
            mass: float32 [S], attention each received, summed over the rows that could see it.
            queries: int64 [S], number of these rows; tokens with 0 stay unchanged.
        """
        if not queries.all():
            some = queries > 0
            owner, position, mass, queries = owner[some], position[some], mass[some], queries[some]
        # numpy's fast paths need the dtypes of the arrays
        owner = owner.astype(np.int64)
        mass = mass.astype(np.float64)
        at = self._shift.take(owner)
        at += position
        columns = self._columns
        total = columns["queries"].take(at)
        written = total == 0
        total += queries
        columns["queries"][at] = total
        received = columns["mass"].take(at)
        received += mass
        columns["mass"][at] = received
        single = bool((queries == 1).all())  # a decode step of one path
        lately = columns["lately"].take(at)
        lately *= self.fading if single else np.power(self.fading, queries)
        lately += mass
        columns["lately"][at] = lately
        latest = mass if single else mass / queries
        columns["latest"][at] = latest
        # products with masks, since selections cost many times the arithmetic
        active = latest >= self.threshold
        activated = columns["activated"].take(at)
        since = total - activated
        longest = columns["recurrence"].take(at)
        np.maximum(longest, since * (active & ~written), out=longest)
        columns["recurrence"][at] = longest
        since *= active | written
        activated += since
        columns["activated"][at] = activated
        # a row that sees a token of a block sees its earlier ones: the maximum counts the readers
        np.add.at(self._received, owner, mass)
        rows = np.zeros(len(self._readers), np.int64)
        np.maximum.at(rows, owner, queries)
        self._readers += rows

    def remember(self, rows: Ints, offsets: Ints, credit: Floats) -> None:
        """Set what an allocator remembers of tokens; unknown ones are left out.

        Args:
            rows: int64 [T], of their blocks.
            offsets: int64 [T], places in these; the tokens are distinct.
            credit: float64 [T].
        """
        at = self._places(rows, offsets)
        self._columns["credit"][at[at > 0]] = credit[at > 0]

    def block_attention(self, rows: NDArray[np.integer]) -> Floats:
        """Mean attention mass a block received per query that could see it: a of ArborKV's MSVE.

            a_i = (1 / Q_i) sum_t A_i(t)

        Differs from the paper: its a_i is a sum over the queries after the block that grows with
        every decoded token; this is the mean, in [0, 1], and the block's own queries count too.

        Args:
            rows: int [M].

        Returns:
            float64 [M]; 0 for a block that no query could see yet, or that was never opened.
        """
        ids = np.asarray(rows, np.int64)
        known = ids < len(self._base)
        ids = ids[known]
        result = np.zeros(len(known))
        result[known] = self._received[ids] / np.maximum(self._readers[ids], 1)
        return result

    def view(
        self, row: int | NDArray[np.integer], offsets: NDArray[np.integer]
    ) -> AttentionColumns:
        """Statistics of tokens; zeros beyond a block's capacity, or if it was never opened.

        Args:
            row: of their block, or of each token's block, int [T].
            offsets: int [T], places in the block.
        """
        owner = np.broadcast_to(np.asarray(row, np.int64), offsets.shape)
        at = self._places(owner, np.asarray(offsets, np.int64))
        return AttentionColumns(**{name: column[at] for name, column in self._columns.items()})

    def makers(
        self, rows: Ints, sizes: Ints, offsets: Ints
    ) -> dict[str, Callable[[Any], NDArray[Any]]]:
        """The columns of `view`, each by a function, for `Columns.when_read`.

        Args:
            rows: int64 [P].
            sizes: int64 [P], tokens of each block; summing to T.
            offsets: int64 [T], places in their blocks, block after block, increasing in each.
        """

        @functools.cache
        def at() -> Ints:
            ends = np.cumsum(sizes)
            some = sizes > 0
            known = rows < len(self._base)
            if known.all() and (offsets[ends[some] - 1] < self._capacity[rows[some]]).all():
                return np.repeat(self._base[rows], sizes) + offsets
            return self._places(np.repeat(rows, sizes), offsets)

        def column(name: str) -> Callable[[Any], NDArray[Any]]:
            return lambda _: self._columns[name].take(at())

        return {name: column(name) for name in self._columns}

    def _places(self, owner: Ints, offsets: Ints) -> Ints:
        """Indices of tokens in the arrays, [T]; 0 for unknown ones."""
        last = len(self._base) - 1
        if last < 0:
            return np.zeros(len(offsets), np.int64)
        known = owner <= last
        owner = np.minimum(owner, last)
        known &= offsets < self._capacity[owner]
        at: Ints = np.where(known, self._base[owner] + offsets, 0)
        return at

    def _reuse(self, row: int, start: int) -> None:
        """Give a block the stretch that the row's last one had."""
        base, room = int(self._base[row]), int(self._room[row])
        for values in self._columns.values():
            values[base : base + room] = 0
        self._shift[row] = base - start
        self._capacity[row] = room

    def _place(self, row: int, start: int, capacity: int) -> None:
        base, self._end = self._end, self._end + capacity
        for name, values in self._columns.items():
            self._columns[name] = grown(values, self._end)
        self._base[row] = base
        self._shift[row] = base - start
        self._capacity[row] = self._room[row] = capacity
