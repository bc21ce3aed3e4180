"""Least recently used blocks go first, as in a radix cache."""

from __future__ import annotations

from dataclasses import dataclass

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
