"""LayerExit: when a question leaves a verification before the last layer (CGEE, level 2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from arbor.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

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
        for name in ("first", "patience", "every"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be at least 1."
                )
        for name in ("threshold", "settle"):
            if not getattr(self, name) >= 0:  # also refuses nan
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be 0 or more."
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


@dataclass(slots=True, eq=False)
class Exiting:
    """One question on its way through the layers.

    Attributes:
        rule: when it leaves.
        verdicts: token ids whose probabilities decide, for the measure ``margin``.
        audit: it runs through every layer, and `early` is what it would have left with.
        keep: whether `kept` is filled.
        layers: layers it ran through, or would have; 0 before the forward.
        checked: layers of the checks.
        values: uncertainties there.
        early: float32 [V], logits of the state it would have left with; None where it would not.
        kept: float32 [V] on the CPU, logits at each check.
    """

    rule: LayerExit
    verdicts: Sequence[int] = ()
    audit: bool = False
    keep: bool = False
    layers: int = 0
    checked: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    early: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)

    def begin(self, layers: int) -> None:
        """A forward begins; one that failed may have gone before.

        Args:
            layers: of the model.
        """
        self.layers = layers
        self.checked, self.values, self.early, self.kept = [], [], None, []

    def look(self, layers: int, value: float) -> bool:
        """Record a check; whether the question leaves, or would."""
        self.checked.append(layers)
        self.values.append(value)
        if self.rule.is_over(layers, self.values):
            self.layers = layers
            return True
        return False

    def by_layer(self, layers: int) -> tuple[float, ...]:
        """The uncertainty after each of the model's layers; nan where it was not looked at."""
        known = dict(zip(self.checked, self.values, strict=True))
        return tuple(
            round(known.get(layer, float("nan")), DECIMALS) for layer in range(1, layers + 1)
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to questions that may leave early.

    Attributes:
        logits: [n, V] float32, after the layer each question left at.
        layers: layers each ran through.
        full: [n, V] float32 after the last layer, under an audit.
    """

    logits: Tensor
    layers: tuple[int, ...]
    full: Tensor | None = None
