"""Alpha and the window of LazyEviction: when and after how many queries tokens are read again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arbor.errors import UsageError
from arbor.retention.base import Floats, Ints
from arbor.retention.token_statistics import TokenStatistics
from arbor.run.solution import Solution
from arbor.solver import Solver
from arbor.tasks.base import Problem

PERCENTILES = (50, 80, 90, 95)
HEAVY = 0.2  # part of the tokens whose share of the attention is reported
ALPHAS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 1e-2)
RECURRING = 0.95  # of the tokens have an interval above 1 (Finding 2: "over 95 %")


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How tokens of solved problems are read again, at one alpha.

    Attributes:
        alpha: the attention from which a token counts as read.
        window: W, queries: `percentile` of the intervals of the tokens that were read again.
        percentile: in (0, 100].
        problems, tokens: numbers used, prompts included.
        read_again: part of the tokens that were read again at least once.
        recurring: part whose longest interval exceeds 1 (MRI > 1), at each alpha that was tried.
        intervals: from each of `PERCENTILES` to that percentile of the longest intervals.
        heavy: part of the attention that the `HEAVY` tokens of each path with the most received;
            sinks included.
    """

    alpha: float
    window: int
    percentile: float
    problems: int
    tokens: int
    read_again: float
    recurring: dict[float, float]
    intervals: dict[int, int]
    heavy: float


def calibrate_window(
    solver: Solver,
    problems: Iterable[Problem],
    percentile: float = 80,
    alphas: Sequence[float] = ALPHAS,
) -> Recurrence:
    """Solve problems at full retention and measure the longest intervals (MRI) on their paths.

    Alpha is the smallest at which more than `RECURRING` of the tokens recur (MRI > 1). Below it
    nearly every query reads every token, so that intervals say nothing; where no alpha reaches that
    part, the one at which most tokens recur.
    Source: LazyEviction, Finding 2; the paper chooses alpha by accuracy on the test set instead.

    Args:
        solver: a full budget, and a policy that observes attention.
        problems: of a training split.
        percentile: of the intervals; 80 in the paper, section 4.3.
        alphas: that are tried, increasing.

    Raises:
        UsageError: no token was read again.
    """
    longest: list[list[Ints]] = []
    heavy: list[float] = []
    for reads in path_reads(solver, problems, alphas):
        longest.append([read.intervals for read in reads])
        heavy.append(heaviest_share(reads[0].mass))
    every = [
        np.concatenate([np.empty(0, np.int64), *(each[at] for each in longest)])
        for at in range(len(alphas))
    ]
    tokens = len(every[0])
    recurring = {
        alpha: float((of > 1).mean()) if tokens else 0.0
        for alpha, of in zip(alphas, every, strict=True)
    }
    enough = (alpha for alpha in alphas if recurring[alpha] > RECURRING)
    alpha = next(enough, max(alphas, key=lambda each: recurring[each]))
    chosen = every[list(alphas).index(alpha)]
    again = chosen[chosen > 0]
    if not len(again):
        raise UsageError(
            "setting-range",
            f"none of {tokens:,} tokens received attention again.",
            "Lower --threshold, or use longer problems.",
        )

    def at(percent: float) -> int:
        return int(np.percentile(again, percent, method="higher"))

    return Recurrence(
        alpha=alpha,
        window=at(percentile),
        percentile=percentile,
        problems=len(longest),
        tokens=tokens,
        read_again=len(again) / tokens,
        recurring=recurring,
        intervals={percent: at(percent) for percent in PERCENTILES},
        heavy=float(np.mean(heavy)),
    )


class StatisticsAtEach(TokenStatistics):
    """Statistics at the first of some alphas that keep those of the others beside them.

    Attributes:
        each: those of every alpha, in their order.
    """

    def __init__(self, alphas: Sequence[float]) -> None:
        super().__init__(alphas[0])
        self._others = [TokenStatistics(alpha) for alpha in alphas[1:]]
        self.each = [self, *self._others]

    def open(self, row: int, start: int, capacity: int) -> None:
        super().open(row, start, capacity)
        for other in self._others:
            other.open(row, start, capacity)

    def forget(self, rows: Sequence[int]) -> None:
        super().forget(rows)
        for other in self._others:
            other.forget(rows)

    def observe(
        self,
        owner: NDArray[np.integer[Any]],
        position: NDArray[np.integer[Any]],
        mass: NDArray[np.floating[Any]],
        queries: NDArray[np.integer[Any]],
    ) -> None:
        super().observe(owner, position, mass, queries)
        for other in self._others:
            other.observe(owner, position, mass, queries)


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


def path_reads(
    solver: Solver, problems: Iterable[Problem], alphas: Sequence[float]
) -> Iterator[list[PathReads]]:
    """Solve problems; how the tokens of each path were read at each alpha, prompt included.

    Args:
        solver: a full budget, and a policy that observes attention.
        problems: of its task.
        alphas: at least one.
    """
    solver.engine.make_statistics = lambda *_: StatisticsAtEach(alphas)
    for problem in problems:
        solution = solver.solve(problem)
        statistics = solver.engine.state.statistics
        assert isinstance(statistics, StatisticsAtEach)
        yield [_reads(each, solver, solution) for each in statistics.each]


def _reads(statistics: TokenStatistics, solver: Solver, solution: Solution) -> PathReads:
    path = [solver.engine.tree[node_id] for node_id in solution.path]
    seen = [statistics.view(n.row, np.arange(len(n.tokens))) for n in path]
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
