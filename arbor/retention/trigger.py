"""Trigger: when a policy acts although room has not run out."""

from __future__ import annotations

from dataclasses import dataclass, field

from arbor.components import ONLY_IF_SET
from arbor.errors import UsageError


@dataclass(frozen=True)
class Trigger:
    """Times at which the policy is asked while blocks decode.

    Where slots run out it is asked in any case. A policy that acts at a time (every W steps, as
    LazyEviction and R-KV do) frees a part of the budget at once instead of a few slots at each
    step.

    Attributes:
        every: decode steps between two looks at what is held.
        above: part of the budget, in (0, 1]; what is held beyond it leaves, as the policy says.
            1: nothing ever leaves early.
        spare: slots for each running path that are free after the policy has acted, so that it acts
            every so many tokens (W of LazyEviction, with its budget B - W so that B is never
            exceeded); at most half of what it may keep. 0: what is needed, and no more.
    """

    every: int = 1
    above: float = 1.0
    spare: int = field(default=0, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError("setting-range", f"every={self.every}: it must be at least 1.")
        if not 0 < self.above <= 1:
            raise UsageError("setting-range", f"above={self.above}: it must be above 0, at most 1.")
        if self.spare < 0:
            raise UsageError("setting-range", f"spare={self.spare}: it must be 0 or more.")

    def room(self, step: int, slots: int) -> int | None:
        """Tokens that may stay after a step; None: the policy is not asked.

        Args:
            step: decode steps so far.
            slots: the budget.
        """
        if self.above == 1 or step % self.every:
            return None
        return int(self.above * slots)
