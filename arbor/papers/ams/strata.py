"""Every stretch of the sequence keeps the same number of tokens: uniform strata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.allocators.segments import Segmented, TokenSequence, quotas_of
from arbor.retention.base import Ints
from arbor.retention.policy import Policy
from arbor.retention.scorers.window import Window


@dataclass(frozen=True)
class Strata(Segmented):
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

    def divide(self, sequence: TokenSequence) -> tuple[Ints, Ints]:
        segment, size = sequence.stretches(self.size)
        return segment, quotas_of(np.ones(len(size)), size, 0, sequence.room)


POLICY = Policy(
    Strata(),
    Window(),
    summary="Keeps equally many tokens of every stretch of the sequence: the control for AMS.",
)
