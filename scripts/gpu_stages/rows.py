"""Rows of the report: one JSON object a line, on disk before the next check begins."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_stages.predictions import Range

SKIPPED = "skipped"
NOT_AVAILABLE = "not available"


class NotAvailable(Exception):
    """The installed code or the machine lacks what a check needs; the message names it."""


def needs(package: str) -> None:
    """Return if a package is installed, damaged or not.

    Raises:
        NotAvailable: it is not.
    """
    try:
        import_module(package)
    except Exception as error:  # a damaged installation fails in any way
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise NotAvailable(f"{package} is not installed") from error


@dataclass
class Job:
    """What a stage's process works with.

    Attributes:
        stage, part: its name, and which part of the stage it runs.
        device: ``cuda`` or ``cpu``.
        out: the file of rows.
        seconds: after which no further check begins.
        seed: of every random number.
    """

    stage: str
    part: str
    device: str
    out: Path
    seconds: float
    seed: int
    _began: float = field(default_factory=time.monotonic)

    @property
    def small(self) -> bool:
        """Whether this only tries the check: nothing it measures says anything."""
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until no further check begins."""
        return self.seconds - (time.monotonic() - self._began)

    def row(self, name: str, *, predicted: Mapping[str, Range] | None = None, **found: Any) -> None:
        """Append a row, and print it with what was predicted.

        Args:
            name: of the check, unique within stage and part.
            predicted: by the name of the number.
            found: what the row holds; ``ok`` is the verdict where there is one.
        """
        content = {"stage": self.stage, "part": self.part, "name": name, **found}
        if predicted:
            content["predicted"] = {key: str(value) for key, value in predicted.items()}
            content["as_predicted"] = {
                key: found[key] in expected
                for key, expected in predicted.items()
                if isinstance(found.get(key), int | float)
            }
        append(self.out, content)

    def end(self, names: list[str]) -> None:
        """Note the checks that the time did not suffice for."""
        for name in names:
            self.row(name, status=SKIPPED, reason="out of time")

    @contextmanager
    def checking(self, name: str, **about: Any) -> Iterator[None]:
        """Within, an exception becomes a row: a failed check, or one that is not available."""
        try:
            yield
        except NotAvailable as error:
            self.row(name, status=NOT_AVAILABLE, reason=str(error), **about)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            about |= {"reason": reason[:500], "traceback": traceback.format_exc()}
            if self.device == "cuda":  # after running out of memory: how much there was
                import torch  # which the process that starts the others does without

                about["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
            self.row(name, ok=False, **about)


def append(out: Path, content: Mapping[str, Any]) -> None:
    """Write a row to the file and to the disk, and print it."""
    line = json.dumps({name: rounded(value) for name, value in content.items()})
    with out.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, flush=True)


def rounded(value: Any) -> Any:
    """Numbers in four significant digits, None for what JSON has no number for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is left out."""
    rows = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
