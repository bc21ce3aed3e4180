"""The answer that most paths give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import AnswerVotes, FinishedPath, Steps, check_steps, summed
from .confidence import lead_probability


@dataclass(frozen=True)
class Majority:
    """The answer that most paths give: self-consistency (Wang et al., arXiv 2203.11171).

    Args:
        steps: the score of a path, see `Argmax`. The sum of an answer's scores breaks ties of
            votes, then the controller's order; the answer's path is the one of the highest score.

    Differs from the paper: ties are broken by scores rather than at random.
    """

    steps: Steps = "last"

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        ranked = summed(paths, self.steps)
        return sorted(ranked, key=lambda each: (-each.votes, -each.score))  # stable

    def confidence(self, ranked: Sequence[AnswerVotes]) -> float:
        return lead_probability(ranked)
