"""Tokens that the queries of an observation window attended to win: SnapKV, RPC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arbor.errors import UsageError
from arbor.retention.observation import Observation
from arbor.retention.token_kv import KVScorer, KVSequence, attention_of, neighbours

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowAttention(KVScorer):
    """A token scores the mean attention of the last `window` queries that see it, pooled.

    The mean over the queries, then over `pooled` neighbours, then over the heads. The tokens of the
    window itself score more than all others.

    Source: SnapKV (arXiv 2404.14469), whose window is 64 pooled over 5 in kvpress, and RPC (arXiv
    2505.13866), whose selectors are 32, pooled over 7. Differs: asked whenever room runs out, where
    SnapKV is asked once, after the prompt, and RPC every 1,024 tokens; the mean over the heads of
    the observed layers, since one set is kept for all; queries are read as encoded for their own
    positions (kvpress encodes all for one); in a tree each token counts the last queries below it,
    and one that none of them sees scores 0. The scorer ``window`` approximates it from one figure
    a token.

    Attributes:
        window: queries, >= 1.
        pooled: neighbours, odd.
    """

    window: int = 32
    pooled: int = 7

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError("setting-range", f"window={self.window}: it must be 1 or more.")
        check_pooled(self.pooled)

    @property
    def observation(self) -> Observation:
        """Keys, and the queries of the window."""
        return Observation(keys=True, window=self.window)

    def of(self, sequence: KVSequence, layer: int) -> Tensor:
        mean = mean_attention(sequence.logits(layer), sequence.keys(layer))
        mean[:, sequence.recent] = 0  # pooled over tokens outside the window, as SnapKV does
        scores = neighbours(mean, self.pooled, 0.0).mean(-1).mean(0)
        return above(scores, sequence.recent)


def check_pooled(pooled: int) -> None:
    """Refuse a width of pooling that is even.

    Raises:
        UsageError: it is, or is below 1.
    """
    if pooled < 1 or pooled % 2 == 0:
        raise UsageError("setting-range", f"pooled={pooled}: it must be odd, such as 7.")


def mean_attention(pieces: Iterable[Tensor], keys: Tensor) -> Tensor:
    """The mean attention of each head to each token over the queries that see it, [H, n]; 0 where
    none does.

    Args:
        pieces: [w', H, n] each, see `KVSequence.logits`.
        keys: [n, H_kv, D]; without any queries, the mean is 0 for each KV head.
    """
    total, seen = keys.new_zeros(keys.shape[1], len(keys)), keys.new_zeros(())
    for at, logits in enumerate(pieces):
        added, looks = attention_of(logits).sum(0), (logits > -np.inf).sum(0)
        total, seen = (total + added, seen + looks) if at else (added, looks)
    return total / seen.clamp_min(1)


def above(scores: Tensor, recent: np.ndarray) -> Tensor:
    """Scores [n] in which those of recent tokens exceed all others by 1, so that no tie lets one
    leave."""
    raised = scores.clone()
    raised[recent] = scores.max() + 1
    return raised
