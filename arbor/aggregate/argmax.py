"""The answer of the path with the highest score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arbor.errors import check_settings

from .base import (
    AnswerVotes,
    FinishedPath,
    PathValues,
    Steps,
    grouped,
    path_score,
    read_for,
    votes_of,
)


@dataclass(frozen=True)
class Argmax:
    """The answer of the path with the highest score: best-of-N by a verifier (Cobbe et al., arXiv
    2110.14168; search-and-learn's "naive").

    Args:
        steps: the score of a path from the values of its blocks: ``last``, ``min`` (Lightman et
            al., arXiv 2305.20050, take the lowest or the product), ``mean`` or ``product``.

    Equal scores go by the controller's order.
    """

    steps: Steps = "last"

    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def reads(self) -> PathValues:
        return read_for(self.steps)

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        place = {path.node: at for at, path in enumerate(paths)}
        ranked = [
            votes_of(group, path_score(group[0], self.steps))
            for group in sorted(grouped(paths, self.steps), key=lambda group: place[group[0].node])
        ]
        return sorted(ranked, key=lambda each: -each.score)  # stable
