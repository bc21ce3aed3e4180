"""Tokens whose keys suit the distances to coming queries win: TriAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arbor.errors import UsageError
from arbor.retention.observation import Observation
from arbor.retention.token_kv import (
    HeadKVScorer,
    KVSequence,
    PairRotation,
    plain_queries,
    products_of,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TriAttention(HeadKVScorer):
    """A token scores what its key gives with the mean query, at distances to come.

        score_i = mean_d sum_f |E q_f| |k_f| s^2 cos((p - p_i + d) w_f + phi_f)
                  + sum_f (E |q_f| - |E q_f|) |k_f| s^2

    f are the pairs of numbers that the position encoding turns by w_f per position and scales by s,
    as complex numbers; q and k are those before it, phi_f is the angle of E q_f conj(k_f), p the
    last position, d = 1, 2, 4, ... `farthest`.
    Source: TriAttention (arXiv 2604.04921) and its code. The average over d is taken of the mean
    query instead of the score, which is the same sum, and keys stay encoded. Differs: the means are
    those of the last `window` queries of the search, not calibrated beforehand on other texts; the
    mean over the query heads of a KV head, and where one set is kept for all heads, over those of
    the observed layers, where the code takes the largest; no noise: of equal scores the later token
    stays; numbers of a head that are not turned count by their plain product; all tokens of the
    prompt are protected, as in the paper, by `Protect.prompt` of the policy; in a tree, the last
    queries of all running paths.

    Attributes:
        farthest: largest distance, >= 1.
        window: queries, >= 1.
    """

    farthest: int = 65536
    window: int = 256

    def __post_init__(self) -> None:
        for name in ("farthest", "window"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise UsageError("setting-range", f"{name}={value}: it must be 1 or more.")

    @property
    def observation(self) -> Observation:
        """Keys, and queries that can be moved to other positions."""
        return Observation(keys=True, window=self.window, rotation=True)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        keys = sequence.keys(layer)
        if not len(sequence.asked):
            return keys.new_zeros(keys.shape[1], len(keys))
        rotation = sequence.rotation(layer)
        ahead = int(sequence.asked.max()) + 2 ** np.arange(self.farthest.bit_length())
        queries = plain_queries(sequence, layer)
        mean = queries.mean(0)
        near = products_of(rotation.mean(mean, ahead), keys)
        spread = _lengths(rotation, queries).mean(0) - _lengths(rotation, mean)
        near = near.view(keys.shape[1], -1, len(keys)).mean(1)  # of a group
        spread = spread.view(keys.shape[1], -1, spread.shape[-1]).mean(1)
        lengths = _lengths(rotation, keys)  # encoded: scaled by s once
        far = (lengths * spread * rotation.scale).sum(-1)
        return near + far.T


def _lengths(rotation: PairRotation, x: Tensor) -> Tensor:
    """Lengths of the pairs of heads, [..., F]."""
    a, b = rotation.pairs(x)
    return (a * a + b * b).sqrt()
