"""HeadBudgets: how many of a block's tokens each KV head keeps, where heads keep different
numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Bools, Floats, Ints
from arbor.retention.selection import worst

HeadShares = Literal["equal", "adaptive", "pyramid"]


# tokens that each KV head holds of each block, [C, P], see `Cells.held`; None: it cannot
Counter = Callable[[NDArray[np.integer], Ints], Ints | None]


@dataclass(frozen=True)
class Cells:
    """The cells of some blocks, C of them in each of T slots; each holds a token for a KV head.

    Attributes:
        scores: [C, T], finite, of what lies in each cell.
        holder: whole numbers [C, T], the KV head whose token lies there; None: the cell's own.
        layer: int64 [C], of each KV head, each layer of as many.
        protected: bool [T], slots whose cells stay, as far as a block keeps so many.
        sizes: int64 [P], slots of each block, >= 1; summing to T.
        keep: int64 [P], slots that each block keeps, >= 1.
        counter: counts `held`, the same as numpy; None: numpy does.
    """

    scores: Floats
    holder: NDArray[np.integer] | None
    layer: Ints
    protected: Bools
    sizes: Ints
    keep: Ints
    counter: Counter | None = None

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.layer[-1]) + 1

    @cached_property
    def ranked(self) -> Floats:
        """The scores [C, T] in which protected tokens are +inf; where a block cannot keep all of
        them, all others -inf."""
        ends = np.cumsum(self.sizes)
        guarded = np.add.reduceat(self.protected, ends - self.sizes, dtype=np.int64)
        tight = np.repeat(guarded > self.keep, self.sizes)
        score = self.scores.copy()
        score[:, self.protected & ~tight] = np.inf
        score[:, tight & ~self.protected] = -np.inf
        return score

    @cached_property
    def held(self) -> Ints:
        """Tokens that each KV head holds of each block, int64 [C, P]."""
        if self.counter is not None and self.holder is not None:
            counted = self.counter(self.holder, self.sizes)
            if counted is not None:
                return counted
        return self.held_in(np.ones(self.scores.shape[1], np.bool_))

    def held_in(self, slots: Bools) -> Ints:
        """Tokens that each KV head holds of each block in some slots (bool [T]), int64 [C, P]."""
        heads, blocks = len(self.layer), len(self.sizes)
        block = np.repeat(np.arange(blocks), self.sizes)[slots]
        if self.holder is None:
            return np.broadcast_to(np.bincount(block, minlength=blocks), (heads, blocks))
        numbers = self.holder[:, slots].astype(np.int64)
        numbers *= blocks
        numbers += block
        return np.bincount(numbers.ravel(), minlength=heads * blocks).reshape(heads, blocks)

    def stays(self, counts: Ints, competes: bool) -> Bools:
        """The tokens that stay, bool [C, T].

        Args:
            counts: int64 [C, P], at most `held`: the best tokens that each head keeps of each
                block.
            competes: of each layer the best others stay too, until the slots are full that the
                block keeps; else nothing more.
        """
        best = self._best_of_heads(counts)
        if not competes:
            return best
        # after what is protected, before all others
        ahead = np.finfo(self.ranked.dtype).max
        return self._best_of_layers(np.where(best & np.isfinite(self.ranked), ahead, self.ranked))

    def _best_of_heads(self, keep: Ints) -> Bools:
        """The best tokens of each KV head and block, bool [C, T].

        Of equals the one in the later slot is better, in one slot that in the later cell.

        Args:
            keep: int64 [C, P], at most `held`.
        """
        heads, count = self.scores.shape
        lose = (self.held - keep).ravel()
        if self.holder is None:
            gone = worst(self.ranked.ravel(), self.held.ravel(), lose)
            return ~gone.reshape(heads, count)
        order = np.argsort(self.holder.T.ravel(), kind="stable")
        stays = np.empty(heads * count, np.bool_)
        stays[order] = ~worst(self.ranked.T.ravel()[order], self.held.ravel(), lose)
        return stays.reshape(count, heads).T

    def _best_of_layers(self, score: Floats) -> Bools:
        """The best cells of each layer and block, as many as the slots that it keeps have; bool
        [C, T]. Equals as in `_best_of_heads`.

        Args:
            score: [C, T].
        """
        heads, count = self.scores.shape
        each = heads // self.layers
        flat = score.reshape(self.layers, each, count).transpose(0, 2, 1).ravel()
        sizes = np.tile(self.sizes * each, self.layers)
        gone = worst(flat, sizes, np.tile((self.sizes - self.keep) * each, self.layers))
        return ~gone.reshape(self.layers, count, each).transpose(0, 2, 1).reshape(heads, count)


class HeadBudgets(Protocol):
    """How a block's room is divided among KV heads.

    Attributes:
        competes: see `Cells.stays`.
    """

    competes: ClassVar[bool]

    def pools(self, layer: Ints) -> int:
        """How many pools of neighbouring KV heads share their cells, equally many in each.

        Args:
            layer: int64 [C], of each KV head.
        """
        ...

    def counts(self, cells: Cells) -> Ints:
        """The best tokens that each head keeps of each block, int64 [C, P], at most `Cells.held`.

        In all as many as the cells of the slots that the block keeps; at most that, if heads
        compete for the rest.
        """
        ...

    def evened(self) -> Self:
        """These budgets where all heads keep equally many, as far as they hold so many."""
        ...


@dataclass(frozen=True)
class Adaptive:
    """The heads of a layer compete for its cells (AdaKV, Feng et al. 2024, algorithm 1).

    Of a block that keeps k slots a head keeps at least its best ``ceil(safeguard * k)`` tokens; the
    best of all others of the layer fill the rest.
    Differs: AdaKV divides what a layer keeps of one sequence; here a path is several blocks, and
    how many tokens each keeps is the same in every layer. It rounds a share down; rounded up,
    heads keep something of short blocks too. kvpress masks what leaves and frees nothing; here
    heads take each other's cells.

    Args:
        safeguard: the part of an equal share that every head keeps (alpha, 0.2 as published).
    """

    competes: ClassVar[bool] = True

    safeguard: float = 0.2

    def pools(self, layer: Ints) -> int:
        return int(layer[-1]) + 1

    def counts(self, cells: Cells) -> Ints:
        floor = np.ceil(self.safeguard * cells.keep - 1e-9).astype(np.int64)
        counts: Ints = np.minimum(floor, cells.held)
        return counts

    def evened(self) -> Self:
        return replace(self, safeguard=1.0)


@dataclass(frozen=True)
class Pyramid:
    """Lower layers keep more tokens than higher ones (PyramidKV, Cai et al. 2024, section 3.2).

    Of what a block keeps besides its protected tokens, m in the mean over layers, the last layer
    keeps m / beta and the first 2 m - m / beta; between them it falls linearly. A head that has
    fewer leaves the difference to the others. The heads of a layer keep equally many.
    Differs: the published budgets are of one prompt; here they are of each block.

    Args:
        beta: how steeply it falls (20 as published); 1: equal budgets.
    """

    competes: ClassVar[bool] = False

    beta: float = 20.0

    def pools(self, layer: Ints) -> int:
        return 1

    def counts(self, cells: Cells) -> Ints:
        heads, held = len(cells.layer), cells.held
        falls = np.linspace(2 - 1 / self.beta, 1 / self.beta, cells.layers)[cells.layer][:, None]
        least = cells.held_in(cells.protected)
        tight = least.sum(0) > heads * cells.keep
        least = np.where(tight, np.minimum(least, cells.keep), least)
        wanted = heads * cells.keep
        low = np.zeros(len(cells.sizes))
        high = low + float(held.max()) * self.beta
        for _ in range(60):  # the largest multiple of the shares that fits
            middle = (low + high) / 2
            fits = np.minimum(least + middle * falls, held).sum(0) <= wanted
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        shares = np.minimum(least + low * falls, held)
        counts = np.minimum(np.floor(shares + 1e-6).astype(np.int64), held)
        left = wanted - counts.sum(0)
        # to 1e-6: shares equal on paper differ in their last bits
        rest = np.where(counts < held, np.round(shares - counts, 6), -np.inf)
        place = np.argsort(np.argsort(-rest, 0, kind="stable"), 0, kind="stable")
        counts += (place < left) & (counts < held)
        assert (counts.sum(0) == wanted).all(), "what heads keep fills the cells"
        return counts

    def evened(self) -> Self:
        return replace(self, beta=1.0)


class Vacated(NamedTuple):
    """What moves out of the slots of some blocks that leave.

    Attributes:
        cell: whole numbers [m], cells of the sources.
        source: whole numbers [m], slots.
        into: whole numbers [m], cells of the targets.
        target: whole numbers [m], slots.
        leaving: bool [T], the slots that leave.
    """

    cell: NDArray[np.integer]
    source: NDArray[np.integer]
    into: NDArray[np.integer]
    target: NDArray[np.integer]
    leaving: Bools


def vacated(stays: Bools, pools: int) -> Vacated:
    """The slots that leave, and what moves out of their cells.

    Of g heads that share their cells, g tokens a slot leave: the k-th slot to leave is the first
    one in which any pool's token number (k - 1) g + 1 leaves. So no pool has more to move than
    cells become free, and always to a later slot.

    Args:
        stays: bool [C, T], tokens that stay, block after block; see `Cells.stays`.
        pools: of neighbouring heads, equally many in each.

    Example:
        Of two heads of a layer, the first keeps both tokens and the second none: slot 0 leaves,
        and what the first has there moves to the second's cell of slot 1.

        >>> moved = vacated(np.array([[True, True], [False, False]]), 1)
        >>> [each.tolist() for each in moved]
        [[0], [0], [1], [1], [True, False]]
    """
    heads, count = stays.shape
    each = heads // pools

    def listed(chosen: Bools) -> tuple[Ints, Ints]:
        """Pool by pool the cells and slots, in order of the slots."""
        at = np.flatnonzero(chosen.reshape(pools, each, count).transpose(0, 2, 1))
        pool, rest = np.divmod(at, count * each)
        slot, cell = np.divmod(rest, each)
        return pool * each + cell, slot

    leaving = np.zeros(count, np.bool_)
    dropped = listed(~stays)[1].reshape(pools, -1)
    leaving[dropped[:, ::each].min(0)] = True
    return Vacated(*listed(stays & leaving), *listed(~stays & ~leaving), leaving)


# what moves of some cells, given the counts of a `HeadBudgets`, whether heads compete, and the
# pools, by a kernel, the same as `vacated` says; None: it cannot
CellMover = Callable[[Cells, Ints, bool, int], Vacated | None]


def moved_out(budgets: HeadBudgets, cells: Cells, mover: CellMover | None = None) -> Vacated:
    """The slots that leave, and what moves out of them, as budgets divide the room."""
    counts, pools = budgets.counts(cells), budgets.pools(cells.layer)
    moved = None if mover is None else mover(cells, counts, budgets.competes, pools)
    return vacated(cells.stays(counts, budgets.competes), pools) if moved is None else moved
