"""Tokens whose keys suit the distances to coming queries win: TriAttention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arbor.components import ONLY_IF_SET
from arbor.errors import check_settings
from arbor.papers.related.query_means import QueryMeans
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import (
    HeadKVScorer,
    KVSequence,
    Observation,
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
    query instead of the score, which is the same sum, and keys stay encoded. The means are those
    that were calibrated beforehand on other texts (`queries`, as published), or without such a file
    those of the last `window` queries of the search. Differs: the mean over the query heads of a KV
    head, and where one set is kept for all heads, over those of the observed layers, where the code
    takes the largest; no noise: of equal scores the later token stays; numbers of a head that are
    not turned count by their plain product; all tokens of the prompt are protected, as in the
    paper, by `Protect.prompt` of the policy; p is the position of the last query, in a tree of
    those of all running paths; with calibrated means, which need none, that of the last token on
    the device, which is the same while the newest token is protected (`Protect.recent`).

    Attributes:
        farthest: largest distance, >= 1.
        window: queries, >= 1; not used with `queries`.
        queries: a file of ``arbor calibrate queries``; empty: the running mean.
    """

    farthest: int = 65536
    window: int = 256
    queries: str = field(default="", metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        check_settings(
            self,
            farthest=(self.farthest >= 1, "1 or more"),
            window=(self.window >= 1, "1 or more"),
        )

    @cached_property
    def means(self) -> QueryMeans | None:
        """The calibrated means, read once; None: the running mean counts.

        Raises:
            UsageError: the file cannot be read, or holds something else.
        """
        return QueryMeans.load(Path(self.queries)) if self.queries else None

    def check_file(self) -> None:
        """See `CalibratedScorer`."""
        _ = self.means

    def check_model(self, layers: int, heads: int, head_dim: int) -> None:
        """See `CalibratedScorer`."""
        if self.means is not None:
            self.means.check_model(layers, heads, head_dim)

    def without_file(self) -> TriAttention:
        """See `CalibratedScorer`."""
        return replace(self, queries="")

    @property
    def observation(self) -> Observation:
        """Keys, and without calibrated means queries that can be moved to other positions."""
        return Observation(keys=True, window=0 if self.queries else self.window, rotation=True)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        keys, rotation = sequence.keys(layer), sequence.rotation(layer)
        if self.means is None and not len(sequence.asked):
            return keys.new_zeros(keys.shape[1], len(keys))
        if self.means is None:
            last = sequence.asked.max()
            queries = plain_queries(sequence, layer)
            mean, size = queries.mean(0), _lengths(rotation, queries).mean(0)
        else:
            last = sequence.positions.max()
            _, heads, dim = sequence.queries(layer).shape
            known = self.means.of_layer(layer, heads, dim, len(rotation.frequencies))
            mean, size = (keys.new_tensor(each) for each in known)
        ahead = int(last) + 2 ** np.arange(self.farthest.bit_length())
        near = products_of(rotation.mean(mean, ahead), keys)
        spread = size - _lengths(rotation, mean)
        near = near.view(keys.shape[1], -1, len(keys)).mean(1)  # of a group
        spread = spread.view(keys.shape[1], -1, spread.shape[-1]).mean(1)
        lengths = _lengths(rotation, keys)  # encoded: scaled by s once
        far = (lengths * spread * rotation.scale).sum(-1)
        return near + far.T


def _lengths(rotation: PairRotation, x: Tensor) -> Tensor:
    """Lengths of the pairs of heads, [..., F]."""
    a, b = rotation.pairs(x)
    return (a * a + b * b).sqrt()


POLICY = Policy(
    Pooled(),
    TriAttention(),
    Protect(prompt=True),
    summary="Keeps the prompt and the tokens whose keys suit the distances to come (TriAttention).",
)
