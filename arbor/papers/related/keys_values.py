"""Tokens win by their keys, or by their values and attention: KeyDiff, VATP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Floats
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import HeadKVScorer, KVSequence, TokensOnDevice, unit_vectors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(HeadKVScorer):
    """A token scores how little its key resembles the mean key of its tree.

        score_i = -cos(k_i, mean_j k_j / |k_j|)

    Source: KeyDiff (arXiv 2504.15364), as kvpress has it; keys are position-encoded. Differs: where
    one set is kept for all heads, the mean over those of the observed layers; asked whenever
    room runs out, not block by block of a prefill; sinks and recent tokens are protected
    (`Protect`), where the paper protects none; the mean key is that of all tokens of the tree on
    the device.
    """

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        unit = unit_vectors(sequence.keys(layer))
        return -(unit * unit_vectors(unit.mean(0))).sum(-1).T


KEYDIFF_POLICY = Policy(
    Pooled(),
    KeyDiff(),
    summary="Keeps the tokens whose keys resemble the others least (KeyDiff).",
)


@dataclass(frozen=True)
class VATP(HeadKVScorer):
    """A token scores the attention it has received, times the L1 norm of its value.

        score_i = A_i |v_i|_1

    Source: VATP (arXiv 2406.12335) over H2O's attention; it keeps the first 20 tokens, whose values
    are small (`Protect.sinks` of the policy ``vatp``). Differs: where one set is kept
    for all heads, the product of two means over those of the observed layers, not the mean of a
    product per head.
    """

    observes: ClassVar[bool] = True

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        return sequence.values(layer).abs().sum(-1).T

    def scores(self, tokens: TokensOnDevice) -> Floats:
        scores: Floats = tokens.mass * super().scores(tokens)
        # the value of a token that is not on the device is unknown
        scores[tokens.kv.places < 0] = -1.0
        return scores


VATP_POLICY = Policy(
    Pooled(),
    VATP(),
    Protect(sinks=20),
    summary="Keeps the tokens with the most attention times the size of their values (VATP).",
)
