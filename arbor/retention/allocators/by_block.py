"""Allocators that go block by block: all, the last used, the next needed, or a part of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arbor.errors import BudgetInfeasible
from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks


@dataclass(frozen=True)
class LRU:
    """Keep whole blocks, the most recently used first; at most one is kept in part.

    Ties: ancestors before descendants, then node id.
    Source: SGLang's RadixAttention evicts leaf first by last access. Differs: a block may be cut,
    so that no slot of the budget stays empty.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return whole_blocks(blocks, room, order(-blocks.last_used, blocks.depth))


@dataclass(frozen=True)
class Belady:
    """Keep whole blocks, the one read next first; at most one is kept in part.

    Order: smallest `scheduled` (a later wave of the operation in progress is sooner than the next
    operation), then `next_use`, ancestors first, last used, node id.
    Source: Belady 1966, on recorded trees. Where reads take whole paths and every missing token
    costs the same, furthest next use is the optimum, up to the one block in part and to the order
    of the waves of an operation, which follows from the tokens on the device: another policy can be
    some per cent cheaper where that order suits it.
    """

    needs_recording: ClassVar[bool] = True  # it reads `next_use`

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        keys = (blocks.scheduled, blocks.next_use, blocks.depth, -blocks.last_used)
        return whole_blocks(blocks, room, order(*keys))


@dataclass(frozen=True)
class Reentry:
    """Keep whole blocks in the order of need: the operation in progress, then by probability.

    In lossless mode a block costs P(it is read again) times the tokens it lacks: linear, so the
    cheapest choice fills blocks completely by descending probability, and which tokens of the last
    one stay is irrelevant. All missing blocks of a path are computed together, so a transition that
    lacks anything costs one forward; that charge is left out, and it is the most the choice can
    lose.

    Order: smallest `scheduled` (certain), blocks that may be read again, those of trees opened
    earlier, largest `reentry`, ancestors first, last used, node id; whole blocks, at most one in
    part. Earlier trees come first because their searches end first, and then free all they hold.
    Probability does not grow from the root to a leaf, so leaves go first without a rule of their
    own.
    Replaces ArborKV's log utility and its decay with distance, which are for lossy mode.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        keys = (
            blocks.scheduled,
            (blocks.reentry <= 0).astype(np.int64),
            blocks.turn,
            -blocks.reentry,
            blocks.depth,
            -blocks.last_used,
        )
        return whole_blocks(blocks, room, order(*keys))


@dataclass(frozen=True)
class Full:
    """Keep everything; the baseline that runs out of memory."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """All tokens.

        Raises:
            BudgetInfeasible: they do not fit.
        """
        held = int(blocks.resident.sum())
        if held > room:
            raise BudgetInfeasible(
                held,
                room,
                "full retention of these blocks",
                "Take a larger budget, or a policy that evicts, such as lru.",
            )
        return blocks.resident.copy()


@dataclass(frozen=True)
class Uniform:
    """Every block keeps the same part of its length: k = clip(r n, floor, resident), one r for all.

    r is solved so that the sum meets the room; integers by largest remainder, ties by node id.
    Source: the control of ArborKV's comparison; the same as a pool-wide compression ratio.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = np.log(np.maximum(blocks.length, 1))
        kept = waterfill(level, blocks.floor, blocks.resident, room)
        return rounded(kept, blocks.floor, blocks.resident, room)


@dataclass(frozen=True)
class Ends:
    """Blocks of running paths keep all they hold, idle ones share what is left as `Uniform` says;
    where not even the paths fit, their first blocks stay whole as `LRU` says.

    Source: ours, from what lost fewest answers in trees (`uniform`) and on single paths (`lru`).
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        on, off = np.flatnonzero(blocks.active), np.flatnonzero(~blocks.active)
        counts = np.zeros(len(blocks), np.int64)
        for_paths = room - int(blocks.floor[off].sum())
        for_paths = min(for_paths, int(blocks.resident[on].sum()))
        counts[on] = LRU().counts(blocks.only(on), for_paths, scorer)
        counts[off] = Uniform().counts(blocks.only(off), room - for_paths, scorer)
        return counts
