"""Sampling: how the next token is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arbor.errors import UsageError

GREEDY_BELOW = 1e-6  # a temperature, or a top_p: no token but the most probable one is left


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most probable token (greedy); what is below `GREEDY_BELOW`
            becomes 0.
        top_p: nucleus: the smallest set of most probable tokens whose mass reaches it; 1 = off.
            Below `GREEDY_BELOW` the temperature becomes 0.
        top_k: only the k most probable tokens; 0 = off.
        min_p: only tokens that are at least this part as probable as the most probable one, by
            their probabilities at this temperature; 0 = off.
        arithmetic: siblings are spread over the texts that may follow (see `ArithmeticCode`), each
            of them still drawn with exactly the probabilities above; False draws every token by
            itself.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    arithmetic: bool = True

    def __post_init__(self) -> None:
        for name, kind, words in (
            ("temperature", (int, float), "a number"),
            ("top_p", (int, float), "a number"),
            ("top_k", int, "a whole number"),
            ("min_p", (int, float), "a number"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageError("sampling", f"{name} is {value!r:.40}.", f"It is {words}.")
        if not isinstance(self.arithmetic, bool):
            raise UsageError(
                "sampling", f"arithmetic is {self.arithmetic!r:.40}.", "It is true or false."
            )
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                "sampling", f"temperature is {self.temperature}.", "It is 0 or more, and finite."
            )
        if not 0 <= self.top_p <= 1:
            raise UsageError("sampling", f"top_p is {self.top_p}.", "It is from 0 to 1; 1 is off.")
        if self.top_k < 0:
            raise UsageError("sampling", f"top_k is {self.top_k}.", "It is 0 (off) or more.")
        if not 0 <= self.min_p <= 1:
            raise UsageError("sampling", f"min_p is {self.min_p}.", "It is from 0 to 1; 0 is off.")
        if self.temperature and min(self.temperature, self.top_p) < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def cuts(self) -> bool:
        """Whether less probable tokens are left out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)
