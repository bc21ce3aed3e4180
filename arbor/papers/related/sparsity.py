"""Sparsity of attention: the part of the keys that a query barely attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arbor.retention.token_kv import KVSequence, TokenKV, attention_of

if TYPE_CHECKING:
    from torch import Tensor

FAINT = 0.01  # of a row's largest attention: what receives less counts as zero


def token_sparsity(kv: TokenKV) -> NDArray[np.float64]:
    """The sparsity of each token's own query, float64 [T]; nan where it is not kept any more.

    A query is measured over the tokens it sees that are on the device now.

    Args:
        kv: of T tokens, with queries.
    """
    found = [np.zeros(0)]
    for sequence in kv.sequences:
        each = np.full(len(sequence), np.nan)
        here = sequence.wrote >= 0
        if here.any():
            each[sequence.wrote[here]] = query_sparsity(sequence)[here]
        found.append(each)
    # the last number is of the tokens at place -1
    every = np.append(np.concatenate(found), np.nan)
    sparsity: NDArray[np.float64] = every[kv.places]
    return sparsity


def query_sparsity(sequence: KVSequence) -> NDArray[np.float64]:
    """The sparsity of each query of a sequence, the mean over the observed layers, float64 [w]."""
    layers = [
        np.concatenate(
            [
                row_sparsity(logits, sequence.keys(layer).shape[1]).double().cpu().numpy()
                for logits in sequence.whole(layer)
            ][::-1]
        )
        for layer in sequence.layers
    ]
    mean: NDArray[np.float64] = np.mean(layers, axis=0)
    return mean


def row_sparsity(logits: Tensor, heads: int) -> Tensor:
    """The part of the tokens each query sees that receive less than `FAINT` of the row's largest
    attention, [w].

    Of the query heads that read one KV head the largest logit counts; a row is the mean over the KV
    heads of their softmax.

    Args:
        logits: [w, H_q, n], -inf where a query does not see a token.
        heads: KV heads, H_kv.
    """
    grouped = logits.view(len(logits), heads, -1, logits.shape[-1]).amax(2)
    attention = attention_of(grouped).mean(1)
    seen = logits[:, 0] > -np.inf
    faint = seen & (attention < FAINT * attention.amax(-1, keepdim=True))
    return faint.sum(-1) / seen.sum(-1).clamp_min(1)
