"""Thresholds of CGEE that were calibrated for a model and a task, in a file next to the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arbor.errors import UsageError
from arbor.papers.rksc.layer_exit import LayerExit
from arbor.support.atomic_write import write_atomically
from arbor.support.cache_dir import model_file

FILE = "exit.json"  # its name in a model directory
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
    tasks = dict(_read(path)) if path.exists() else {}
    tasks[task] = {
        **{method: thresholds.to_dict() for method, thresholds in chosen.items()},
        "provenance": provenance,
    }
    document = {"schema": _FORMAT, "tasks": tasks}
    write_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")


def load_thresholds(path: Path, task: str, method: Method = "risk") -> ExitThresholds | None:
    """The thresholds for a task from a file of `save_thresholds`; None if it has none.

    Raises:
        UsageError: not such a file.
    """
    found = _read(path).get(task)
    if found is None:
        return None
    try:
        return ExitThresholds.from_dict(found[method])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error


def calibrated_thresholds(
    model: str, revision: str | None, task: str, method: Method
) -> ExitThresholds | None:
    """What was calibrated for a model and a task; None: nothing.

    Args:
        model: its directory, which holds the file, or its id on the Hub: then the cache does.
        revision: of the Hub; None: its main branch.
        task: its name.
        method: that chose the thresholds.
    """
    folder = Path(model)
    path = folder / FILE if folder.is_dir() else model_file("exit", model, revision)
    return load_thresholds(path, task, method) if path.is_file() else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _FORMAT:
            raise ValueError(f"its schema is {document['schema']}, not {_FORMAT}")
        tasks: Mapping[str, Any] = dict(document["tasks"])
        return tasks
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "exit-unreadable",
        f"{path} holds no thresholds of CGEE: {type(error).__name__}: {error}.",
        "`arbor calibrate exit` writes such a file.",
        path=str(path),
    )
