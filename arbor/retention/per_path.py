"""The tokens of each running path by themselves, instead of those of all paths as one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.base import Bools, Floats, Scorer, Tokens
from arbor.retention.ordering import order
from arbor.retention.selection import checked_scores


@dataclass(frozen=True)
class PerPath:
    """A token scores its best place on any running path that it lies on, by another scorer.

    Args:
        scorer: ranks the tokens of a path.
        on: bool [P, M], which blocks of an offer each path has.
    """

    scorer: Scorer
    on: Bools

    @property
    def observes(self) -> bool:
        return self.scorer.observes

    def scores(self, tokens: Tokens) -> Floats:
        scores = checked_scores(self.scorer, tokens)
        ahead = np.full(len(scores), float(len(scores)))
        for path in self.on[:, tokens.block]:
            mine = np.flatnonzero(path)
            ranked = mine[order(-scores[mine], -tokens.position[mine])]
            ahead[ranked] = np.minimum(ahead[ranked], np.arange(len(ranked)))
        return -ahead
