"""The answer of the best finished path, as the controller ranks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .base import AnswerVotes, FinishedPath, PathValues, by_answer, path_score, votes_of


@dataclass(frozen=True)
class Best:
    """The answer of the controller's best path that has one, without a vote.

    The controllers of arbor rank paths by the value of the last block, then by the mean log
    probability of their tokens. The score of an answer is the last value of its first path.
    """

    compares: ClassVar[bool] = False
    reads: ClassVar[PathValues] = "last"

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        return [votes_of(group, path_score(group[0], "last")) for group in by_answer(paths)]
