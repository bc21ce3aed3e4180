"""HeadBudgets: how many of a block's tokens each KV head keeps, where heads keep different
numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Bools, Floats, Ints
from arbor.retention.ordering import order
from arbor.retention.selection import worst

HeadShares = Literal["equal", "adaptive", "pyramid"]


@dataclass(frozen=True)
class Cells:
    """The cells of some blocks, C of them in each of T slots; each holds a token for a KV head.

    Attributes:
        score: [C, T], of what lies in each cell; protected tokens +inf, what leaves before them
            -inf.
        holder: int64 [C, T], the KV head whose token lies there.
        layer: int64 [C], of each KV head.
        sizes: int64 [P], slots of each block; summing to T.
        keep: int64 [P], slots that each block keeps.
        guarded: int64 [P], slots of each block whose tokens stay in every head.
    """

    score: Floats
    holder: Ints
    layer: Ints
    sizes: Ints
    keep: Ints
    guarded: Ints

    @property
    def block(self) -> Ints:
        """The block of each slot, int64 [T]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def held(self) -> Ints:
        """Tokens that each KV head holds of each block, int64 [P, C]."""
        heads, blocks = len(self.layer), len(self.sizes)
        numbers = (self.block * heads + self.holder).ravel()
        return np.bincount(numbers, minlength=blocks * heads).reshape(blocks, heads)

    def lowest(self, score: Floats, group: NDArray[np.integer], keep: Ints) -> Bools:
        """The lowest scores of each block and group, bool [C, T]: all but as many as stay.

        Of equals the one in the earlier slot is lower, in one slot that of the lower cell.

        Args:
            score: [C, T].
            group: [C, T], or [C, 1] if the same in every slot; less than Q.
            keep: int64 [P, Q], how many stay of each block and group, at most what it has.
        """
        heads, count = score.shape
        groups = keep.shape[1]
        last = len(self.sizes) * groups
        number = self.block[:, None] * groups + np.broadcast_to(group.T, (count, heads))
        number = number.ravel().astype(np.int16 if last < 1 << 15 else np.int64)
        order = np.argsort(number, kind="stable")  # of few groups by their digits, in O(n)
        size = np.bincount(number, minlength=last)
        gone = np.empty(heads * count, np.bool_)
        gone[order] = worst(score.T.ravel()[order], size, size - keep.ravel())
        return gone.reshape(count, heads).T


class HeadBudgets(Protocol):
    """How a block's room is divided among KV heads."""

    def pools(self, layer: Ints) -> Ints:
        """Which KV heads share their cells, by the number of their pool, int64 [C].

        Args:
            layer: int64 [C], of each KV head.
        """
        ...

    def stays(self, cells: Cells) -> Bools:
        """The tokens that stay, bool [C, T]: of each block and pool as many as the pool has heads
        in the slots that the block keeps."""
        ...


@dataclass(frozen=True)
class Adaptive:
    """The heads of a layer compete for its cells (AdaKV, Feng et al. 2024, algorithm 1).

    Of a block that keeps k slots a head keeps at least its best ``floor(safeguard * k)`` tokens;
    the best of all others of the layer fill the rest.
    Differs: AdaKV divides what a layer keeps of one sequence; here a path is several blocks, and
    how many tokens each keeps is the same in every layer. kvpress masks what leaves and frees
    nothing; here heads take each other's cells.

    Args:
        safeguard: the part of an equal share that every head keeps (alpha, 0.2 as published).
    """

    safeguard: float = 0.2

    def pools(self, layer: Ints) -> Ints:
        return layer

    def stays(self, cells: Cells) -> Bools:
        floor = np.floor(self.safeguard * cells.keep + 1e-9).astype(np.int64)
        safe = ~cells.lowest(cells.score, cells.holder, np.minimum(floor[:, None], cells.held))
        score = np.where(safe, np.inf, cells.score)
        room = cells.keep[:, None] * np.bincount(cells.layer)
        stays: Bools = ~cells.lowest(score, cells.layer[:, None], room)
        return stays


@dataclass(frozen=True)
class Pyramid:
    """Lower layers keep more tokens than higher ones (PyramidKV, Cai et al. 2024, section 3.2).

    Of what a block keeps beside its protected tokens, m in the mean over layers, the last layer
    keeps m / beta and the first 2 m - m / beta; between them it falls linearly. A head that has
    fewer leaves the difference to the others. The heads of a layer keep equally many.
    Differs: the published budgets are of one prompt; here they are of each block.

    Args:
        beta: how steeply it falls (20 as published); 1: equal budgets.
    """

    beta: float = 20.0

    def pools(self, layer: Ints) -> Ints:
        return np.zeros_like(layer)

    def stays(self, cells: Cells) -> Bools:
        stays: Bools = ~cells.lowest(cells.score, cells.holder, self._counts(cells))
        return stays

    def _counts(self, cells: Cells) -> Ints:
        """Tokens that each head keeps of each block, int64 [P, C]."""
        heads, blocks, held = len(cells.layer), len(cells.sizes), cells.held
        layers = int(cells.layer.max()) + 1
        falls = np.linspace(2 - 1 / self.beta, 1 / self.beta, layers)[cells.layer]
        least = np.minimum(np.minimum(cells.guarded, cells.keep)[:, None], held)
        wanted = heads * cells.keep
        low, high = np.zeros(blocks), np.full(blocks, float(cells.sizes.max()) * self.beta)
        for _ in range(60):  # the largest multiple of the shares that fits
            middle = (low + high) / 2
            filled = np.minimum(least + middle[:, None] * falls, held).sum(1)
            low = np.where(filled <= wanted, middle, low)
            high = np.where(filled <= wanted, high, middle)
        shares = np.minimum(least + low[:, None] * falls, held)
        counts = np.minimum(np.floor(shares + 1e-6).astype(np.int64), held)
        left = wanted - counts.sum(1)
        # to 1e-6: shares equal on paper differ in their last bits
        rest = np.where(counts < held, np.round(shares - counts, 6), -np.inf)
        place = np.argsort(np.argsort(-rest, 1, kind="stable"), 1, kind="stable")
        counts += (place < left[:, None]) & (counts < held)
        assert (counts.sum(1) == wanted).all(), "what heads keep fills the cells"
        return counts


def vacated(
    stays: Bools, pools: Ints, protected: Bools, sizes: Ints, keep: Ints
) -> tuple[Ints, Ints, Ints, Ints, Bools]:
    """The slots that leave, and what moves out of their cells.

    Of each block the first slots leave that are not protected; where more must, the first of the
    protected ones. So what stays moves to a later slot.

    Args:
        stays: bool [C, T], tokens that stay, see `HeadBudgets.stays`.
        pools: int64 [C], see `HeadBudgets.pools`.
        protected: bool [T].
        sizes: int64 [P], slots of each block.
        keep: int64 [P], slots that each keeps.

    Returns:
        cells and slots of the sources, then of the targets, int64 [m] each; the slots that leave,
        bool [T].

    Example:
        Of two heads of a layer, the first keeps both tokens and the second none: slot 0 leaves,
        and what the first has there moves to the second's cell of slot 1.

        >>> stays = np.array([[True, True], [False, False]])
        >>> none = np.array([False, False])
        >>> moved = vacated(stays, np.array([0, 0]), none, np.array([2]), np.array([1]))
        >>> [each.tolist() for each in moved]
        [[0], [0], [1], [1], [True, False]]
    """
    count = stays.shape[1]
    block = np.repeat(np.arange(len(sizes)), sizes)
    sequence = order(block, protected)
    begins = np.cumsum(sizes) - sizes
    leaving = np.zeros(count, np.bool_)
    leaving[sequence] = np.arange(count) - begins[block] < (sizes - keep)[block]

    def listed(chosen: Bools) -> tuple[Ints, Ints]:
        cell, slot = np.nonzero(chosen)
        # heads that move out of cells of their own move into such where they can
        at = order(block[slot], pools[cell], cell, slot)
        return cell[at], slot[at]

    return *listed(stays & leaving), *listed(~stays & ~leaving), leaving


def pooled_means(scores: Floats, means: Floats, pools: Ints, sizes: Ints) -> Floats:
    """What one more slot of a block is worth, where heads share their cells, [T].

    The j-th best slot is worth the mean over the pools of the mean of their j-th best cells, as
    many as a pool has heads; it is that of the slot whose mean score ranks j-th in its block.

    Args:
        scores: [C, T], of what lies in each cell, block after block.
        means: float64 [T], over the cells.
        pools: int64 [C], see `HeadBudgets.pools`; of as many heads each.
        sizes: int64 [P], slots of each block; summing to T.

    Returns:
        float64 [T].

    Example:
        >>> scores = np.array([[5.0, 4.0], [1.0, 0.0]])
        >>> pooled_means(scores, scores.mean(0), np.array([0, 0]), np.array([2])).tolist()
        [4.5, 0.5]
    """
    cells, count = scores.shape
    block = np.repeat(np.arange(len(sizes)), sizes)
    heads = cells // (int(pools.max()) + 1)
    where = np.broadcast_to(block, scores.shape)
    pool = np.broadcast_to(pools[:, None], scores.shape)
    rising = np.lexsort((scores.ravel(), where.ravel(), pool.ravel()))
    best = scores.ravel()[rising].reshape(-1, count, heads).mean(2).mean(0)
    by_mean = np.lexsort((means, block))
    result = np.empty(count, np.float64)
    result[by_mean] = best
    return result


def as_cells(
    scores: Floats,
    holder: NDArray[np.integer] | None,
    layer: Ints,
    protected: Bools,
    sizes: Ints,
    keep: Ints,
) -> Cells:
    """The cells of some blocks, in whose scores protected tokens come first; where a block cannot
    keep all of them, others leave first.

    Args:
        scores: [C, T], finite.
        holder: [C, T]; None: each cell holds a token of its own head.
        layer: int64 [C].
        protected: bool [T].
        sizes: int64 [P], slots of each block, >= 1; summing to T.
        keep: int64 [P], slots that each keeps, >= 1.
    """
    heads = np.broadcast_to(np.arange(len(layer))[:, None], scores.shape)
    ends = np.cumsum(sizes)
    guarded = np.add.reduceat(protected, ends - sizes, dtype=np.int64)
    score = scores.astype(np.float64)
    tight = np.repeat(guarded > keep, sizes)
    score[:, protected & ~tight] = np.inf
    score[:, tight & ~protected] = -np.inf
    return Cells(
        score=score,
        holder=heads if holder is None else holder.astype(np.int64),
        layer=layer,
        sizes=sizes,
        keep=keep,
        guarded=guarded,
    )
