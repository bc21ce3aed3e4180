"""Full retention: nothing is ever evicted."""

from __future__ import annotations

from dataclasses import dataclass

from arbor.errors import BudgetInfeasible
from arbor.retention.base import Blocks, Ints, Scorer


@dataclass(frozen=True)
class Full:
    """Keep everything; the baseline that runs out of memory."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """All tokens.

        Raises:
            BudgetInfeasible: they do not fit.
        """
        held = int(blocks.resident.sum())
        if held > room:
            raise BudgetInfeasible(
                held,
                room,
                "full retention of these blocks",
                "Take a larger budget, or a policy that evicts, such as lru.",
            )
        return blocks.resident.copy()
