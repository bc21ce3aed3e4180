"""Room divided among trees first, and within each as an allocator says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from arbor.retention.base import (
    Allocator,
    Blocks,
    CappedAllocator,
    CreditingAllocator,
    Floats,
    Ints,
    Scorer,
    TokenAllocator,
)
from arbor.retention.ordering import filled, order
from arbor.retention.selection import checked_counts, checked_leaving

# how the room of an engine is divided among the searches in it
Among = Literal["together", "fair", "first-come", "shortest-first"]


@dataclass(frozen=True)
class PerTree:
    """The room that each tree gets, then an allocator's counts within it.

    A capacity (`CappedAllocator`) is one of each tree, and where just those tokens have to leave
    that exceed it, each tree gives up its own.

    Args:
        allocator: divides a tree's room among its blocks.
        among: ``fair``: equal parts; what a tree does not need goes to the others.
            ``first-come``: trees opened earlier keep all they hold before later ones keep anything.
            ``shortest-first``: likewise, trees that hold less first.
    """

    allocator: Allocator
    among: Among = "fair"

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        counts = np.zeros(len(blocks), np.int64)
        for mine, part, share in self._parts(blocks, room):
            counts[mine] = checked_counts(self.allocator, part, share, scorer)
        return counts

    def excess(self, blocks: Blocks) -> int:
        """What the trees give up although there is room, together: a capacity is each tree's own;
        0 without one."""
        if not isinstance(self.allocator, CappedAllocator):
            return 0
        trees = np.unique(blocks.turn)
        parts = (blocks.only(np.flatnonzero(blocks.turn == turn)) for turn in trees)
        return sum(map(self.allocator.excess, parts))

    def _parts(self, blocks: Blocks, room: int) -> Iterator[tuple[Ints, Blocks, int]]:
        """The blocks of each tree: their indices, increasing, their offer, and its room."""
        turns, tree = np.unique(blocks.turn, return_inverse=True)
        if len(turns) < 2:
            yield np.arange(len(blocks)), blocks, room
            return
        indices = [np.flatnonzero(tree == place) for place in range(len(turns))]
        parts = [blocks.only(mine) for mine in indices]
        rooms = self._rooms(blocks, tree, parts, room)
        yield from zip(indices, parts, rooms.tolist(), strict=True)

    def _rooms(self, blocks: Blocks, tree: Ints, parts: Sequence[Blocks], room: int) -> Ints:
        """Tokens each tree may keep, int64 [trees]; at most what it holds, and at least its floors
        unless its capacity is below them."""
        least = np.bincount(tree, blocks.floor).astype(np.int64)
        most = np.bincount(tree, blocks.resident).astype(np.int64)
        if isinstance(self.allocator, CappedAllocator):
            own = most - np.array([self.allocator.excess(part) for part in parts], np.int64)
            if int(own.sum()) == room:  # below the floors where it destroys tokens
                return own
        if self.among == "fair":
            return _equal(least, most, room)
        first = order(most) if self.among == "shortest-first" else np.arange(len(most))
        return least + filled(most - least, room - int(least.sum()), first)


@dataclass(frozen=True)
class PerTreeTokens(PerTree):
    """`PerTree` for an allocator that names the tokens that leave: it does so for each tree."""

    allocator: TokenAllocator

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Indices of the tokens that leave, int64, distinct."""
        return self._leaving(blocks, room, scorer)[0]

    def _leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """What leaves, and what each token is credited with, float64 [T]; 0 without credit."""
        credits = np.zeros(int(blocks.resident.sum()))
        gone = [np.empty(0, np.int64)]
        for mine, part, share in self._parts(blocks, room):
            leaving, credit = checked_leaving(self.allocator, part, share, scorer)
            # tokens lie block after block, here and there
            owner = np.repeat(np.arange(len(blocks)), blocks.resident)
            places = np.flatnonzero(np.isin(owner, mine))
            gone.append(places[leaving])
            if credit is not None:
                credits[places] = credit
        return np.concatenate(gone), credits


@dataclass(frozen=True)
class PerTreeCredit(PerTreeTokens):
    """`PerTreeTokens` for an allocator that remembers a figure of each token."""

    allocator: CreditingAllocator

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """What leaves, and what each token is credited with, float64 [T]."""
        return self._leaving(blocks, room, scorer)


def divided(allocator: Allocator, among: Among) -> PerTree:
    """An allocator that divides the room of each tree as it divides that of a single one."""
    if isinstance(allocator, CreditingAllocator):
        return PerTreeCredit(allocator, among)
    if isinstance(allocator, TokenAllocator):
        return PerTreeTokens(allocator, among)
    return PerTree(allocator, among)


def _equal(least: Ints, most: Ints, room: int) -> Ints:
    """Equal parts of the room between a least and a most of each; the rest by place."""
    level, above = 0, int(most.max(initial=0)) + 1  # the highest level that fits
    while above - level > 1:
        middle = (level + above) // 2
        if int(np.clip(middle, least, most).sum()) <= room:
            level = middle
        else:
            above = middle
    rooms: Ints = np.clip(level, least, most)
    some = np.flatnonzero((rooms < most) & (rooms >= level))[: max(0, room - int(rooms.sum()))]
    rooms[some] += 1
    return rooms
