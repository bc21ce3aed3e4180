"""The answer that most paths give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .base import AnswerVotes, FinishedPath, PathValues, by_answer, lead_probability, votes_of


@dataclass(frozen=True)
class Majority:
    """The answer that most paths give: self-consistency (Wang et al., arXiv 2203.11171).

    The score of an answer is its votes. Equal votes go by the controller's order, and an answer's
    path is its first one: without values, which a vote does not read, the likeliest.

    Differs from the paper: ties are broken by that order rather than at random.
    """

    reads: ClassVar[PathValues] = "none"

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        ranked = [votes_of(group, len(group)) for group in by_answer(paths)]
        return sorted(ranked, key=lambda each: -each.votes)  # stable

    def confidence(self, ranked: Sequence[AnswerVotes]) -> float:
        return lead_probability(ranked)
