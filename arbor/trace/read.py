"""Reads traces, damaged ones included, back into events."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from arbor.errors import TraceError
from arbor.events import EVENTS, KV, Ended, Event, Header
from arbor.trace.write import GZIP, PRIVATE, SCHEMA

CHUNK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
NO_TOKEN = -1  # in place of each token id that was left out

_TYPES: dict[str, type[Any]] = {kind.name: kind for kind in EVENTS}
_HINTS: dict[Any, dict[str, Any]] = {
    kind: {f.name: typing.get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}
    for kind in (*EVENTS, KV)
}
_MAJOR = int(SCHEMA.rpartition("/")[2])


def unreadable_lines(count: int, first: int | None) -> str:
    """``line 120 is unreadable``; from two on ``3 lines are unreadable, first line 120``."""
    if count == 1:
        return f"line {first:,} is unreadable"
    return f"{count:,} lines are unreadable, first line {first:,}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Events lost before a line: it has the number `found` instead of `expected`."""

    line: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read.

    Attributes:
        path: where it was read from.
        events: every readable event of a known type, in file order.
        sequence: their numbers in the file.
        times: their seconds since the start; NaN where a line had none.
        lines: lines in the file.
        bad_lines: number of unreadable lines, skipped.
        first_bad_line: the first of them, from 1.
        gaps: gaps in the numbering.
        unknown: number of events of unknown types, skipped; not damage.
        cut: the file ends inside a line or inside a gzip stream.
        words: whether it has problem, texts and token ids; `--trace-text none` leaves them out.
    """

    path: Path
    events: tuple[Event, ...]
    sequence: tuple[int, ...]
    times: tuple[float, ...]
    lines: int
    bad_lines: int
    first_bad_line: int | None
    gaps: tuple[Gap, ...]
    unknown: int
    cut: bool
    words: bool = True

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
        if self.bad_lines:
            parts.append(unreadable_lines(self.bad_lines, self.first_bad_line))
        elif self.gaps:
            parts.append(
                f"{len(self.gaps)} gap(s) in the numbering, first at line {self.gaps[0].line}"
            )
        return ", ".join(parts)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace, plain or gzip, whole or cut.

    Unreadable lines are skipped and counted; unknown events and fields are ignored.

    Raises:
        TraceError: ``trace-unreadable``, no such file; ``trace-version``, written by a newer major
            version; ``trace-corrupt``, a file without events.
    """
    path = Path(path)
    reading = Reading(path)
    for line, whole in lines_of(path):
        reading.add(line, whole)
    return reading.trace()


@dataclass(slots=True)
class Reading:
    """The part of one file read so far."""

    path: Path
    events: list[Event] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lines: int = 0
    bad: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    due: int = 0
    unknown: int = 0
    cut: bool = False
    words: bool = True

    def add(self, line: bytes, whole: bool) -> bool:
        """Adds one line; returns whether it is an event. `whole` is False where the file ends
        early.

        Raises:
            TraceError: ``trace-version``.
        """
        if not whole:
            self.cut = True
            if not line:
                return False
        self.lines += 1
        try:
            record = json.loads(line, parse_constant=_refuse)
            kind = record["e"]
            if kind == Header.name:
                _check_version(str(record["schema"]), self.path)
                self.words = "problem" in record
            event = from_record(record)
            number = int(record.get("i", self.due))
            seconds = float(record.get("t", math.nan))
        except TraceError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.bad.append(self.lines)
            return False
        if number != self.due:
            self.gaps.append(Gap(self.lines, self.due, number))
        self.due = number + 1
        if event is None:
            self.unknown += 1
            return True
        self.events.append(event)
        self.sequence.append(number)
        self.times.append(seconds)
        return True

    def trace(self) -> Trace:
        """The trace.

        Raises:
            TraceError: ``trace-corrupt``, no event was read.
        """
        if not self.events:
            raise TraceError(
                "trace-corrupt",
                (
                    f"{self.path}: none of {self.lines:,} line(s) is an event of {SCHEMA}."
                    if self.lines
                    else f"{self.path}: the file is empty."
                ),
                "Is it a trace that arbor wrote?",
                path=str(self.path),
                lines=self.lines,
            )
        return Trace(
            path=self.path,
            events=tuple(self.events),
            sequence=tuple(self.sequence),
            times=tuple(self.times),
            lines=self.lines,
            bad_lines=len(self.bad),
            first_bad_line=self.bad[0] if self.bad else None,
            gaps=tuple(self.gaps),
            unknown=self.unknown,
            cut=self.cut,
            words=self.words,
        )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_version(schema: str, path: Path) -> None:
    match = re.fullmatch(r"arbor\.trace/(\d+)(?:\.\d+)?", schema)
    if match is None:
        raise ValueError(f"unknown schema {schema}")
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


def from_record(record: dict[str, Any]) -> Event | None:
    """A JSON object as an event; None for an unknown type.

    Unknown fields are ignored, null instead of a float is NaN, and a missing field takes its
    default. Fields left out for privacy are empty, each token id `NO_TOKEN`.

    Raises:
        ValueError, TypeError, KeyError: the object is not an event.
    """
    kind = _TYPES.get(record["e"])
    return None if kind is None else cast("Event", _build(kind, _withheld(kind, record) | record))


def _withheld(kind: type[Any], record: dict[str, Any]) -> dict[str, Any]:
    """Empty values for the private fields that a record lacks."""
    empty: dict[str, Any] = {}
    for name in PRIVATE:
        hint = _HINTS[kind].get(name)
        if hint is None or name in record:
            continue
        if types.NoneType in typing.get_args(hint):
            empty[name] = None
        else:
            empty[name] = "" if hint is str else [NO_TOKEN] * int(record["tokens"])
    return empty


def _build(kind: type[Any], record: dict[str, Any]) -> Any:
    """A dataclass from a JSON object with its fields."""
    hints = _HINTS[kind]
    return kind(**{name: _convert(h, record[name]) for name, h in hints.items() if name in record})


def _convert(hint: Any, value: Any) -> Any:
    """A JSON value as a field's type."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return value
    if hint in _HINTS:
        return _build(hint, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(arguments[0], item) for item in value)
        return tuple(_convert(h, item) for h, item in zip(arguments, value, strict=True))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        return _convert(next(h for h in arguments if h is not types.NoneType), value)
    if hint is float:
        return math.nan if value is None else float(value)
    expected = origin or hint
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not of type {expected.__name__}")
    return value
