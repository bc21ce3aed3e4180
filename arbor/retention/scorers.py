"""Scorers of what a token is and received: H2O, SnapKV, TOVA, StreamingLLM, and random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Window:
    """A token scores the attention of about the last 32 queries that could see it.

    Under an allocator that asks for more queries (``ams``) it is the attention of these.

    Source: the observation window of SnapKV (arXiv 2404.14469), which R-KV, RPC and AMS use too.
    Differs: weights that fall off with age instead of a window with an edge, so that nothing but
    one figure a token is kept; one set for all heads and layers; no pooling over neighbours; the
    queries' attention to themselves counts.
    """

    observes: ClassVar[bool] = True

    def scores(self, tokens: Tokens) -> Floats:
        return tokens.lately


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


@dataclass(frozen=True)
class RandomTokens:
    """A token scores a uniform number in [0, 1) that depends on its key and the seed alone.

    A token has the same score each time and among any others, so a kept set only shrinks.
    SplitMix64 of the key, combined with that of the seed.
    """

    observes: ClassVar[bool] = False

    seed: int = 0

    def scores(self, tokens: Tokens) -> Floats:
        salt = _mixed(np.array([self.seed % (1 << 64)], np.uint64))
        scores = (_mixed(tokens.key ^ salt) >> np.uint64(11)).astype(np.float64)
        return scores * 2.0**-53


def _mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number ^= number >> np.uint64(30)
    number *= np.uint64(0xBF58476D1CE4E5B9)
    number ^= number >> np.uint64(27)
    number *= np.uint64(0x94D049BB133111EB)
    number ^= number >> np.uint64(31)
    return number


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
