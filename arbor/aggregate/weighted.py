"""The answer whose paths have the highest sum of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.errors import check_settings

from .base import (
    AnswerVotes,
    FinishedPath,
    PathValues,
    Steps,
    grouped,
    lead_probability,
    path_score,
    read_for,
    total,
    votes_of,
)


@dataclass(frozen=True)
class Weighted:
    """The answer whose paths have the highest sum of scores: weighted majority (Li et al., arXiv
    2206.02336; REBASE, search-and-learn and ETS report by it).

    Args:
        steps: the score of a path, see `Argmax`.

    Equal sums go by the number of votes, then by the controller's order.
    """

    steps: Steps = "last"

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def reads(self) -> PathValues:
        return read_for(self.steps)

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        ranked = [
            votes_of(group, total([path_score(path, self.steps) for path in group]))
            for group in grouped(paths, self.steps)
        ]
        return sorted(ranked, key=lambda each: (-each.score, -each.votes))  # stable

    def confidence(self, ranked: Sequence[AnswerVotes]) -> float:
        return lead_probability(ranked)
