"""Sampling: how the next token is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arbor.errors import UsageError
from arbor.support.setting import setting, settings_of

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

    HEADING = "Sampling"

    temperature: float = setting(0.7, "0 is greedy; default: the model's.", shown="short", least=0)
    top_p: float = setting(
        0.9,
        "Nucleus sampling; 1 is off, 0 is greedy; default: the model's.",
        shown="set",
        least=0,
        most=1,
    )
    top_k: int = setting(
        0, "Only the N most likely tokens; 0 is off; default: the model's.", shown="set", least=0
    )
    min_p: float = setting(
        0.0,
        "Only tokens at least this likely, the likeliest counting as 1; 0 is off.",
        shown="set",
        least=0,
        most=1,
    )
    arithmetic: bool = setting(True, "Spread siblings over the texts that may follow.", shown="set")

    def __post_init__(self) -> None:
        for name, each in settings_of(Sampling).items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))
        if self.temperature == math.inf:
            raise UsageError("limit", "temperature is inf.", "It is a finite number.")
        if self.temperature and min(self.temperature, self.top_p) < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def cuts(self) -> bool:
        """Whether less probable tokens are left out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)
