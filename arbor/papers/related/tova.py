"""Tokens that the last query attended to win: TOVA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Floats, Tokens
from arbor.retention.policy import Policy


@dataclass(frozen=True)
class TOVA:
    """A token scores the attention of the last query that could see it, the mean over heads.

    Source: TOVA (arXiv 2401.06104). Differs: in a tree the last query is the last one below the
    token, and where one forward has several (a prefill, or leaves that decode together) it is their
    mean; the mean runs over the observed layers too, since one set is kept for all layers;
    `Protect.recent` protects the last token.
    """

    observes: ClassVar[bool] = True

    def scores(self, tokens: Tokens) -> Floats:
        return tokens.latest


POLICY = Policy(
    Pooled(),
    TOVA(),
    summary="Keeps the tokens of the whole tree that the last query attended to (TOVA).",
)
