"""Similarity of two texts by their hidden states, later layers counting more (RKSC's ASKS)."""

from __future__ import annotations

import torch
from torch import Tensor

from arbor.errors import UsageError

ALPHA = 1.5  # how much later layers count; the paper's grid search over 0.5, 1.0, 1.5 and 2.0


def layer_weights(layers: int, alpha: float = ALPHA) -> Tensor:
    """w_l = exp(alpha l / L) / sum over l' of exp(alpha l' / L), l = 1 ... L; float64 [layers]."""
    depth = torch.arange(1, layers + 1, dtype=torch.float64) / layers
    return torch.softmax(alpha * depth, 0)


def similarity(branch: Tensor, root: Tensor, *, alpha: float = ALPHA) -> float:
    """sigma = sum over layers of w_l cos(h_branch^l, h_root^l), in [-1, 1].

    RKSC, arXiv 2606.09937, equation 2. The paper does not say which token's hidden state h is;
    arbor passes the mean over the tokens in which two texts differ. A state of zeros has cosine 0.

    Args:
        branch: [L, d], a hidden state per layer, first layer first.
        root: [L, d], likewise.
        alpha: how much later layers count; 0: all alike.

    Raises:
        UsageError: shapes that are not the same [L, d], with L and d at least 1.
    """
    if branch.shape != root.shape or branch.ndim != 2 or not branch.numel():
        raise UsageError(
            "similarity",
            f"states of shape {tuple(branch.shape)} and {tuple(root.shape)}.",
            "Both are [layers, hidden size].",
        )
    one, other = branch.double().cpu(), root.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=1, eps=1e-30)
    return float((layer_weights(len(one), alpha) * cosine).sum())
