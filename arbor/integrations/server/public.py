"""Events and solutions as JSON that names no path of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from arbor.events import Event, Header
from arbor.run.solution import Solution
from arbor.trace.write import finite, to_record

HIDDEN = "(path)"


class PublicRecords:
    """The events of one run as records of a trace, without paths of the machine.

    Args:
        source: name or path of the model, as the solver was given it.
        name: of the model in requests.
        clock: seconds; only differences count.
    """

    def __init__(
        self, source: str, name: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._source = source
        self._name = name
        self._clock = clock
        self._start: float | None = None
        self._count = 0

    def record(self, event: Event) -> dict[str, Any]:
        """One event, as a line of a trace holds it."""
        now = self._clock()
        if self._start is None:
            self._start = now
        record = to_record(event)
        if isinstance(event, Header):
            record["config"] = self._public(record["config"])
            record["model"] = self._public(record["model"])
        numbered = {"e": record.pop("e"), "i": self._count, "t": round(now - self._start, 6)}
        self._count += 1
        return {**numbered, **record}

    def solution(self, solution: Solution) -> dict[str, Any]:
        """A solution, as `Solution.to_dict`."""
        document: dict[str, Any] = finite(solution.to_dict())
        document["config"] = self._public(document["config"])
        return document

    def _public(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._public(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._public(each) for each in value]
        if not isinstance(value, str):
            return value
        if value == self._source:
            return self._name
        return HIDDEN if _is_absolute(value) else value


def _is_absolute(text: str) -> bool:
    """Whether a text is a path from a root; one of this machine."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
