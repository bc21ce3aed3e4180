"""The newest tokens win: StreamingLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arbor.retention.base import Floats, Tokens


@dataclass(frozen=True)
class Recency:
    """A token scores its position on its path.

    Source: StreamingLLM (arXiv 2309.17453) keeps the first four tokens and a window of the last
    ones; `Protect.sinks` protects the first ones. Within one block this is ArborKV's tail-only
    selector.
    Differs: keys stay at the position they were computed for, where the original closes the gap.
    """

    observes: ClassVar[bool] = False

    def scores(self, tokens: Tokens) -> Floats:
        return tokens.position.astype(float)
