"""SlotTable: the owner and the token of each slot of the pool, and the free slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.tree import NO_SLOT, Node, Spans

NO_OWNER = -1
NO_TREE = -1
_WINDOW = 1024  # slots that are looked at first


class SlotTable:
    """`(token, position, owner, references)` per slot, and the free slots.

    A slot is free iff it has no references. Page size is 1, so nothing is ever half used.

    Attributes:
        token: int32 [slots], the token whose K/V lies there; -1 if free.
        position: int32 [slots], its position on the path.
        owner: int32 [slots], the row of the block that allocated it; `NO_OWNER` for temporary
            slots.
        tree: int32 [slots], the number of the tree it was given to; meaningless if free.
        references: int32 [slots], spans (and questions) that use it.
        mixed: bool [slots], the KV heads hold different tokens, see `HeadTable`.
        lent: bool [slots], of these, some hold a token of another KV head, see `HeadTable`.
        further: int32 [slots], of these, spans of a tree beyond its first: siblings share the slot.
        used: slots in use now.
        peak: most slots ever in use at one instant.
        used_by: int64 [trees], slots in use per tree number; one that several trees use counts for
            each of them.
        peak_of: int64 [trees], most slots each tree had in use at one instant since `open`.
        further_of: int64 [trees], `further` of the tree's slots, summed.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.token = np.full(slots, NO_SLOT, np.int32)
        self.position = np.full(slots, NO_SLOT, np.int32)
        self.owner = np.full(slots, NO_OWNER, np.int32)
        self.tree = np.zeros(slots, np.int32)
        self.references = np.zeros(slots, np.int32)
        self.mixed = np.zeros(slots, np.bool_)
        self.lent = np.zeros(slots, np.bool_)
        self.further = np.zeros(slots, np.int32)
        self.used = 0
        self.peak = 0
        self.used_by = np.zeros(1, np.int64)
        self.peak_of = np.zeros(1, np.int64)
        self.further_of = np.zeros(1, np.int64)
        self._low = 0  # all slots before it are in use

    @property
    def free(self) -> int:
        """Slots nobody uses."""
        return self.slots - self.used

    def grow(self, slots: int) -> None:
        """Have more slots, the new ones free."""
        more = slots - self.slots
        for name, empty in (("token", NO_SLOT), ("position", NO_SLOT), ("owner", NO_OWNER)):
            setattr(self, name, np.pad(getattr(self, name), (0, more), constant_values=empty))
        for name in ("tree", "references", "mixed", "lent", "further"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.slots = slots

    def open(self, tree: int) -> None:
        """Begin the account of a tree, which uses no slot yet."""
        more = tree + 1 - len(self.used_by)
        if more > 0:
            self.used_by = np.pad(self.used_by, (0, more))
            self.peak_of = np.pad(self.peak_of, (0, more))
            self.further_of = np.pad(self.further_of, (0, more))
        assert not self.used_by[tree], "a slot of the tree before was not given back"
        self.peak_of[tree] = 0

    def runs(self, length: int, count: int) -> NDArray[np.int32]:
        """Starts of `count` free stretches of `length` slots each, back to back where possible;
        claims nothing.

        A wave's blocks opened at these starts grow in equal strides, so that a backend can read all
        of them as one strided view. Returns fewer starts (possibly none) where the free slots are
        too scattered.
        """
        for wanted in (2 * length * count, self.slots):  # mostly it is found among the lowest
            free = self._lowest(wanted)
            if len(free) == 0:
                return np.empty(0, np.int32)
            breaks = np.flatnonzero(np.diff(free) != 1) + 1
            first = free[np.concatenate(([0], breaks))]
            size = np.diff(np.concatenate(([0], breaks, [len(free)])))
            whole = np.flatnonzero(size >= length * count)
            if len(whole):
                return (first[whole[0]] + length * np.arange(count)).astype(np.int32)
            if len(free) == self.free:
                break
        fit = size // length
        place = np.arange(int(fit.sum())) - np.repeat(np.cumsum(fit) - fit, fit)
        return (np.repeat(first, fit) + length * place)[:count].astype(np.int32)

    def take(self, count: int, first: int = NO_SLOT, *, tree: int = 0) -> NDArray[np.int32]:
        """Claim `count` slots with one reference each: the stretch at `first` if it is free, else a
        contiguous stretch, else the lowest free slots. The caller has made room.

        Args:
            first: preferred first slot.
            tree: number of the tree they serve.

        Returns:
            int32 [count].
        """
        assert count <= self.free, (
            f"{count} slots wanted, {self.free} free: room was not made first"
        )
        if first >= 0 and first + count <= self.slots:
            near = np.arange(first, first + count, dtype=np.int32)
            if not self.references[near].any():
                return self.claim(near, tree)
        if count > 1:
            start = self.runs(count, 1)
            if len(start):
                return self.claim(np.arange(start[0], start[0] + count, dtype=np.int32), tree)
        return self.claim(self._lowest(count)[:count].astype(np.int32), tree)

    def take_each(
        self, near: NDArray[np.int64], trees: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int32]:
        """Claim a slot for each hint; the caller has made room.

        It is the one the hint names, if that is free and no earlier hint names it; else one of the
        lowest free slots.

        Args:
            near: int64 [n]; `NO_SLOT` or any other number that names no slot: no hint.
            trees: int64 [n] or one number, of the trees they serve.

        Returns:
            int32 [n], distinct.
        """
        free = self.slots - self.used
        assert len(near) <= free, f"{len(near)} slots wanted, {free} free: room was not made first"
        inside = near.min(initial=0) >= 0 and near.max(initial=0) < self.slots
        if inside and not self.references[near].any() and len(set(near.tolist())) == len(near):
            return self.claim(near.astype(np.int32), trees)  # mostly
        named = np.flatnonzero((near >= 0) & (near < self.slots))
        named = named[self.references[near[named]] == 0]
        wanted, first = np.unique(near[named], return_index=True)
        slots = np.full(len(near), NO_SLOT, np.int32)
        served = np.broadcast_to(trees, len(near))
        slots[named[first]] = self.claim(wanted.astype(np.int32), served[named[first]])
        rest = np.flatnonzero(slots == NO_SLOT)
        if len(rest):
            lowest = self._lowest(len(rest))[: len(rest)].astype(np.int32)
            slots[rest] = self.claim(lowest, served[rest])
        return slots

    def _lowest(self, count: int) -> NDArray[np.int64]:
        """The lowest free slots, int64, increasing: `count` or more, all where there are fewer.

        The search starts at the lowest free slot and widens until they are found, so the rest of
        the pool costs nothing.
        """
        width = max(_WINDOW, count)
        while True:
            free = self._low + np.flatnonzero(self.references[self._low : self._low + width] == 0)
            if len(free) >= count or self._low + width >= self.slots:
                break
            width *= 4
        self._low = int(free[0]) if len(free) else self.slots
        return free

    def claim(
        self, slots: NDArray[np.int32], trees: NDArray[np.int64] | int = NO_TREE
    ) -> NDArray[np.int32]:
        """One reference each to slots that are free; returns them.

        Args:
            slots: int32 [n].
            trees: int64 [n] or one number, of the trees they serve; by default none.
        """
        self.references[slots] = 1
        self.used += len(slots)
        self.peak = max(self.peak, self.used)
        if not isinstance(trees, int) or trees != NO_TREE:
            self.tree[slots] = trees
            self._serve(slots, trees)
        return slots

    def _serve(self, slots: NDArray[np.int32], trees: NDArray[np.int64] | int) -> None:
        if isinstance(trees, int):
            self.used_by[trees] += len(slots)
        else:
            self.used_by += np.bincount(trees, minlength=len(self.used_by))
        np.maximum(self.peak_of, self.used_by, out=self.peak_of)

    def retain(self, slots: NDArray[np.int32], tree: int = NO_TREE, *, again: bool = False) -> None:
        """One more reference to distinct slots in use.

        Args:
            slots: int32 [n].
            tree: number of the tree they serve as well.
            again: they serve that tree already.
        """
        assert (self.references[slots] > 0).all(), "a free slot cannot be shared"
        self.references[slots] += 1
        if again:
            self.further[slots] += 1
            self.further_of[tree] += len(slots)
        elif tree != NO_TREE:
            self._serve(slots, tree)

    def release(
        self, slots: NDArray[np.int32], trees: NDArray[np.int64] | int | None = None
    ) -> NDArray[np.int32]:
        """One reference less for each time a slot is named.

        Args:
            slots: int32 [n].
            trees: int64 [n] or one number, of the trees they serve no longer; by default those they
                were given to.

        Returns:
            int32, the slots that became free.
        """
        np.subtract.at(self.references, slots, 1)
        left = self.references[slots]
        assert (left >= 0).all(), "a slot was released twice"
        freed = slots[left == 0]
        if len(freed) > 1:
            freed = np.unique(freed)
        self.token[freed] = NO_SLOT
        self.position[freed] = NO_SLOT
        self.owner[freed] = NO_OWNER
        self.mixed[freed] = self.lent[freed] = False
        self.used -= len(freed)
        if not isinstance(trees, int):
            served = self.tree[slots] if trees is None else trees
            self.used_by -= np.bincount(served, minlength=len(self.used_by))
            self.used_by += self._release_further(slots, served)
        elif trees != NO_TREE:
            self.used_by[trees] -= len(slots)
            self.used_by += self._release_further(slots, np.full(len(slots), trees))
        self._low = min(self._low, int(freed.min(initial=self.slots)))
        return freed

    def _release_further(
        self, slots: NDArray[np.int32], trees: NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """Release references by siblings before a tree's last one.

        Args:
            slots: int32 [n], those that lose a reference, once for each.
            trees: int [n], whose it was.

        Returns:
            int64 [trees], how many of the references were such.
        """
        if not self.further_of.any():
            return np.zeros(len(self.used_by), np.int64)
        each, first, count = np.unique(slots, return_index=True, return_counts=True)
        less = np.minimum(self.further[each], count)
        self.further[each] -= less
        by_tree = np.bincount(trees[first], less, len(self.used_by)).astype(np.int64)
        self.further_of -= by_tree
        return by_tree


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each of n blocks.

    Valid until one of the blocks grows.

    Attributes:
        nodes: distinct blocks of one forest, each with a token at least.
        spans: residency of the forest's tokens.
        row: int64 [n], the blocks' rows.
        begin: int64 [n], where each block begins in `spans`.
        length: int64 [n], tokens of each block.
        at: int64 [n], where each token is in `spans`.
        token: int64 [n].
        position: int64 [n], on the path.
    """

    nodes: Sequence[Node]
    spans: Spans
    row: NDArray[np.int64]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    at: NDArray[np.int64]
    token: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def of(
        cls, nodes: Sequence[Node], row: NDArray[np.int64], start: NDArray[np.int64]
    ) -> LastTokens:
        """The columns of these blocks, whose rows and starts are given, int64 [n] each."""
        length = np.array([len(node.tokens) for node in nodes], np.int64)
        begin = np.array([node.span.begin for node in nodes], np.int64)
        last = length - 1
        token = np.array([node.tokens[-1] for node in nodes], np.int64)
        return cls(
            nodes, nodes[0].span.spans, row, begin, length, begin + last, token, start + last
        )
