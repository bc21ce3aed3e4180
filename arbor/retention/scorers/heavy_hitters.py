"""Tokens that received the most attention win: heavy hitters, H2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arbor.retention.base import Floats, Tokens


@dataclass(frozen=True)
class HeavyHitters:
    """A token scores the attention it has received.

    Source: H2O (arXiv 2306.14048); ArborKV's A_i(t).
    Differs: H2O keeps one set per head, as ``granularity=head`` does; otherwise one is kept for
    all, by the mean over the observed heads and layers; a token's own query and those of its block
    count, where ArborKV counts only queries after the block.

    Attributes:
        normalise: divide by the queries that could see the token; a sum favours older tokens.
    """

    observes: ClassVar[bool] = True

    normalise: bool = False

    def scores(self, tokens: Tokens) -> Floats:
        return tokens.mass / np.maximum(tokens.queries, 1) if self.normalise else tokens.mass
