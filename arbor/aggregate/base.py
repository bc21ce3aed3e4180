"""Aggregates: finished paths, their answers with the votes for each, and the score of a path."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Steps = Literal["last", "min", "mean", "product"]
PathValues = Literal["none", "last", "all"]

LARGEST = sys.float_info.max


def total(values: Sequence[float]) -> float:
    """The sum of some scores; the largest float where it is beyond that."""
    found, scale = _scaled_sum(values)
    return _within(found / scale)


def _mean(values: Sequence[float]) -> float:
    found, scale = _scaled_sum(values)
    return found / (len(values) * scale)


def _scaled_sum(values: Sequence[float]) -> tuple[float, float]:
    """The sum of some scores times a power of two, and that: 1, or less for a sum beyond floats."""
    try:
        return math.fsum(values), 1.0
    except OverflowError:
        scale = 0.5 ** len(values).bit_length()
        return math.fsum(each * scale for each in values), scale


def _within(score: float) -> float:
    return max(-LARGEST, min(score, LARGEST))


_REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda values: values[-1],
    "min": min,
    "mean": _mean,
    "product": lambda values: _within(math.prod(values)),
}


@dataclass(frozen=True, slots=True)
class FinishedPath:
    """A path that has ended.

    Attributes:
        node: id of its last block.
        answer: None if the path gave none.
        group: number of its answer: equal answers, by the task's comparison, have the same; None
            without an answer.
        values: of its blocks in order, the prompt excluded; in [0, 1]; where the verifier keeps
            the scores of single steps, those.
    """

    node: int
    answer: str | None
    group: int | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AnswerVotes:
    """One answer of a search, and the paths that gave it.

    Attributes:
        answer: as its first path gave it.
        votes: its paths.
        score: by which the aggregate ranked it, or weighed its paths.
        paths: ids of their last blocks, best first.
    """

    answer: str
    votes: int
    score: float
    paths: tuple[int, ...]


@runtime_checkable
class Aggregate(Protocol):
    """A choice of the answer and its settings: a frozen dataclass.

    One that takes the answer of a single path, whatever the others say, has ``compares = False``:
    then only answers that are equal at sight have one group.
    """

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        """The answers, best first, each once; the first path of the first one is the search's.

        Args:
            paths: of the search, in the controller's order, best first. Those without an answer do
                not count.
        """
        ...


@runtime_checkable
class ReadsPaths(Protocol):
    """An optional addition to `Aggregate`, for one that does not read all values of a path."""

    @property
    def reads(self) -> PathValues:
        """What it reads of the values of a path, and of the order by value: ``none``; the ``last``
        value; or ``all``. The others may be 0, not judged."""
        ...


def read_for(steps: Steps) -> PathValues:
    """The values of a path that its score is made of."""
    return "last" if steps == "last" else "all"


def path_score(path: FinishedPath, steps: Steps) -> float:
    """The score of a path; 0 for one without blocks."""
    return reduced(path.values, steps)


def reduced(values: Sequence[float], steps: Steps) -> float:
    """The last, the lowest, the mean or the product of the values of a path; 0 without any."""
    return _REDUCED[steps](values) if values else 0.0


def by_answer(paths: Sequence[FinishedPath]) -> list[list[FinishedPath]]:
    """The paths of each answer, both in the controller's order."""
    groups: dict[int, list[FinishedPath]] = {}
    for path in paths:
        if path.group is not None and path.answer is not None:
            groups.setdefault(path.group, []).append(path)
    return list(groups.values())


def grouped(paths: Sequence[FinishedPath], steps: Steps) -> list[list[FinishedPath]]:
    """The paths of each answer, highest score first, answers in the order of their first path."""
    return [
        sorted(group, key=lambda path: -path_score(path, steps))  # stable
        for group in by_answer(paths)
    ]


def votes_of(group: Sequence[FinishedPath], score: float) -> AnswerVotes:
    """One answer with the paths that gave it, in the order given."""
    assert group[0].answer is not None, "paths without an answer have no group"
    return AnswerVotes(group[0].answer, len(group), score, tuple(path.node for path in group))


@runtime_checkable
class Confident(Protocol):
    """An optional addition to `Aggregate`: a confidence other than the first answer's score."""

    def confidence(self, ranked: Sequence[AnswerVotes]) -> float:
        """The confidence in the first answer, in [0, 1].

        Args:
            ranked: every answer, best first; at least one.
        """
        ...


def lead_probability(ranked: Sequence[AnswerVotes]) -> float:
    """The probability that the first answer is given more often than any other one.

    Adaptive-Consistency (Aggarwal et al., arXiv 2305.11860): the votes of the first answer and
    those of its strongest rival give a Beta(a + 1, b + 1) posterior of its share between the two;
    the probability is that of a share above one half. The plain share of the votes is 1 after a
    single path and would end every search there; this is 0.75 after one path and 0.97 after four
    that agree.
    """
    first = ranked[0].votes
    rival = max((each.votes for each in ranked[1:]), default=0)
    trials = first + rival + 1  # the posterior's tail is that of a binomial with a fair coin
    ways: int = sum(math.comb(trials, heads) for heads in range(first + 1))
    return ways / int(2**trials)
