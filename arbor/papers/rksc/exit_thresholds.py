"""When a question leaves early, and thresholds of CGEE calibrated for a model and a task."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arbor.errors import UsageError, check_settings
from arbor.support.atomic_write import write_atomically

Measure = Literal["entropy", "margin"]

# decimals in which confidences and uncertainties are compared: their last bits depend on the batch
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


Method = Literal["risk", "paper"]

_FORMAT = "arbor.exit/1"


@dataclass(frozen=True)
class ExitThresholds:
    """Thresholds of both levels.

    Attributes:
        confidence, gap: of `CGEE`; 1 and 1: skip nothing.
        exit_rule: of `CGEE`; a threshold of 0: leave nowhere.
    """

    confidence: float = 1.0
    gap: float = 1.0
    exit_rule: LayerExit = field(default_factory=lambda: LayerExit(threshold=0.0))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExitThresholds:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        rule = LayerExit(**data["exit_rule"])
        return cls(float(data["confidence"]), float(data["gap"]), rule)


Chosen = Mapping[Method, ExitThresholds]


def save_thresholds(path: Path, task: str, chosen: Chosen, **provenance: Any) -> None:
    """Write the thresholds for a task; those for other tasks in the file stay.

    Args:
        path: where to.
        task: its name.
        chosen: by the method that chose them.
        provenance: their origin (model, date, figures), for readers of the file.

    Raises:
        UsageError: the file cannot be written, or holds something else.
    """
    tasks = thresholds_by_task(path)
    tasks[task] = {
        **{method: thresholds.to_dict() for method, thresholds in chosen.items()},
        "provenance": provenance,
    }
    document = {"schema": _FORMAT, "tasks": tasks}
    write_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")


def load_thresholds(path: Path, task: str, method: Method = "risk") -> ExitThresholds | None:
    """The thresholds for a task from a file of `save_thresholds`; None if it has none.

    Raises:
        UsageError: another file.
    """
    found = thresholds_by_task(path).get(task)
    if found is None:
        return None
    try:
        return ExitThresholds.from_dict(found[method])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error


def thresholds_by_task(path: Path) -> dict[str, Any]:
    """What a file of `save_thresholds` holds for each task, as JSON; nothing where there is none.

    Raises:
        UsageError: another file.
    """
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _FORMAT:
            raise ValueError(f"its schema is {document['schema']}, not {_FORMAT}")
        return dict(document["tasks"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "exit-unreadable",
        f"{path} holds no thresholds of CGEE: {type(error).__name__}: {error}.",
        "Delete it; `arbor calibrate exit` writes a new one.",
        path=str(path),
    )
