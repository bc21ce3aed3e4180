"""Tokens that coming queries are expected to attend to win: Expected Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arbor.errors import UsageError
from arbor.retention.observation import Observation
from arbor.retention.token_kv import KVScorer, KVSequence, attention_of, logits_ahead, plain_queries

if TYPE_CHECKING:
    from torch import Tensor

SINKS = 4  # first positions, whose queries are unlike all others


@dataclass(frozen=True)
class ExpectedAttention(KVScorer):
    """A token scores the attention that queries to come would give it, times the size of its value.

        score_i = (softmax_i(mu k_i / sqrt(D) + k_i Sigma k_i / 2 D) + epsilon) |v_i|_2

    mu and Sigma are the mean and the covariance of the last `window` queries before their position
    encoding, encoded for the next `ahead` positions on average: where logits are normal, the
    expectation of their exponentials.
    Source: Expected Attention (arXiv 2510.00636) as kvpress has it. Differs: the next positions are
    those after the last token, where kvpress, while decoding, counts from the length of its buffer;
    queries of the first four positions are left out by position; the mean over the query heads of
    the observed layers, since one set is kept for all; in a tree, the last queries of all running
    paths, and the positions after the longest; soft caps and windows of layers are left out.

    Attributes:
        ahead: positions to come, >= 1.
        window: queries, >= 1 (kvpress, while decoding: 256).
        covariance: whether Sigma counts.
        epsilon: >= 0; larger: the values count more.
    """

    ahead: int = 512
    window: int = 256
    covariance: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ahead", "window"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise UsageError("setting-range", f"{name}={value}: it must be 1 or more.")
        if not self.epsilon >= 0:
            raise UsageError("setting-range", f"epsilon={self.epsilon}: it must be 0 or more.")

    @property
    def observation(self) -> Observation:
        """Keys and values, and queries that can be moved to other positions."""
        return Observation(keys=True, window=self.window, rotation=True)

    def of(self, sequence: KVSequence, layer: int) -> Tensor:
        size = sequence.values(layer)
        size = (size * size).sum(-1).sqrt().T  # [H_kv, n]
        plain = plain_queries(sequence, layer)[sequence.asked >= SINKS]
        if not len(plain):
            return (self.epsilon * size).mean(0)
        logits = logits_ahead(sequence, layer, plain, np.arange(1, self.ahead + 1))
        expected = logits.mean(0)
        if self.covariance:
            expected = expected + logits.var(0, correction=0) / 2
        given = attention_of(expected).view(len(size), -1, len(sequence)).mean(1)
        return ((given + self.epsilon) * size).mean(0)
