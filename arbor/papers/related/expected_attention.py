"""Tokens that coming queries are expected to attend to win: Expected Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arbor.errors import check_settings
from arbor.papers.related.window_attention import above, flags
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy
from arbor.retention.token_kv import (
    HeadKVScorer,
    KVSequence,
    Observation,
    attention_of,
    plain_queries,
    products_of,
)

if TYPE_CHECKING:
    from torch import Tensor

SINKS = 4  # first positions, whose queries are unlike all others


@dataclass(frozen=True)
class ExpectedAttention(HeadKVScorer):
    """A token scores the attention that queries to come would give it, times the size of its value.

        score_i = (softmax_i(mu k_i / sqrt(D) + k_i Sigma k_i / 2 D) + epsilon) |v_i|_2

    mu and Sigma are the mean and the covariance of the last `window` queries before their position
    encoding, encoded for the next `ahead` positions on average: where logits are normal, the
    expectation of their exponentials. The first four tokens, sinks, are left out of the softmax and
    score more than all others; their queries do not count.
    Source: Expected Attention (arXiv 2510.00636) as kvpress has it. Differs: the next positions are
    those after the last token, where kvpress, while decoding, counts from the length of its buffer;
    the first four are those of the text, not of the buffer; the mean over the query heads
    of a KV head, and where one set is kept for all heads, over those of the observed layers; in a
    tree, the last queries of all running
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
        check_settings(
            self,
            ahead=(self.ahead >= 1, "1 or more"),
            window=(self.window >= 1, "1 or more"),
            epsilon=(self.epsilon >= 0, "0 or more"),
        )

    @property
    def observation(self) -> Observation:
        """Keys and values, and queries that can be moved to other positions."""
        return Observation(keys=True, window=self.window, rotation=True)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        values, keys = sequence.values(layer), sequence.keys(layer)
        size = (values * values).sum(-1).sqrt().T  # [H_kv, n]
        sinks = flags(sequence.of_heads(layer).positions < SINKS, size)
        plain = plain_queries(sequence, layer)[sequence.asked >= SINKS]
        if not len(plain):
            return above(self.epsilon * size, sinks)
        last = int(sequence.asked.max())
        ahead = last + np.arange(1, self.ahead + 1)
        queries = sequence.rotation(layer).mean(plain, ahead).transpose(0, 1)  # [H_q, w, D]
        mean = queries.mean(1)
        scaling = sequence.scaling(layer)
        expected = products_of(mean, keys) * scaling
        if self.covariance:
            centred = queries - mean[:, None]
            spread = centred.transpose(1, 2) @ centred / centred.shape[1]  # [H_q, D, D]
            each = keys.transpose(0, 1).repeat_interleave(len(spread) // len(size), 0)
            expected += ((each @ spread) * each).sum(-1) * scaling**2 / 2
        expected = expected.view(len(size), -1, size.shape[1])
        expected = expected.masked_fill(sinks[:, None], -np.inf)
        given = attention_of(expected).mean(1)
        return above((given + self.epsilon) * size, sinks)


POLICY = Policy(
    Pooled(),
    ExpectedAttention(),
    summary="Keeps the tokens that the queries to come are expected to attend to (Expected "
    "Attention).",
)
