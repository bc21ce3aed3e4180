"""Every stretch of the sequence keeps the same number of tokens: uniform strata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.allocators.segments import TokenSequence, quotas_of
from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.selection import select_all_but


@dataclass(frozen=True)
class Strata:
    """Keep equally many tokens of each stretch of `size` positions, the best ones of each.

    The control for methods that spread what they keep over the sequence (AMS): it spreads without
    looking at attention.

    Attributes:
        size: positions of a stretch, >= 1.
    """

    size: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError("setting-range", f"size={self.size}: it must be at least 1.")

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return select_all_but(blocks, self.leaving(blocks, room, scorer))[0]

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Places of the tokens that leave in `blocks.tokens`, int64, distinct."""
        if int(blocks.resident.sum()) <= room:
            return np.empty(0, np.int64)
        sequence = TokenSequence(blocks, room, scorer)
        _, segment, size = np.unique(
            sequence.positions // self.size, return_inverse=True, return_counts=True
        )
        quotas = quotas_of(np.ones(len(size)), size, 0, sequence.room)
        return sequence.leaving(segment, quotas)
