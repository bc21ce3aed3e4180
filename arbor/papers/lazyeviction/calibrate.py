"""The observation window of LazyEviction: after how many queries tokens are read again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.base import Floats, Ints
from arbor.run.solution import Solution
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
        read = path_reads(solver, solver.solve(problem))
        longest.append(read.intervals)
        heavy.append(heaviest_share(read.mass))
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


@dataclass(frozen=True, slots=True)
class PathReads:
    """How the tokens of a path were read.

    Attributes:
        intervals: int64 [T], MRI of each token; 0: it was not read again.
        mass: float64 [T], attention each received, its own query's included.
        prompt: how many of them are the prompt's.
    """

    intervals: Ints
    mass: Floats
    prompt: int


def path_reads(solver: Solver, solution: Solution) -> PathReads:
    """How the tokens of a solution's path were read, prompt included.

    Args:
        solver: has just found the solution, with a policy that observes attention.
        solution: its last one.
    """
    statistics = solver.engine.state.statistics
    path = [solver.engine.tree[node_id] for node_id in solution.path]
    seen = [statistics.view(node.row, np.arange(len(node.tokens))) for node in path]
    return PathReads(
        np.concatenate([each.recurrence for each in seen]),
        np.concatenate([each.mass for each in seen]),
        len(path[0].tokens),
    )


def heaviest_share(mass: Floats, part: float = HEAVY) -> float:
    """Part of the attention that went to the tokens that received the most.

    Args:
        mass: of each token, at least one.
        part: of the tokens, at least one of them.
    """
    most = np.sort(mass)[::-1][: max(1, round(part * len(mass)))]
    return float(most.sum() / mass.sum())
