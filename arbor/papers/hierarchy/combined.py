"""The memory hierarchy's combined importance: attention, values, and likeness to neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arbor.retention.base import Floats
from arbor.retention.token_kv import HeadKVScorer, KVSequence, TokensOnDevice, unit_vectors

if TYPE_CHECKING:
    from torch import Tensor

_UNKNOWN = -2.0  # below any score: cosines are at most 1, attention and norms at least 0


@dataclass(frozen=True)
class Combined(HeadKVScorer):
    """A token scores attention received, times the size of its value, less its redundancy.

        score_i = A_i |v_i|_1 - R_i

    A is the sum of attention as in H2O, and R the mean cosine of the token's key with those of the
    tokens before and after it on the device.

    Source: memory hierarchy (arXiv 2605.09490), section 4.11 and Table 12. It names the terms
    alone: the norm (here VATP's), the neighbours and the scales of both terms are readings. Where
    one set is kept for all heads, each term is the mean over those of the observed layers.

    Attributes:
        values: multiply by the size of the value; false: the table's row "attn - redundancy".
    """

    observes: ClassVar[bool] = True

    values: bool = True

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        """The redundancy."""
        unit = unit_vectors(sequence.keys(layer))
        cosine = (unit[1:] * unit[:-1]).sum(-1)
        total, count = unit.new_zeros(unit.shape[:2]), unit.new_zeros(len(unit), 1)
        for some in (slice(1, None), slice(None, -1)):  # the one before, the one after
            total[some] += cosine
            count[some] += 1
        return (total / count.clamp_min(1)).T

    def scores(self, tokens: TokensOnDevice) -> Floats:
        received = tokens.mass
        if self.values:
            received = received * tokens.kv.scores(_ValueNorm())
        scores: Floats = received - super().scores(tokens)
        # keys and values of a token that is not on the device are unknown
        scores[tokens.kv.places < 0] = _UNKNOWN
        return scores


class _ValueNorm(HeadKVScorer):
    """The L1 norm of a token's value."""

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        return sequence.values(layer).abs().sum(-1).T
