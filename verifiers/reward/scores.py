"""Scores of a reward model as values: probabilities from the logits of a head or of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbor.errors import logits_not_finite

from ..self_eval import CERTAIN

if TYPE_CHECKING:
    from torch import Tensor


def values_of(scores: Tensor, label: int | None) -> list[float]:
    """The probability that a step is good, in [0, `CERTAIN`].

    Args:
        scores: [n, labels] float32.
        label: of a good step; None: the second of two, the only one of one. A single label is the
            logit of a probability, several are those of a distribution.

    Raises:
        ModelError: the scores are not finite.
    """
    import torch

    logits = scores.double().cpu()
    if logits.shape[1] == 1:
        probabilities = torch.sigmoid(logits[:, 0])
    else:
        probabilities = torch.softmax(logits, dim=1)[:, 1 if label is None else label]
    if not bool(probabilities.isfinite().all()):
        raise logits_not_finite()
    return [min(value, CERTAIN) for value in probabilities.tolist()]
