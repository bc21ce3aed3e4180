"""Tokens whose keys differ from the others win: KeyDiff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy
from arbor.retention.token_kv import HeadKVScorer, KVSequence, unit_vectors

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


POLICY = Policy(
    Pooled(),
    KeyDiff(),
    summary="Keeps the tokens whose keys resemble the others least (KeyDiff).",
)
