"""Confidence of a search in its best answer, by which a run may end early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .base import AnswerVotes


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
