"""PageTrace: the records of a run that a page shows, event types of later versions included."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbor.events import Event
from arbor.trace.read import Reading, lines_of
from arbor.trace.write import to_record

IDS = "ids"  # token ids are half of a trace's bytes and never shown; their number stays


@dataclass(frozen=True, slots=True)
class PageTrace:
    """A run on a page.

    Attributes:
        name: its title, for example a file name.
        records: its events as JSON objects, in order; a boundary has the number of its tokens
            instead of their ids.
        banner: its damage, in one line; empty for a whole trace.
    """

    name: str
    records: tuple[dict[str, Any], ...]
    banner: str = ""

    def count(self, kind: str) -> int:
        """Number of events of a type."""
        return sum(record["e"] == kind for record in self.records)

    @property
    def ended(self) -> bool:
        """Whether the run has an end."""
        return self.count("end") > 0


def read_page_trace(path: str | os.PathLike[str]) -> PageTrace:
    """Reads a trace, plain or gzip, whole or cut; keeps events of unknown types.

    Raises:
        TraceError: as `read_trace`.
    """
    reading = Reading(Path(path))
    records = []
    for line, whole in lines_of(reading.path):
        record = reading.add(line, whole)
        if record is not None:
            records.append(shortened(record))
    trace = reading.trace()
    return PageTrace(trace.path.name, tuple(records), trace.banner)


def page_trace_of(name: str, events: Iterable[tuple[float, Event]]) -> PageTrace:
    """A page trace from (seconds, event) pairs in memory."""
    records = [
        shortened({"e": event.name, "i": number, "t": round(seconds, 6)} | to_record(event))
        for number, (seconds, event) in enumerate(events)
    ]
    recording = PageTrace(name, tuple(records))
    return recording if recording.ended else PageTrace(name, tuple(records), "incomplete trace")


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the number of its token ids instead of them."""
    ids = record.get(IDS)
    if not isinstance(ids, list | tuple):
        return record
    return {key: value for key, value in record.items() if key != IDS} | {"tokens": len(ids)}
