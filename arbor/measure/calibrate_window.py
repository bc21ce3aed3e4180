"""The observation window of LazyEviction: after how many queries tokens are read again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.base import Floats, Ints
from arbor.solver import Solver
from arbor.tasks.base import Problem

PERCENTILES = (50, 80, 90, 95)
HEAVY = 0.2  # part of the tokens whose share of the attention is reported


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How tokens of solved problems are read again.

    Attributes:
        window: W, queries: `percentile` of the intervals of the tokens that were read again.
        percentile: in (0, 100].
        problems, tokens: numbers used, prompts included.
        recurring: part of the tokens that were read again at least once.
        intervals: from each of `PERCENTILES` to that percentile of the longest intervals.
        heavy: part of the attention that the `HEAVY` tokens of each path with the most received;
            sinks included.
    """

    window: int
    percentile: float
    problems: int
    tokens: int
    recurring: float
    intervals: dict[int, int]
    heavy: float


def calibrate_window(
    solver: Solver, problems: Iterable[Problem], percentile: float = 80
) -> Recurrence:
    """Solve problems at full retention and measure the longest intervals (MRI) on their paths.

    Args:
        solver: a full budget, and a policy that observes attention; `Protect.threshold` is alpha,
            from which a token counts as read.
        problems: of a training split.
        percentile: of the intervals; 80 in the paper, section 4.3.

    Raises:
        UsageError: no token was read again.
    """
    longest: list[Ints] = []
    heavy: list[float] = []
    for problem in problems:
        solution = solver.solve(problem)
        statistics = solver.engine.state.statistics
        path = [solver.engine.tree[node_id] for node_id in solution.path]
        seen = [statistics.view(node.row, np.arange(len(node.tokens))) for node in path]
        longest.append(np.concatenate([each.recurrence for each in seen]))
        heavy.append(_heavy(np.concatenate([each.mass for each in seen])))
    every = np.concatenate([np.empty(0, np.int64), *longest])
    again = every[every > 0]
    if not len(again):
        raise UsageError(
            "setting-range",
            f"none of {len(every):,} tokens received attention again.",
            "Lower --threshold, or use longer problems.",
        )

    def at(percent: float) -> int:
        return int(np.percentile(again, percent, method="higher"))

    return Recurrence(
        window=at(percentile),
        percentile=percentile,
        problems=len(longest),
        tokens=len(every),
        recurring=len(again) / len(every),
        intervals={percent: at(percent) for percent in PERCENTILES},
        heavy=float(np.mean(heavy)),
    )


def _heavy(mass: Floats) -> float:
    """Part of the attention that the tokens with the most of it received."""
    most = np.sort(mass)[::-1][: max(1, round(HEAVY * len(mass)))]
    return float(most.sum() / mass.sum())
