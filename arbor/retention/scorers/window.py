"""Tokens that the last queries attended to win: SnapKV's observation window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arbor.retention.base import Floats, Tokens


@dataclass(frozen=True)
class Window:
    """A token scores the attention of about the last 32 queries that could see it.

    Source: the observation window of SnapKV (arXiv 2404.14469), which R-KV, RPC and AMS use too.
    Differs: weights that fall off with age instead of a window with an edge, so that nothing but
    one figure a token is kept; one set for all heads and layers; no pooling over neighbours; the
    queries' attention to themselves counts.
    """

    observes: ClassVar[bool] = True

    def scores(self, tokens: Tokens) -> Floats:
        return tokens.lately
