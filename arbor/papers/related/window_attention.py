"""Tokens that the queries of an observation window attended to win: SnapKV, RPC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arbor.errors import check_settings
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import HeadKVScorer, KVSequence, Observation, attention_of, neighbours

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowAttention(HeadKVScorer):
    """A token scores the mean attention of the last `window` queries that see it, pooled.

    The mean over the queries, then over `pooled` neighbours, then over the heads. The tokens of the
    window itself score more than all others.

    Source: SnapKV (arXiv 2404.14469), whose window is 64 pooled over 5 in kvpress, and RPC (arXiv
    2505.13866), whose selectors are 32, pooled over 7. Differs: asked whenever room runs out, where
    SnapKV is asked once, after the prompt, and RPC every 1,024 tokens; where one set is kept for
    all heads, the mean over those of the observed layers; queries are read as encoded for their own
    positions (kvpress encodes all for one); in a tree each token counts the last queries below it,
    and one that none of them sees scores 0. The scorer ``window`` approximates it from one figure a
    token.

    Attributes:
        window: queries, >= 1.
        pooled: neighbours, odd.
    """

    window: int = 32
    pooled: int = 7

    def __post_init__(self) -> None:
        check_settings(
            self,
            window=(self.window >= 1, "1 or more"),
            pooled=(self.pooled >= 1 and self.pooled % 2 == 1, "odd, such as 7"),
        )

    @property
    def observation(self) -> Observation:
        """Keys, and the queries of the window."""
        return Observation(keys=True, window=self.window)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        keys = sequence.keys(layer)
        mean = mean_attention(sequence.logits(layer), keys)
        recent = flags(sequence.of_heads(layer).recent, mean)
        given = mean.view(keys.shape[1], -1, len(keys)).mean(1)
        # pooled over tokens outside the window, as SnapKV does
        scores = neighbours(given.masked_fill(recent, 0), self.pooled, 0.0).mean(-1)
        return above(scores, recent)


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


def flags(marked: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Flags of tokens as a tensor on the device of another one."""
    return like.new_tensor(marked.astype(np.float32)) > 0


def above(scores: Tensor, recent: Tensor) -> Tensor:
    """Scores [H, n] in which each head's recent tokens, bool [H or 1, n], exceed all others by 1,
    so that no tie lets one leave."""
    highest = scores.amax(-1, keepdim=True) + 1
    return scores.masked_fill(recent, 0.0) + highest * recent


POLICY = Policy(
    Pooled(),
    WindowAttention(window=32, pooled=7),
    Protect(recent=32),
    summary="Keeps the tokens, and their neighbours, that the last 32 queries attended to (RPC).",
)
