"""Reads traces, damaged ones included, back into events."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arbor.errors import TraceError
from arbor.events import Boundary, Ended, Event, Header
from arbor.trace.records import Unreadable, from_record, number_of, parse, seconds_of
from arbor.trace.write import GZIP, SCHEMA

CHUNK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
_MAJOR = int(SCHEMA.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class BadLine:
    """An unreadable line: its number, from 1, and why no event could be made of it."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line:,} is unreadable: {self.reason}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Events lost before a line: it has the number `found` instead of `expected`."""

    line: int
    expected: int
    found: int


@dataclass(slots=True)
class Trace:
    """A trace as read.

    Attributes:
        path: where it was read from.
        events: every readable event of a known type, in file order.
        sequence: their numbers in the file.
        times: their seconds since the start; NaN where a line had none.
        lines: lines in the file.
        bad: the unreadable lines, skipped.
        gaps: gaps in the numbering.
        due: the number that the next event should have.
        unknown: number of events of unknown types, skipped; not damage.
        cut: the file ends inside a line or inside a gzip stream.
        words: whether it has problem, texts and token ids; `--trace-text none` leaves them out.
    """

    path: Path
    events: list[Event] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lines: int = 0
    bad: list[BadLine] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    due: int = 0
    unknown: int = 0
    cut: bool = False
    words: bool = True

    @property
    def bad_lines(self) -> int:
        """Number of unreadable lines."""
        return len(self.bad)

    @property
    def first_bad_line(self) -> int | None:
        """The first unreadable line, from 1."""
        return self.bad[0].line if self.bad else None

    @property
    def header(self) -> Header | None:
        """The header, if it survived."""
        return next((event for event in self.events if isinstance(event, Header)), None)

    @property
    def end(self) -> Ended | None:
        """The end, if the run reached it."""
        return next((event for event in reversed(self.events) if isinstance(event, Ended)), None)

    @property
    def banner(self) -> str:
        """The file's damage, in one line; empty for a whole file."""
        parts = []
        if self.cut or self.end is None:
            parts.append("incomplete trace")
        if self.header is None:
            parts.append("no header")
        if self.bad:
            several = f"{len(self.bad):,} lines are unreadable, first "
            parts.append(f"{several if len(self.bad) > 1 else ''}{self.bad[0]}")
        elif self.gaps:
            several = f"in {len(self.gaps):,} places, first "
            place = f"{several if len(self.gaps) > 1 else ''}before line {self.gaps[0].line:,}"
            parts.append(f"events are missing or out of order {place}")
        return ", ".join(parts)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace, plain or gzip, whole or cut.

    Unreadable lines are skipped and counted; unknown events and fields are ignored.

    Raises:
        TraceError: ``trace-unreadable``, no such file; ``trace-version``, written by a newer major
            version; ``trace-corrupt``, a file without events.
    """
    trace = Trace(Path(path))
    for _ in records_of(trace):
        pass
    return trace


def records_of(trace: Trace) -> Iterator[dict[str, Any]]:
    """Reads the file of an empty trace into it, and yields the JSON object of each event.

    Raises:
        TraceError: as `read_trace`.
    """
    for line, whole in lines_of(trace.path):
        record = _add(trace, line, whole)
        if record is not None:
            yield record
    if not trace.events:
        empty = f"no line is an event of {SCHEMA}" if trace.lines else "the file is empty"
        raise TraceError(
            "trace-corrupt",
            f"{trace.path}: {empty}.",
            "Is it a trace that arbor wrote?",
            path=str(trace.path),
            lines=trace.lines,
        )


def _add(trace: Trace, line: bytes, whole: bool) -> dict[str, Any] | None:
    """Adds one line; returns its JSON object, None where it is not an event.

    Args:
        trace: added to.
        line: without its newline.
        whole: False where the file ends early.

    Raises:
        TraceError: ``trace-version``.
    """
    if not whole:
        trace.cut = True
        if not line:
            return None
    trace.lines += 1
    try:
        record = parse(line)
        if record["e"] == Header.name:
            _check_version(record.get("schema"), trace.path)
        event = from_record(record)
        number = number_of(record, trace.due)
        seconds = seconds_of(record)
    except Unreadable as error:
        trace.bad.append(BadLine(trace.lines, str(error)))
        return None
    if number != trace.due:
        trace.gaps.append(Gap(trace.lines, trace.due, number))
    trace.due = number + 1
    if event is None:
        trace.unknown += 1
        return record
    if isinstance(event, Header):
        trace.words = "problem" in record
    elif isinstance(event, Boundary) and "ids" not in record:  # its header may be lost
        trace.words = False
    trace.events.append(event)
    trace.sequence.append(number)
    trace.times.append(seconds)
    return record


def _check_version(schema: Any, path: Path) -> None:
    match = re.fullmatch(r"arbor\.trace/(\d{1,9})(?:\.\d+)?", str(schema), re.ASCII)
    if match is None:
        raise Unreadable("schema: not one of a trace")
    if int(match[1]) > _MAJOR:
        raise TraceError(
            "trace-version",
            f"{path} is {schema}; this arbor reads {SCHEMA}.",
            "Upgrade arbor to read it.",
            path=str(path),
            schema=schema,
        )


def lines_of(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Lines of a file without their newlines, each with whether it is whole.

    Raises:
        TraceError: ``trace-unreadable``, no such file.
    """
    rest = b""
    try:
        for chunk, whole in _chunks(path):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line, True
            if not whole:
                yield rest, False
                return
    except OSError as error:
        raise TraceError(
            "trace-unreadable",
            f"{path} cannot be read: {error.strerror}.",
            "A trace is written with --trace run.arbor.jsonl.",
            path=str(path),
        ) from error
    if rest:
        yield rest, False


def _chunks(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The file's bytes, unpacked; the last part is not whole where a gzip stream is damaged."""
    with path.open("rb") as file:
        data = file.read(CHUNK_BYTES)
        if not data.startswith(GZIP_MAGIC):
            while data:
                yield data, True
                data = file.read(CHUNK_BYTES)
            return
        unpacker = zlib.decompressobj(GZIP)
        while data:
            try:
                yield unpacker.decompress(data), True
            except zlib.error:
                yield b"", False
                return
            data = unpacker.unused_data
            if unpacker.eof:
                unpacker = zlib.decompressobj(GZIP) if data else unpacker
            data = data or file.read(CHUNK_BYTES)
        if not unpacker.eof:
            yield unpacker.flush(), False
