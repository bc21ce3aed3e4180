"""LayerExit: when a question leaves a verification before the last layer (CGEE, level 2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arbor.errors import check_settings

Measure = Literal["entropy", "margin"]

# decimals in which uncertainties are compared: their last bits depend on the batch
DECIMALS = 4


@dataclass(frozen=True)
class LayerExit:
    """The rule by which a question leaves after a layer, with the logits of its state there.

        H(l) = -sum_v p_v ln p_v / ln|V|,   p = softmax(unembed(norm(h_l)))

    A question leaves after layer l >= `first` if H(l) < `threshold` and |H(l) - H(l')| < `settle`
    at `patience` checks in a row, where l' is the check before. h_l is the state of the question's
    last token; its other tokens leave with it.

    Source: RKSC (arXiv 2606.09937), section 2.3, Eq. 5. Differs: entropies are relative to ln|V|,
    so that one threshold serves several vocabularies; the state passes the final norm, as the last
    layer's does (`norm=false`: the paper's form); several checks in a row have to agree, and
    fewer layers may be checked. H is compared to `DECIMALS` decimals.

    Args:
        first: least layers that a question runs through, >= 1.
        threshold: H below which a state counts as certain.
        settle: change of H below which it counts as settled.
        patience: checks in a row that have to find both, >= 1.
        every: layers from one check to the next, >= 1.
        measure: ``margin``: 1 - (p1 - p2) instead of H, p1 and p2 the largest probabilities among
            the verdicts alone; only the verdicts are unembedded.
        norm: the final norm comes before the unembedding.
    """

    first: int = 2
    threshold: float = 0.3
    settle: float = 0.02
    patience: int = 2
    every: int = 1
    measure: Measure = "entropy"
    norm: bool = True

    def __post_init__(self) -> None:
        check_settings(
            self,
            first=(self.first >= 1, "at least 1"),
            patience=(self.patience >= 1, "at least 1"),
            every=(self.every >= 1, "at least 1"),
            threshold=(self.threshold >= 0, "0 or more"),
            settle=(self.settle >= 0, "0 or more"),
        )

    def checks(self, layers: int) -> bool:
        """Whether a state that has run through so many layers is looked at.

        The `patience` checks before `first` are the ones that an exit there needs.
        """
        ahead = self.first - layers
        return layers >= 1 and ahead <= self.patience * self.every and ahead % self.every == 0

    def is_over(self, layers: int, values: Sequence[float]) -> bool:
        """Whether a question leaves.

        Args:
            layers: those it has run through, one of the checked numbers.
            values: uncertainties of all checks so far, the last one after `layers`.
        """
        if layers < self.first or len(values) <= self.patience:
            return False
        recent = [round(value, DECIMALS) for value in values[-self.patience - 1 :]]
        return all(
            now < self.threshold and round(abs(now - before), DECIMALS) < self.settle
            for before, now in itertools.pairwise(recent)
        )
