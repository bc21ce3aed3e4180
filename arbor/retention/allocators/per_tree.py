"""Room divided among trees first, and within each as an allocator says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from arbor.retention.base import Allocator, Blocks, Ints, Scorer
from arbor.retention.ordering import order

# how the room of an engine is divided among the searches in it
Among = Literal["together", "fair", "first-come", "shortest-first"]


@dataclass(frozen=True)
class PerTree:
    """The room that each tree gets, then an allocator's counts within it.

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
        turns, tree = np.unique(blocks.turn, return_inverse=True)
        if len(turns) < 2:
            return self.allocator.counts(blocks, room, scorer)
        for place, part in enumerate(self._rooms(blocks, tree, room)):
            mine = np.flatnonzero(tree == place)
            counts[mine] = self.allocator.counts(blocks.only(mine), int(part), scorer)
        return counts

    def _rooms(self, blocks: Blocks, tree: Ints, room: int) -> Ints:
        """Tokens each tree may keep, int64 [trees]; at least its floors, at most what it holds."""
        least = np.bincount(tree, blocks.floor).astype(np.int64)
        most = np.bincount(tree, blocks.resident).astype(np.int64)
        if self.among == "fair":
            return _equal(least, most, room)
        first = order(most) if self.among == "shortest-first" else np.arange(len(most))
        spare = (most - least)[first]
        before = np.cumsum(spare) - spare
        rooms = least.copy()
        rooms[first] += np.clip(room - int(least.sum()) - before, 0, spare)
        return rooms


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
