"""Tokens that are important and not redundant win: R-KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arbor.errors import check_settings
from arbor.papers.related.window_attention import above, flags, mean_attention
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy
from arbor.retention.token_kv import HeadKVScorer, KVSequence, Observation, neighbours, unit_vectors

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 256  # tokens whose similarity to all others is computed at once


@dataclass(frozen=True)
class RKV(HeadKVScorer):
    """A token scores its importance, less its redundancy.

        score_i = mix I_i - (1 - mix) R_i

    I is the attention of the last `window` queries to the tokens outside the window: the largest
    logit of a group of query heads, softmax, mean over the queries, largest of `pooled` neighbours.
    R is the softmax over the tokens of how similar the others' keys are to a token's, on average;
    a key does not count for its most recent similar one (cosine above `alike`), so that of
    alike tokens the newest stays. The tokens of the window score more than all others.

    Source: R-KV (arXiv 2505.24133), mix 0.1 in the paper, 0.07 in its code. Differs: where one set
    is kept for all heads, the mean over those of the observed layers; asked whenever room runs out,
    where the paper acts every 128 tokens (`Trigger.spare`); the mean of R runs over the others'
    rows, as in the code (the paper's runs over the token's own, where a token loses what its newest
    copy should); a row without similar keys loses none, where the code zeroes its similarity to the
    first token; in a tree each token counts the last queries below it.

    Attributes:
        mix: weight of importance, in [0, 1].
        window: queries, >= 1.
        pooled: neighbours, odd.
        alike: cosine above which keys are similar.
    """

    mix: float = 0.1
    window: int = 8
    pooled: int = 7
    alike: float = 0.5

    def __post_init__(self) -> None:
        check_settings(
            self,
            mix=(0 <= self.mix <= 1, "from 0 to 1"),
            window=(self.window >= 1, "1 or more"),
            pooled=(self.pooled >= 1 and self.pooled % 2 == 1, "odd, such as 7"),
        )

    @property
    def observation(self) -> Observation:
        """Keys, and the queries of the window."""
        return Observation(keys=True, window=self.window)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        keys = sequence.keys(layer)
        recent = flags(sequence.of_heads(layer).recent, keys)
        pieces = (self._of_groups(each, recent, keys.shape[1]) for each in sequence.logits(layer))
        important = neighbours(mean_attention(pieces, keys), self.pooled, -np.inf).amax(-1)
        redundant = self.redundancy(keys).softmax(-1)
        return above(self.mix * important - (1 - self.mix) * redundant, recent)

    def _of_groups(self, logits: Tensor, recent: Tensor, heads: int) -> Tensor:
        """The largest logit of each group of query heads, [w', H_kv, n]; none in the window."""
        largest = logits.view(len(logits), heads, -1, logits.shape[-1]).amax(2)
        return largest.masked_fill(recent, -np.inf)

    def redundancy(self, keys: Tensor) -> Tensor:
        """How similar the others' keys are to each token's, [H, n]: the mean over rows of cosines,
        from which each row leaves out itself and its most recent similar token.

        Args:
            keys: [n, H, D], in order of position.
        """
        unit = unit_vectors(keys).transpose(0, 1).contiguous()
        # sums over all rows, of which the rows' own tokens are taken out
        total = (unit * unit.sum(1, keepdim=True)).sum(-1) - (unit * unit).sum(-1)
        for head, vectors in enumerate(unit):
            self._leave_out_latest(vectors, total[head])
        return total / len(keys)

    def _leave_out_latest(self, unit: Tensor, total: Tensor) -> None:
        """Take each row's most recent similar token out of the sums, [n] each.

        The newest tokens are searched first, so that few rows are compared with all.
        """
        places = unit.new_ones(len(unit)).cumsum(0) - 1
        rows = places.long()
        for end in range(len(unit), 0, -_PIECE):
            begin = max(0, end - _PIECE)
            cosines = unit[rows] @ unit[begin:end].T
            similar = cosines > self.alike
            similar &= rows[:, None] != places[begin:end]
            latest = (similar * (places[begin:end] - begin + 1)).amax(1).long()
            found = latest > 0
            at = latest[found] - 1
            total.index_add_(0, at + begin, -cosines[found, at])
            rows = rows[~found]
            if not len(rows):
                break


POLICY = Policy(
    Pooled(),
    RKV(),
    summary="Keeps the tokens that the last queries attended to and no newer token resembles (R-KV).",
)
