"""Lengths: of the finished blocks of one tree."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Lengths:
    """Lengths of the finished blocks of one tree."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, tokens: int) -> None:
        """Count a block that has ended."""
        self.count += 1
        self.total += tokens
        self.squares += tokens * tokens

    @property
    def mean(self) -> float:
        """Tokens of a block; 0 before any has ended."""
        return self.total / self.count if self.count else 0.0

    def expected(self, longest: int) -> int:
        """Expected length of one more block: mean plus standard deviation; half of the longest
        before any."""
        if not self.count:
            return math.ceil(longest / 2)
        mean = self.total / self.count
        spread = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        return min(longest, math.ceil(mean + spread))
