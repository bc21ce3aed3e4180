"""Clairvoyant: what a recorded run reads last goes first, the bound no policy can beat."""

from __future__ import annotations

from dataclasses import dataclass

from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks


@dataclass(frozen=True)
class Belady:
    """Keep whole blocks, the one that is read next first; at most one is kept in part.

    Order: smallest `next_use`; blocks of which the record says nothing by `scheduled`, ancestors first, last used, node id.
    Source: Belady 1966, on recorded trees. Where reads take whole paths and all that is missing on them costs the same
    per token, furthest next use is the optimum up to the one block in part.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        keys = (blocks.next_use, blocks.scheduled, blocks.depth, -blocks.last_used)
        return whole_blocks(blocks, room, order(*keys))
