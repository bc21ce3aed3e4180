"""Which tokens stay: protected ones first, then by score, the newer of equals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import order


class Kept(Sequence[Ints]):
    """Sorted offsets each block keeps, int64 [count]; made block by block when they are asked for.

    Args:
        blocks: what was offered.
        counts: int64 [M], how many each keeps.
        row: int64 [M], where the block stands among those that keep a part of what they have; -1 elsewhere.
        starts: int64 [P + 1], where the offsets of each of these begin.
        offsets: int64, theirs, one block after the other.
    """

    def __init__(
        self, blocks: Blocks, counts: Ints, row: Ints, starts: Ints, offsets: Ints
    ) -> None:
        self._blocks = blocks
        self._counts = counts
        self._row = row
        self._starts = starts
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, index: int) -> Ints: ...
    @overload
    def __getitem__(self, index: slice) -> list[Ints]: ...
    def __getitem__(self, index: int | slice) -> Ints | list[Ints]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        row, count = int(self._row[index]), int(self._counts[index])
        if row >= 0:
            return self._offsets[self._starts[row] : self._starts[row + 1]]
        if count in (0, self._blocks.length[index]):
            return np.arange(count)
        tokens = self._blocks.tokens  # all it has, and that has gaps
        begin, end = np.searchsorted(tokens.block, [index % len(self), index % len(self) + 1])
        return tokens.offset[begin:end]


def kept(blocks: Blocks, counts: Ints, scorer: Scorer) -> Kept:
    """Tokens each block keeps on the device.

    The token view is made only if some block keeps a part of what it has, and only their tokens are ranked, in one sort.

    Args:
        blocks: what was offered.
        counts: int64 [M], how many each keeps, 0 <= count <= resident.
        scorer: which tokens matter.
    """
    parted = np.flatnonzero((counts > 0) & (counts < blocks.resident))
    row = np.full(len(blocks), -1, np.int64)
    row[parted] = np.arange(len(parted))
    starts = np.zeros(len(parted) + 1, np.int64)
    np.cumsum(counts[parted], out=starts[1:])
    if len(parted) == 0:
        return Kept(blocks, counts, row, starts, np.empty(0, np.int64))
    tokens = blocks.tokens
    asked = np.flatnonzero(row[tokens.block] >= 0)
    group = row[tokens.block[asked]]
    chosen = best(tokens, scored(scorer, tokens), asked, group, counts[parted])
    return Kept(blocks, counts, row, starts, tokens.offset[asked[chosen]])


def scored(scorer: Scorer, tokens: Tokens) -> Floats:
    """A scorer's answer, checked: one finite number a token."""
    scores = scorer.scores(tokens)
    assert scores.shape == tokens.block.shape, f"{scorer} scored {scores.shape}, not every token"
    assert np.isfinite(scores).all(), f"{scorer} gave a score that is not finite"
    return scores


def best(tokens: Tokens, scores: Floats, asked: Ints, group: Ints, counts: Ints) -> Bools:
    """The best tokens of each block: protected ones first, then the higher score, then the later position.

    Args:
        asked: int64 [S], indices of the tokens to choose from, increasing.
        group: int64 [S], 0 ... P - 1, not decreasing: their block.
        counts: int64 [P], how many to choose; no more than there are.

    Returns:
        bool [S], summing to sum(counts).
    """
    protected = tokens.protected[asked]
    left = counts - np.bincount(group[protected], minlength=len(counts))
    fits = left >= 0
    # where all protected ones fit, the others compete for what is left; elsewhere the protected ones compete
    competes = np.where(protected, ~fits[group], left[group] > 0)
    chosen = protected & fits[group]
    # backwards, because equals go by index and the later position is to come first
    rivals = np.flatnonzero(competes)[::-1]
    group = group[rivals]
    ranked = order(group, -scores[asked[rivals]])
    # `ranked` runs group by group, the best token first:  | best ... worst of 0 | best ... worst of 1 | ...
    sizes = np.bincount(group, minlength=len(counts))
    place = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    wanted = np.where(fits, left, counts)
    chosen[rivals[ranked[place < np.repeat(wanted, sizes)]]] = True
    return chosen
