"""A trace as Trace Event JSON, the timeline format of Perfetto and Chrome.

Events with a duration are slices, KV per tier and the budget are counters, a block's life is an
asynchronous slice on the track of its depth, and every other event is an instant. Times are whole
microseconds. Slices of a track never overlap: Perfetto drops those that do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from arbor.events import KV, Boundary, Ended, Event, Header, Opened, Pruned
from arbor.trace.fold import budget_of
from arbor.trace.read import Trace
from arbor.trace.write import finite

PROCESS = 1
TRACKS = {"forward": 1, "verify": 2, "kv": 3, "search": 4}
TIERS = tuple(field.name for field in dataclasses.fields(KV))
MOST_CHARACTERS = 200  # of a text in the arguments of a slice


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """A trace as the object of a Trace Event file; dump it as JSON."""
    timeline = _Timeline(budget_of(trace))
    for event, seconds in zip(trace.events, trace.times, strict=True):
        timeline.add(event, seconds)
    timeline.close()
    header = trace.header
    about = {} if header is None else {"schema": header.schema, "run": header.run}
    return {
        "traceEvents": [*_names(header), *timeline.events],
        "displayTimeUnit": "ms",
        "otherData": about,
    }


def _names(header: Header | None) -> list[dict[str, Any]]:
    name = "arbor" if header is None else f"arbor {header.task} {header.run}"
    rows: list[dict[str, Any]] = [_meta("process_name", 0, {"name": name})]
    for track, number in TRACKS.items():
        rows.append(_meta("thread_name", number, {"name": track}))
        rows.append(_meta("thread_sort_index", number, {"sort_index": number}))
    return rows


def _meta(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": arguments}


class _Timeline:
    """Events so far, in order of their times.

    Args:
        budget: slots of the run; None: unknown.
    """

    def __init__(self, budget: int | None) -> None:
        self.events: list[dict[str, Any]] = []
        self._now = 0  # µs; never runs backwards
        self._ends = dict.fromkeys(TRACKS.values(), 0)
        self._open: dict[int, str] = {}  # blocks alive -> the name of their slice
        self._tokens: dict[int, int] = {}
        self._budget = budget
        self._count("budget", budget)

    def add(self, event: Event, seconds: float) -> None:
        """Adds one event; its time is its end."""
        self._now = max(self._now, _microseconds(seconds))
        match event:
            case Header():
                pass
            case Opened():
                self._tokens[event.node] = event.tokens
                self._open[event.node] = f"depth {event.depth}"
                self._life("b", event.node, {"parent": event.parent, "index": event.index})
            case Boundary():
                self._tokens[event.node] = len(event.ids)
                self._instant(event)
            case Pruned():
                self._instant(event)
                for node in event.nodes:
                    self._end(node)
            case Ended():
                self._instant(event)
            case _ if hasattr(event, "elapsed_s"):
                self._slice(event)
            case _:
                self._instant(event)
        kv = getattr(event, "kv", None)
        if isinstance(kv, KV):
            for tier in TIERS:
                self._count(tier, getattr(kv, tier))

    def close(self) -> None:
        """Ends the blocks that are still open."""
        for node in list(self._open):
            self._end(node)
        self._count("budget", self._budget)

    def _slice(self, event: Event) -> None:
        """A slice that ends now and begins after the previous slice of its track."""
        track = TRACKS.get(event.name, TRACKS["kv"])
        length = _microseconds(event.elapsed_s)  # type: ignore[union-attr]  # checked by `add`
        start = max(self._ends[track], self._now - length)
        self._ends[track] = max(start, self._now)
        name = str(getattr(event, "kind", event.name))
        row = {"ph": "X", "ts": start, "dur": self._ends[track] - start, "tid": track}
        self._put({**row, "name": name, "args": _arguments(event)})

    def _instant(self, event: Event) -> None:
        track = TRACKS["kv" if hasattr(event, "kv") or event.name == "pressure" else "search"]
        row = {"ph": "i", "s": "t", "ts": self._now, "tid": track}
        self._put({**row, "name": event.name, "args": _arguments(event)})

    def _count(self, name: str, tokens: int | None) -> None:
        if tokens is not None:
            row = {"ph": "C", "ts": self._now, "tid": 0}
            self._put({**row, "name": f"KV {name}", "args": {"tokens": tokens}})

    def _life(self, phase: str, node: int, arguments: dict[str, Any]) -> None:
        row = {"ph": phase, "cat": "block", "ts": self._now, "tid": TRACKS["search"]}
        place = {"id2": {"local": hex(node)}, "name": self._open[node]}
        self._put({**row, **place, "args": {"block": node} | arguments})

    def _end(self, node: int) -> None:
        if node in self._open:
            self._life("e", node, {"tokens": self._tokens[node]})
            del self._open[node]

    def _put(self, row: dict[str, Any]) -> None:
        self.events.append({"pid": PROCESS} | row)


def _microseconds(seconds: float) -> int:
    """Whole microseconds; 0 for what is negative, undefined or beyond a float."""
    scaled = seconds * 1_000_000
    return max(0, round(scaled)) if math.isfinite(scaled) else 0


def _arguments(event: Event) -> dict[str, Any]:
    """The fields of an event that a slice shows: no token ids, short texts."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name == "ids":
            shown["tokens"] = len(value)
        elif isinstance(value, str):
            shown[field.name] = value[:MOST_CHARACTERS]
        elif field.name not in ("kv", "elapsed_s", "metrics"):
            shown[field.name] = finite(value)
    return shown
