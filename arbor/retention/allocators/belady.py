"""Clairvoyant: the blocks a recorded run reads last go first; the bound for all other policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks


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
