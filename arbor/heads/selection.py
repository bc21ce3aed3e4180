"""Which tokens each KV head keeps of a block, where every head keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from arbor.retention.allocators.waterfill import rounded
from arbor.retention.base import (
    Allocator,
    Blocks,
    Bools,
    Floats,
    Ints,
    Scorer,
    SegmentingAllocator,
    TokenAllocator,
    Tokens,
)
from arbor.retention.head_budgets import (
    CellMover,
    Cells,
    Counter,
    HeadBudgets,
    Vacated,
    moved_out,
    vacated,
)
from arbor.retention.selection import (
    Selection,
    checked_leaving,
    checked_scores,
    rows_by_size,
    select,
)

# the view of some tokens in which each KV head's come one after the other, [C * T]
ByHead = Callable[[Tokens], Tokens]
# given scores, protected tokens, sizes of blocks and how many each loses: the heads, sources and
# targets of the moves, and the slots that leave, by a kernel; None: it cannot
Mover = Callable[
    [Floats, Bools, Ints, Ints],
    tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer], Bools] | None,
]


@dataclass(frozen=True)
class SharedCells:
    """KV heads that keep different numbers of tokens, and so hold some in each other's cells.

    Attributes:
        budgets: how many each keeps.
        layer: int64 [C], of each KV head.
        holders: the KV heads whose tokens lie in the cells of some tokens' slots, [C, T]; None: its
            own in each.
        counter, mover: kernels, see `Cells` and `moved_out`; None: numpy does it.
    """

    budgets: HeadBudgets
    layer: Ints
    holders: Callable[[Tokens], NDArray[np.integer] | None]
    counter: Counter | None = None
    mover: CellMover | None = None

    @property
    def pools(self) -> int:
        """See `HeadBudgets.pools`."""
        return self.budgets.pools(self.layer)


class HeadScorer:
    """A scorer as allocators see it where each KV head keeps tokens of its own.

    All heads keep equally many tokens of a block. If a block keeps one more, each head keeps its
    next best, so the j-th best place of a block is worth the mean over the heads of their j-th best
    scores: with the largest such means kept, the sum of what all heads keep is the largest there
    is. Places are shown as tokens: the j-th best is the one whose mean score ranks j-th.

    Args:
        by_head: shows it what each head holds.
        mover: says what moves, the same as numpy; None: numpy does.
        shared: heads keep different numbers; None: all keep equally many of a block.
    """

    def __init__(
        self,
        scorer: Scorer,
        by_head: ByHead,
        mover: Mover | None = None,
        shared: SharedCells | None = None,
    ) -> None:
        self.mover = mover
        self.shared = shared
        self._scorer = scorer
        self._by_head = by_head
        self._known: tuple[Tokens, Floats] | None = None

    @property
    def observes(self) -> bool:
        """See `Scorer`."""
        return self._scorer.observes

    def of_heads(self, tokens: Tokens) -> Floats:
        """The score of what each head holds in the tokens' slots, [C, T].

        Raises:
            UsageError: the scorer's answer breaks its protocol.
        """
        if self._known is None or self._known[0] is not tokens:
            count = len(tokens.offset)
            scores = checked_scores(self._scorer, self._by_head(tokens))
            self._known = tokens, scores.reshape(-1 if count else 1, count)
        return self._known[1]

    def each_head(self, tokens: Tokens) -> Iterator[tuple[Tokens, Floats]]:
        """What each head holds in the tokens' slots, T tokens, and their scores, [T]."""
        held, count = self._by_head(tokens), len(tokens.offset)

        def part(name: str, begin: int) -> Callable[[Tokens], NDArray[np.generic]]:
            return lambda _: getattr(held, name)[begin : begin + count]

        for head, scores in enumerate(self.of_heads(tokens)):
            names = [each.name for each in fields(Tokens) if each.name != "kv"]
            yield (
                Tokens.when_read({name: part(name, head * count) for name in names}, kv=tokens.kv),
                scores,
            )

    def moves(self, scores: Floats, protected: Bools, sizes: Ints, keep: Ints) -> Vacated:
        """What heads move where each keeps its best `keep` tokens; arguments as in `Cells`."""
        moved = None
        if self.mover is not None:
            moved = self.mover(scores, protected, sizes, sizes - keep)
        if moved is not None:
            head, source, target, leaving = moved
            return Vacated(head, source, head, target, leaving)
        heads = len(scores)
        cells = Cells(scores, None, np.arange(heads), protected, sizes, keep)
        counts = np.broadcast_to(keep, (heads, len(keep)))
        return vacated(cells.stays(counts, competes=False), heads)

    def of_some(self, blocks: Blocks, parted: Ints) -> tuple[Tokens, Floats]:
        """The tokens of some blocks and their scores by head; of scores known already a part.

        Args:
            parted: int64 [P], indices of the blocks, increasing.
        """
        if self._known is None or self._known[0] is not blocks.__dict__.get("tokens"):
            tokens = blocks.see(parted)
            return tokens, self.of_heads(tokens)
        tokens, scores = self._known
        some = tokens.only(parted)
        if some is tokens:
            return tokens, scores
        asked = np.zeros(len(blocks), np.bool_)
        asked[parted] = True
        return some, np.compress(asked[tokens.block], scores, 1)

    def scores(self, tokens: Tokens) -> Floats:
        """See `Scorer`."""
        scores = self.of_heads(tokens)
        if not scores.size:
            return np.zeros(scores.shape[1])
        if (scores[-1] == scores[0]).all() and (scores == scores[0]).all():
            shared: Floats = scores[0].astype(np.float64)
            return shared
        means: Floats = scores.mean(0).astype(np.float64)
        free = np.flatnonzero(~tokens.protected)
        if tokens.block[0] == tokens.block[-1]:
            return means  # of one block how many stay does not depend on them
        if len(free):
            block = tokens.block[free]
            sizes = np.diff(np.flatnonzero(np.diff(block, prepend=-1, append=block[-1] + 1)))
            pools = len(scores) if self.shared is None else self.shared.pools
            means[free] = ranked_means(np.take(scores, free, 1), means[free], sizes, pools)
        return means


class HeadSelection(Selection):
    """A selection in which each KV head keeps its own tokens of the blocks that keep a part.

    The tokens that leave, in the words of `Selection`, are the slots that leave: what heads keep of
    them moves to slots that stay.

    Attributes:
        moved: what heads move; slots are indices into `tokens`.
        tokens: of the blocks that keep a part, or of all blocks (`whole`).
        head_credit: float64 [C, T], what the allocator credits each head's tokens with; None:
            nothing of single heads.
    """

    def __init__(
        self,
        blocks: Blocks,
        counts: Ints,
        tokens: Tokens,
        moved: Vacated,
        *,
        whole: bool = False,
        credit: Floats | None = None,
        head_credit: Floats | None = None,
    ) -> None:
        self.moved = moved
        self.tokens = tokens
        self.head_credit = head_credit
        super().__init__(blocks, counts, tokens, ~moved.leaving, whole=whole, credit=credit)


def select_by_head(
    blocks: Blocks, room: int, allocator: Allocator, scorer: HeadScorer
) -> tuple[Ints, Selection]:
    """`select` where each KV head keeps its own tokens.

    The allocator says how many tokens each block keeps, and one that divides the sequence how many
    of each segment; each head keeps its best ones. One with ``own_segments`` divides what each
    head holds by itself.

    Raises:
        UsageError: an answer of the allocator or the scorer that breaks its protocol.
    """
    if isinstance(allocator, TokenAllocator) and getattr(allocator, "own_segments", False):
        return _by_own_segments(blocks, room, allocator, scorer)
    counts, chosen = select(blocks, room, allocator, scorer)
    if isinstance(allocator, SegmentingAllocator):
        gone = _of_all(blocks, chosen)
        if gone.any():
            segment = allocator.segment_of(blocks, room, scorer)
            return counts, _by_segment(blocks, counts, gone, segment, scorer, chosen.credit)
        return counts, chosen
    parted = np.flatnonzero((counts > 0) & (counts < blocks.resident))
    if not len(parted):
        return counts, chosen
    tokens, scores = scorer.of_some(blocks, parted)
    resident = blocks.resident[parted]
    if scorer.shared is not None:
        shared = scorer.shared
        cells = Cells(
            scores,
            shared.holders(tokens),
            shared.layer,
            tokens.protected,
            resident,
            counts[parted],
            shared.counter,
        )
        moved = moved_out(shared.budgets, cells, shared.mover)
        return counts, HeadSelection(blocks, counts, tokens, moved)
    moved = scorer.moves(scores, tokens.protected, resident, counts[parted])
    return counts, HeadSelection(blocks, counts, tokens, moved)


@dataclass(frozen=True)
class _Known:
    """A scorer of the tokens of one offer, whose scores are known."""

    observes: ClassVar[bool] = False

    known: Floats

    def scores(self, tokens: Tokens) -> Floats:
        return self.known


def _by_own_segments(
    blocks: Blocks, room: int, allocator: TokenAllocator, scorer: HeadScorer
) -> tuple[Ints, HeadSelection]:
    """Each head keeps what the allocator says of its own tokens.

    A slot holds one token of each head, so a block keeps as many tokens in all heads: the mean of
    what they would keep. A head that would keep fewer keeps its best others too, and one that would
    keep more gives up its worst.
    """
    tokens = blocks.tokens
    chosen, priority, credits = [], [], []
    for held, scores in scorer.each_head(tokens):
        gone, credit = checked_leaving(allocator, blocks.showing(held), room, _Known(scores))
        kept = np.ones(len(scores), np.bool_)
        kept[gone] = False
        rank = np.empty(len(scores))
        rank[np.lexsort((held.position, scores, kept))] = np.arange(len(scores))
        chosen.append(np.bincount(tokens.block[kept], minlength=len(blocks)))
        priority.append(rank)
        credits.append(np.zeros(len(scores)) if credit is None else credit)
    wanted = np.mean(chosen, 0)
    counts = rounded(wanted, blocks.floor, blocks.resident, int(np.rint(wanted.sum())))
    parted = (counts > 0) & (counts < blocks.resident)
    leaving = (counts == 0)[tokens.block]
    at = np.flatnonzero(parted[tokens.block])
    remembered = np.array(credits)
    sizes, keep = blocks.resident[parted], counts[parted]
    moved = _moved(scorer, np.array(priority), tokens.protected, leaving, at, sizes, keep)
    credit = remembered.mean(0)
    return counts, HeadSelection(
        blocks, counts, tokens, moved, whole=True, credit=credit, head_credit=remembered
    )


def _moved(
    scorer: HeadScorer,
    scores: Floats,
    stays: Bools,
    leaving: Bools,
    at: Ints,
    sizes: Ints,
    keep: Ints,
) -> Vacated:
    """What heads move where runs of tokens keep a part.

    Args:
        scores: [C, T].
        stays: bool [T], tokens that stay in any case.
        leaving: bool [T], tokens that leave although their run keeps no part.
        at: int64 [N], the tokens of the runs, one run after the other.
        sizes, keep: int64 [P], tokens of each run, and how many stay.
    """
    leaving = leaving.copy()
    if not len(at):
        none = np.empty(0, np.int64)
        return Vacated(none, none, none, none, leaving)
    some = np.take(scores, at, 1)
    cell, source, into, target, gone = scorer.moves(some, stays[at], sizes, keep)
    leaving[at] = gone
    return Vacated(cell, at[source], into, at[target], leaving)


def _of_all(blocks: Blocks, chosen: Selection) -> Bools:
    """Which tokens of an offer leave, bool [T]."""
    tokens = blocks.tokens
    block, offset = chosen.leaving()
    longest = int(tokens.offset.max(initial=0)) + 1
    gone: Bools = np.isin(tokens.block * longest + tokens.offset, block * longest + offset)
    return gone


def _by_segment(
    blocks: Blocks,
    counts: Ints,
    gone: Bools,
    segment: Ints,
    scorer: HeadScorer,
    credit: Floats | None,
) -> HeadSelection:
    """Each head gives up as many tokens of each segment of a block as the allocator does.

    Args:
        blocks, counts: the offer, and what each block keeps.
        gone: bool [T], the tokens that the allocator lets go.
        segment: int64 [T], see `SegmentingAllocator.segment_of`.
        credit: float64 [T], to be remembered of tokens that stay; None: nothing.
    """
    tokens, stays = blocks.tokens, segment < 0
    # runs of one segment in one block; tokens that stay belong to that of the one before them
    latest = np.maximum.accumulate(np.where(stays, 0, np.arange(len(segment))))
    same = tokens.block[latest] == tokens.block
    segment = np.where(same, segment[latest], -1)
    begins = np.flatnonzero(
        np.diff(tokens.block, prepend=-1).astype(bool) | np.diff(segment, prepend=-2).astype(bool)
    )
    sizes = np.diff(begins, append=len(segment))
    lose = np.add.reduceat(gone, begins, dtype=np.int64)
    parted = (lose > 0) & (lose < sizes)
    at = np.flatnonzero(np.repeat(parted, sizes))
    keep = (sizes - lose)[parted]
    moved = _moved(scorer, scorer.of_heads(tokens), stays, gone, at, sizes[parted], keep)
    return HeadSelection(blocks, counts, tokens, moved, whole=True, credit=credit)


def ranked_means(scores: Floats, means: Floats, sizes: Ints, pools: int | None = None) -> Floats:
    """The mean over heads of their j-th best scores, of the token whose mean ranks j-th in its
    block.

    Where heads share their cells, it is the mean over the pools of the mean of their j-th best
    scores, as many as a pool has heads.

    Args:
        scores: [C, T], block after block.
        means: float64 [T], over the heads.
        sizes: int64 [P], tokens of each block; summing to T.
        pools: of neighbouring heads, equally many in each; None: a head is one.

    Returns:
        float64 [T].

    Example:
        Two heads that prefer opposite tokens would each keep a good one:

        >>> scores = np.array([[5.0, 1.0, 0.0], [1.0, 4.0, 0.0]])
        >>> ranked_means(scores, scores.mean(0), np.array([3])).tolist()
        [4.5, 1.0, 0.0]
        >>> ranked_means(scores, scores.mean(0), np.array([3]), pools=1).tolist()
        [4.5, 1.0, 0.0]
        >>> scores = np.array([[5.0, 4.0, 0.0], [1.0, 0.0, 0.0]])
        >>> ranked_means(scores, scores.mean(0), np.array([3]), pools=1).tolist()
        [4.5, 0.5, 0.0]
    """
    pools = pools or len(scores)
    each = len(scores) // pools
    result = np.empty(len(means))
    for _, at, inside in rows_by_size(sizes, np.cumsum(sizes) - sizes):
        table = _table(scores, at, inside)
        if each > 1:
            table = table.reshape(pools, each, *at.shape).transpose(0, 2, 3, 1)
            table = table.reshape(pools, len(at), -1)
        table.sort(-1)
        if each > 1:
            table = table.reshape(pools, *at.shape, each).mean(-1, dtype=np.float64)
        best = table.mean(0, dtype=np.float64)
        order = np.argsort(np.where(inside, means[at], np.inf), axis=-1, kind="stable")
        # padding is the last of both
        result[np.take_along_axis(at, order, -1)[inside]] = best[inside]
    return result


def _table(scores: Floats, at: Ints, inside: Bools) -> Floats:
    """The scores of blocks by row, [C, R, w]; infinite where there is no token."""
    # an index would put the heads last in memory, and sorting then takes several times as long
    table: Floats = np.take(scores, at, 1)
    if not inside.all():
        table[:, ~inside] = np.inf
    return table
