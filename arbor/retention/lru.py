"""Least recently used blocks go first: what a radix cache does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.retention.base import Block


@dataclass(frozen=True)
class LRU:
    """Keep whole blocks, the most recently used first, ancestors before descendants; at most one is kept in part.

    Source: SGLang's RadixAttention evicts leaf first by last access. Differs: a block may be cut, so that no slot the
    budget allows stays empty.
    """

    def counts(self, blocks: Sequence[Block], room: int) -> list[int]:
        order = sorted(
            range(len(blocks)),
            key=lambda i: (-blocks[i].last_used, blocks[i].node.depth, blocks[i].node.id),
        )
        kept = [0] * len(blocks)
        for index in order:
            kept[index] = min(blocks[index].resident, room)
            room -= kept[index]
        return kept
