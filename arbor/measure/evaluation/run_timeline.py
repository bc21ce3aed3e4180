"""RunTimeline: the slots that a run's searches used over time, and which were in progress when."""

from __future__ import annotations

import hashlib
import heapq
import html
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from arbor.errors import TraceError
from arbor.events import Header
from arbor.measure.evaluation.folder import trace_of
from arbor.measure.evaluation.results import SampleRow
from arbor.trace.read import lines_of

BINS = 1200  # columns of the picture
PAUSE_S = 60.0  # gap without a search from which the picture has a mark
MOST_TICKS = 1 << 15
TOGETHER_S = 0.05  # clocks of two traces agree to that

# an event's seconds, and the slots its tree holds, or all trees where there are several
_SECONDS = re.compile(rb'^\{"e":"[^"]*","i":\d+,"t":([0-9.eE+-]+)[,}]')
_KV = re.compile(rb'"kv":\{"device":(\d+)[^}]*?(?:"pool":(\d+))?\}')


@dataclass(frozen=True, slots=True)
class Bar:
    """The time in which a sample was in progress.

    Attributes:
        row: its place among the run's rows.
        start_s: on the timeline.
        seconds: how long.
        lane: samples in progress at the same time have different ones, from 0.
    """

    row: int
    start_s: float
    seconds: float
    lane: int


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The slots that a run's searches used over time, and which were in progress when.

    Times without a search are left out, so that a resumed run is in one picture.

    Attributes:
        seconds: its length.
        used: most slots that all searches held together, in each of `BINS` equal parts.
        budget: slots of their budget, likewise.
        bars: one for each sample with a trace.
        pauses_s: where a longer time was left out.
    """

    seconds: float
    used: tuple[int, ...]
    budget: tuple[int, ...]
    bars: tuple[Bar, ...]
    pauses_s: tuple[float, ...]

    def to_json(self) -> str:
        """One line of JSON, a bar as a list."""
        data = asdict(self) | {
            "bars": [[b.row, b.start_s, b.seconds, b.lane] for b in self.bars],
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            ValueError, LookupError, TypeError: anything else.
        """
        data = json.loads(text)
        return cls(
            float(data["seconds"]),
            tuple(map(int, data["used"])),
            tuple(map(int, data["budget"])),
            tuple(
                Bar(int(row), float(start), float(seconds), int(lane))
                for row, start, seconds, lane in data["bars"]
            ),
            tuple(map(float, data["pauses_s"])),
        )


@dataclass(frozen=True, slots=True)
class _TimedSearch:
    """A search's place in time: its row, epoch seconds of beginning and end, and its budget."""

    row: int
    start_s: float
    end_s: float
    budget: int


class _Ticks:
    """The most and the last value in each short part of time, in bounded memory.

    The parts are a millisecond long at first, and twice as long whenever there are too many.
    """

    def __init__(self) -> None:
        self.width_s = 0.001
        self.values: dict[int, tuple[int, float, int]] = {}  # most, seconds of the last, the last

    def add(self, seconds: float, value: int) -> None:
        """Add a value at a time."""
        self._put(int(seconds / self.width_s), (value, seconds, value))
        while len(self.values) > MOST_TICKS:
            self.width_s *= 2
            values, self.values = self.values, {}
            for tick, each in values.items():
                self._put(tick // 2, each)

    def _put(self, tick: int, new: tuple[int, float, int]) -> None:
        old = self.values.get(tick)
        if old is not None:
            most = max(old[0], new[0])
            new = (most, *(new[1:] if new[1] >= old[1] else old[1:]))
        self.values[tick] = new


def run_timeline(folder: Path, rows: Sequence[SampleRow]) -> RunTimeline | None:
    """The timeline of a run, from the traces there are, each read once as a stream.

    Args:
        folder: of the run.
        rows: rows of ``samples.jsonl``.

    Returns:
        None where there is no readable trace.
    """
    ticks = _Ticks()
    recorded = []
    for place, row in enumerate(rows):
        trace = trace_of(row)
        if trace is not None:
            search = _read(folder / trace, place, ticks)
            if search is not None:
                recorded.append(search)
    return _timeline(recorded, ticks) if recorded else None


def _read(path: Path, row: int, ticks: _Ticks) -> _TimedSearch | None:
    """A trace's place in time, its slots added to `ticks`; None where it cannot be read.

    Only the fields that are needed are looked at, since a run has millions of events.
    """
    start, budget, last = None, 0, b""
    try:
        for line, whole in lines_of(path):
            if start is None:
                header = json.loads(line)
                if header["e"] != Header.name:
                    return None
                start = datetime.fromisoformat(header["created"]).timestamp()
                slots = header["kv"]
                budget = int(slots.get("pool_tokens", slots["budget_tokens"]))
                continue
            if whole:
                last = line
            if b'"kv":{' in line:
                kv, seconds = _KV.search(line), _SECONDS.match(line)
                if kv is not None and seconds is not None:
                    ticks.add(start + float(seconds[1]), int(kv[2] or kv[1]))
        seconds = _SECONDS.match(last)
        if start is None or seconds is None:
            return None
        return _TimedSearch(row, start, start + float(seconds[1]), budget)
    except (TraceError, LookupError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _timeline(recorded: Sequence[_TimedSearch], ticks: _Ticks) -> RunTimeline:
    order = sorted(recorded, key=lambda each: (each.start_s, each.row))
    active: list[list[float]] = []  # begin and end of times with a search, in order
    for each in order:
        if active and each.start_s <= active[-1][1] + TOGETHER_S:
            active[-1][1] = max(active[-1][1], each.end_s)
        else:
            active.append([each.start_s, each.end_s])
    begins = [begin for begin, _ in active]
    offsets, total, pauses = [], 0.0, []
    for place, (begin, end) in enumerate(active):
        if place and begin - active[place - 1][1] > PAUSE_S:
            pauses.append(round(total, 3))
        offsets.append(total)
        total += end - begin
    total = max(total, 1e-3)

    def at(seconds: float) -> float:
        """Place of a time on the timeline."""
        place = max(0, bisect_right(begins, seconds) - 1)
        begin, end = active[place]
        return offsets[place] + min(max(seconds - begin, 0.0), end - begin)

    def bin_of(seconds: float) -> int:
        return min(BINS - 1, int(at(seconds) / total * BINS))

    most: dict[int, int] = {}
    last: dict[int, int] = {}
    for tick in sorted(ticks.values):
        value, seconds, after = ticks.values[tick]
        place = bin_of(seconds)
        most[place] = max(most.get(place, 0), value)
        last[place] = after
    used, held = [], 0
    for place in range(BINS):
        used.append(max(held, most.get(place, 0)))
        held = last.get(place, held)
    budget = [0] * BINS
    bars, free, taken = [], list[int](), list[tuple[float, int]]()
    for each in order:
        while taken and taken[0][0] <= each.start_s + TOGETHER_S:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (each.end_s, lane))
        start = at(each.start_s)
        bars.append(Bar(each.row, round(start, 3), round(at(each.end_s) - start, 3), lane))
        for place in range(bin_of(each.start_s), bin_of(each.end_s) + 1):
            budget[place] = max(budget[place], each.budget)
    for place in range(1, BINS):
        budget[place] = budget[place] or budget[place - 1]  # between two searches
    return RunTimeline(round(total, 3), tuple(used), tuple(budget), tuple(bars), tuple(pauses))


# On the page of the run


def timeline_key(folder: Path, rows: Sequence[SampleRow]) -> str:
    """A digest of what a run's timeline is folded from."""
    facts = []
    for row in rows:
        trace = trace_of(row)
        try:
            state = None if trace is None else (folder / trace).stat()
        except (OSError, ValueError):  # ValueError: no name of a file
            state = None
        facts.append([trace, *([] if state is None else [state.st_size, state.st_mtime_ns])])
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def as_attributes(key: str, timeline: RunTimeline) -> str:
    """A timeline as attributes of an element."""
    return f'data-key="{key}" data-run="{html.escape(timeline.to_json())}"'


def from_page(page: Path, key: str) -> RunTimeline | None:
    """The timeline of an earlier page of the same traces, which need not be read again."""
    try:
        text = page.read_text(encoding="utf-8")
        found = re.search(rf'data-key="{key}" data-run="([^"]*)"', text)
        return None if found is None else RunTimeline.from_json(html.unescape(found[1]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
