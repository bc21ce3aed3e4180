"""All blocks of a forest as columns by row, and the trees' geometry for all of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import NEVER, Bools, Floats, Ints, normalised
from arbor.support.growable import grown
from arbor.tree import Node, NodeState


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


NO_PARENT = -1
FAR = int(np.iinfo(np.int64).max) // 2  # distances are added: no overflow
_ABSENT = -2  # the parent of an unknown block

# what an unknown block has for parent, depth, start, length, resident, last_used and tail
_UNKNOWN_INTS = np.array([_ABSENT, 0, 0, 0, 0, 0, 0])[:, None]
# and for value and confidence
_UNKNOWN_FLOATS = np.array([np.nan, 0.0])[:, None]
IntsLike = Sequence[int] | NDArray[np.integer]
FloatsLike = Sequence[float] | NDArray[np.floating]


class BlockTable:
    """Struct of arrays over the blocks of one or several trees.

    `refresh` reads the blocks touched since the last one, and no others. Each column is a view of
    the first `len(self)` entries, valid until the next `refresh`:

    parent: int64 [N], row; `NO_PARENT` for a root.
    depth: int64 [N], edges to the root.
    start: int64 [N], position of the first token on the path.
    length: int64 [N], tokens.
    resident: int64 [N], tokens of these on the device whose eviction frees a slot.
    last_used: int64 [N], clock of the last forward that read the block, 0 = none; `use` sets it.
    tail: int64 [N], resident tokens of the block's protected tail.
    value: float64 [N], the search's value; nan for an unvalued block.
    confidence: float64 [N], 1 - H / ln|V| at the boundary.
    open: bool [N], still being decoded.
    pruned: bool [N], given up by the search.
    held: the offsets of the resident tokens.

    A row of which neither the block nor a descendant was touched has no tokens and is far from
    everything. Geometry passes over the trees level by level: O(N) numbers in O(depth) calls of
    numpy.

    Args:
        protected_tail: length of a block's protected tail, in tokens.
        is_shared: whether other blocks use a slot too, int32 [n] -> bool [n]; None: none does.
    """

    def __init__(
        self, protected_tail: int = 0, is_shared: Callable[[NDArray[np.int32]], Bools] | None = None
    ) -> None:
        self._protected_tail = protected_tail
        self._is_shared = is_shared
        self.held = HeldTokens()
        self._size = 0
        self._ints = _UNKNOWN_INTS[:, :0]
        self._floats = _UNKNOWN_FLOATS[:, :0]
        self._flags = np.zeros((2, 0), np.bool_)
        self._show()
        self._touched: dict[int, Node] = {}  # by row
        self._forgotten = False
        self._levels = _Levels(self.depth, self.parent)

    def __len__(self) -> int:
        return self._size

    def touch(self, node: Node) -> None:
        """Have a block read at the next `refresh`: it is new or has changed."""
        self._touched[node.row] = node

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the blocks of a tree that was dropped; other blocks may have their rows later."""
        for row in rows:
            self._touched.pop(row, None)
        known = [row for row in rows if row < self._size]
        self._ints[:, known] = _UNKNOWN_INTS
        self._floats[:, known] = _UNKNOWN_FLOATS
        self._flags[:, known] = False
        self._forgotten = True

    def use(self, nodes: Iterable[Node], clock: int) -> None:
        """Set the clock of a forward that read these blocks."""
        rows = [node.row for node in nodes]
        self._reserve(max(rows, default=-1) + 1)
        self._ints[5, rows] = clock

    def refresh(self) -> None:
        """Read the touched blocks, and the unknown ancestors of new ones."""
        grown = self._reach(max(self._touched, default=-1) + 1)
        if self._touched:
            self._read(list(self._touched.values()))
        self._touched.clear()
        if grown or self._forgotten:
            self._forgotten = False
            self._levels = _Levels(self.depth, self.parent)

    def on_paths(self, leaf_ids: IntsLike) -> Bools:
        """Path*: blocks on the path of some leaf, bool [N]."""
        result = np.zeros(self._size, np.bool_)
        parent = self.parent
        at = np.asarray(leaf_ids, np.int64)
        while len(at):
            result[at] = True
            at = parent[at]
            at = at[at >= 0]
            at = at[~result[at]]
        return result

    def distances(self, leaf_ids: IntsLike) -> Ints:
        """Edges from each block to the nearest leaf, int64 [N], as in `ThoughtTree.distances`.

        Upwards each block takes the nearest leaf below it, downwards the nearest one through its
        parent. `FAR` without leaves.
        """
        levels = self._levels
        near = np.full(self._size, FAR, np.int64)
        near[levels.place[np.asarray(leaf_ids, np.int64)]] = 0
        for begin, end in reversed(levels.below_root):
            np.minimum.at(near, levels.parent[begin:end], near[begin:end] + 1)
        for begin, end in levels.below_root:
            through = near.take(levels.parent[begin:end])
            through += 1
            np.minimum(near[begin:end], through, out=near[begin:end])
        return near[levels.place]

    def reentry(self, leaf_ids: IntsLike, probabilities: FloatsLike) -> Floats:
        """Probability that a block is read again, float64 [N], at most 1.

        It is the sum over the leaves at or below the block.

        Args:
            leaf_ids: int [L], rows of the blocks the search may grow next.
            probabilities: float [L], the probability of each. Where several grow at once the sum is
                the union bound, cut at 1.
        """
        levels = self._levels
        total = np.zeros(self._size)
        at = levels.place[np.asarray(leaf_ids, np.int64)]
        np.add.at(total, at, np.asarray(probabilities, np.float64))
        for begin, end in reversed(levels.below_root):
            np.add.at(total, levels.parent[begin:end], total[begin:end])
        result: Floats = np.minimum(total, 1.0)[levels.place]
        return result

    def soonest(self, leaf_ids: IntsLike, waits: IntsLike) -> Ints:
        """When each block is needed, int64 [N]; `NEVER` if no path needs it.

        It is the shortest wait of the leaves at or below the block.

        Args:
            leaf_ids: int [L], rows of the leaves whose paths are needed.
            waits: int [L], waves until then.
        """
        levels = self._levels
        wait = np.full(self._size, NEVER)
        np.minimum.at(wait, levels.place[np.asarray(leaf_ids, np.int64)], waits)
        for begin, end in reversed(levels.below_root):
            np.minimum.at(wait, levels.parent[begin:end], wait[begin:end])
        return wait[levels.place]

    def expected(self, scores: Mapping[int, float] | None = None) -> Floats:
        """The value of each block to the search, float64 [N], in [0, 1].

        Args:
            scores: what stands for the values of some blocks, by row.

        An unvalued block has the value of its nearest valued ancestor; without one (the prompt, and
        its children) that of the best block of its tree, or 1. Values of a tree that do not all lie
        in [0, 1] are scaled from its smallest to its largest, of any offer (the paper leaves this
        open).
        """
        levels = self._levels
        value = self.value
        if scores:
            value = value.copy()
            value[list(scores)] = list(scores.values())
        root = levels.root()
        worth = np.empty(self._size)
        worth[levels.place] = value
        unknown = np.isnan(worth)
        best = np.full(self._size, -np.inf)
        np.maximum.at(best, root[~unknown], worth[~unknown])
        best[best == -np.inf] = 1.0
        worth[unknown] = best[root[unknown]]
        for begin, end in levels.below_root:
            above = worth[levels.parent[begin:end]]
            worth[begin:end] = np.where(unknown[begin:end], above, worth[begin:end])
        for each in np.unique(root[(worth < 0) | (worth > 1)]).tolist():
            mine = root == each
            worth[mine] = normalised(worth[mine])
        return worth[levels.place]

    def _reach(self, size: int) -> bool:
        """Add new blocks and their ancestors; return whether there were any."""
        new = dict(sorted(self._touched.items()))
        grown = False
        self._size = max(size, self._size)
        self._reserve(size)
        for node in new.values():
            each: Node | None = node
            while each is not None and self._ints[0, each.row] == _ABSENT:
                parent = NO_PARENT if each.parent is None else each.parent.row
                self._ints[:3, each.row] = parent, each.depth, each.start
                self._touched[each.row] = each
                grown = True
                each = each.parent
        return grown

    def _read(self, nodes: list[Node]) -> None:
        """Read some blocks: their tokens on the device and the search's figures."""
        ids = np.array([node.row for node in nodes])
        length = np.array([len(node.tokens) for node in nodes])
        begin = np.array([node.span.begin for node in nodes])
        row = np.repeat(np.arange(len(nodes)), length)
        offset = np.arange(len(row)) - (np.cumsum(length) - length)[row]
        slots = nodes[0].span.spans.slot[begin[row] + offset]
        resident = slots >= 0
        if self._is_shared is not None:
            resident &= ~self._is_shared(slots)
        held = np.bincount(row[resident], minlength=len(nodes))
        self.held.update(ids, length, held, offset[resident])
        self._ints[3, ids] = length
        self._ints[4, ids] = held
        if self._protected_tail:
            last = resident & (offset >= length[row] - self._protected_tail)
            self._ints[6, ids] = np.bincount(row[last], minlength=len(nodes))
        self._floats[0, ids] = [node.value if node.valued else np.nan for node in nodes]
        self._floats[1, ids] = [node.confidence for node in nodes]
        self.open[ids] = [node.state is NodeState.OPEN for node in nodes]
        self.pruned[ids] = [node.state is NodeState.PRUNED for node in nodes]

    def _reserve(self, size: int) -> None:
        self._ints = grown(self._ints, size, _UNKNOWN_INTS)
        self._floats = grown(self._floats, size, _UNKNOWN_FLOATS)
        self._flags = grown(self._flags, size)
        self._show()

    def _show(self) -> None:
        """Make the columns views of the first entries."""
        ints = self._ints[:, : self._size]
        self.parent, self.depth, self.start, self.length, self.resident = ints[:5]
        self.last_used, self.tail = ints[5:]
        self.value, self.confidence = self._floats[:, : self._size]
        self.open, self.pruned = self._flags[:, : self._size]


class _Levels:
    """The blocks sorted by depth, so that a level is a slice. Unused rows are stored at depth 0.

    place: int64 [N], by row, the block's index in that order.
    parent: int64 [N], in that order, the index of the block's parent.
    below_root: (begin, end) of the levels 1, 2, ...
    """

    def __init__(self, depth: Ints, parent: Ints) -> None:
        # int16 sorts by radix
        narrow = depth.astype(np.int16) if depth.max(initial=0) < 1 << 15 else depth
        by_depth = np.argsort(narrow, kind="stable")
        self.place = np.empty(len(depth), np.int64)
        self.place[by_depth] = np.arange(len(depth))
        self.parent = self.place[parent[by_depth]] if len(depth) else by_depth
        ends = np.cumsum(np.bincount(depth)).tolist()
        self.below_root = list(itertools.pairwise(ends))
        self._root: Ints | None = None

    def root(self) -> Ints:
        """The index of the root above each block, int64 [N], in that order."""
        if self._root is None:
            self._root = np.arange(len(self.place))
            for begin, end in self.below_root:
                self._root[begin:end] = self._root[self.parent[begin:end]]
        return self._root
