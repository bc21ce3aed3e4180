"""Writes a run's events to a file, one JSON object per line: ``arbor.trace/1``.

Each line has ``e`` (type), ``i`` (sequence, from 0), ``t`` (seconds since the first event,
monotonic, 6 decimals) and then the event's own fields. The first line is the header, the last the
end. NaN and infinity become null. Words can be left out: fields named in `PRIVATE`, and texts among
the settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self

from arbor.errors import UsageError
from arbor.events import EVENTS, KV, Event
from arbor.support.file_lock import locked, unlock

SCHEMA = "arbor.trace/1"
# fields that hold words of the problem, of thoughts or of the answer; token ids are words too
PRIVATE = ("problem", "expected", "text", "ids", "alternatives", "answer")
# settings of components that hold words of a prompt or of an answer, whatever they are
TEXTS = frozenset(
    ("system", "prompt", "stop", "yes", "no", "first", "between", "separator", "end", "good", "bad")
)
PLACES = ("name", "model")  # that are no words, even with a space

GZIP = 31  # zlib's window bits for a gzip stream
LEVEL = 5  # of compression; 9 takes nearly three times as long for 3 % less
# events written to a gzip stream together: one by one, each costs twice as much
SYNC_EVERY = 64

logger = logging.getLogger(__name__)


def finite(value: Any) -> Any:
    """The same value with every infinite or undefined float replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return finite(_plain(value))
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_record(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its type as ``e``, then its fields."""
    record = {"e": event.name, **finite(dataclasses.asdict(event))}
    for name, default in _OPTIONAL[type(event)]:
        if getattr(event, name) == default:
            del record[name]
    if isinstance(kv := getattr(event, "kv", None), KV):
        record["kv"] = _plain(kv)
    return record


def without_words(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the fields in `PRIVATE`, and without the texts among the settings; the
    number of token ids stays, as ``tokens``."""
    public = {name: value for name, value in record.items() if name not in PRIVATE}
    if "ids" in record:
        public.setdefault("tokens", len(record["ids"]))
    if isinstance(config := record.get("config"), Mapping):
        public["config"] = config_without_words(config)
    return public


def config_without_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what its user wrote for a model: the format of thoughts, and the
    settings of components that are in `TEXTS` or have a space."""
    return {
        name: _without_texts(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name != "step_format"
    }


def _without_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_texts(each)
            for name, each in value.items()
            if name in PLACES or not _is_text(name, each)
        }
    return [*map(_without_texts, value)] if isinstance(value, list | tuple) else value


def _is_text(name: str, value: Any) -> bool:
    """Whether a setting of a component holds words, alone or in a list."""
    if isinstance(value, list | tuple):
        return any(_is_text(name, each) for each in value)
    return isinstance(value, str) and (name in TEXTS or any(map(str.isspace, value)))


def to_line(record: dict[str, Any]) -> bytes:
    """A record as one line of UTF-8 without newline; lone surrogates become JSON escapes."""
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # NaN and infinity are rare, and checking for them costs more than the rest
        text = _ENCODER.encode(finite(record))
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """A value without a JSON form: a dataclass as its fields, others as text."""
    if isinstance(value, KV):
        record = {"device": value.device, "host": value.host, "compressed": value.compressed}
        more = {"pool": value.pool, "shared": value.shared, "disk": value.disk}
        return record | {name: tokens for name, tokens in more.items() if tokens}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


_ENCODER = json.JSONEncoder(
    ensure_ascii=False,
    check_circular=False,  # events hold no circles
    allow_nan=False,
    separators=(",", ":"),
    default=_plain,
)
_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in EVENTS}
# fields that are left out where they have their default
_OPTIONAL = {
    kind: tuple(
        (field.name, field.default)
        for field in dataclasses.fields(kind)
        if field.metadata.get("only_if_set")
    )
    for kind in EVENTS
}


def refuse_existing(path: Path) -> None:
    """Refuses a file that holds something; empty files, devices and pipes are written to.

    Raises:
        UsageError: it does.
    """
    if path.is_file() and path.stat().st_size:
        raise _exists(path)


def _exists(path: Path) -> UsageError:
    return UsageError(
        "output-exists",
        f"{path} exists.",
        "Name another file with --trace, or overwrite it with --force.",
        path=str(path),
    )


def shared_trace(path: Path) -> UsageError:
    """The error of a search whose trace another writes."""
    return UsageError(
        "trace-shared",
        f"another search is writing the trace {path}.",
        "Name another file, or close the writer that was made for it.",
        path=str(path),
    )


def _opened(path: Path, overwrite: bool) -> FileIO:
    """A file, empty and locked, so that no other writer opens it too.

    Raises:
        OSError: it cannot be opened.
        UsageError: it is open in a writer, or holds something and is not to be overwritten.
    """
    # truncated only once nothing forbids it
    file = FileIO(path, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666))
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            alone = locked(file)
            if not overwrite and not (alone and file.seek(0, os.SEEK_END) == 0):
                raise _exists(path)
            if not alone:
                raise shared_trace(path)
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


class TraceWriter:
    """A listener that appends each event to a file as it happens.

    Each line is written before the next event (`SYNC_EVERY` together in a gzip stream, after the
    header), so a killed run leaves a readable trace. A full disk stops the trace after its last
    whole line, never the search.

    Args:
        path: compressed if its name ends in ``.gz``.
        clock: seconds; only differences count.
        text: ``none`` leaves out what holds words, see `without_words`.
        overwrite: False refuses a file that holds something.

    Attributes:
        taken: a run has it.

    Raises:
        UsageError: the file cannot be created, is open in another writer, or is not to be
            overwritten.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Callable[[], float] = time.perf_counter,
        text: Literal["full", "none"] = "full",
        *,
        overwrite: bool = True,
    ) -> None:
        if text not in ("full", "none"):
            raise UsageError("trace-text", f"unknown text setting '{text}'.", "Known: full, none.")
        self.path = Path(path)
        self.text = text
        self.events = 0
        self.stopped = False
        self.taken = False
        self._clock = clock
        self._start: float | None = None
        self._packer = zlib.compressobj(LEVEL, wbits=GZIP) if self.path.suffix == ".gz" else None
        self._together = 1 if self._packer is None else SYNC_EVERY
        self._waiting: list[tuple[Event, float]] = []  # with their seconds, not yet written
        self._written = 0  # bytes
        try:
            self._file = self._open(overwrite)
        except OSError as error:
            raise UsageError(
                "trace-unwritable",
                f"the trace {self.path} cannot be written: {error.strerror}.",
                "Name a file in a folder that exists and may be written.",
                path=str(self.path),
            ) from error

    @property
    def closed(self) -> bool:
        """Whether the file is complete; a run closes its writer at its end."""
        return self._file.closed

    def __call__(self, event: Event) -> None:
        """Appends one event."""
        if self.stopped or self.closed:
            return
        now = self._clock()
        if self._start is None:
            self._start = now
        self._waiting.append((event, now - self._start))
        self.events += 1
        if self.events % self._together == 1 % self._together:
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Completes the file; closing twice is harmless."""
        if self.closed:
            return
        if not self.stopped:
            self._write(last=True)
        unlock(self._file)

    def finish(self) -> bool:
        """Completes the file; whether it holds anything, else it is removed."""
        self.close()
        # nothing of a search that never began, or on a disk that was full before the first event
        holds = self.events > 0 and self._written > 0
        if not holds:
            self._remove()
        return holds

    def _open(self, overwrite: bool) -> FileIO:
        return _opened(self.path, overwrite)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, last: bool = False) -> None:
        """Writes the waiting events; `last` ends a gzip stream."""
        first = self.events - len(self._waiting)
        lines = bytearray()
        for number, (event, seconds) in enumerate(self._waiting, first):
            record = {"e": event.name, "i": number, "t": round(seconds, 6)}
            for name in _FIELDS[type(event)]:
                record[name] = getattr(event, name)
            for name, default in _OPTIONAL[type(event)]:
                if record[name] == default:
                    del record[name]
            lines += to_line(without_words(record) if self.text == "none" else record) + b"\n"
        self._waiting.clear()
        if self._packer is not None:
            packed = self._packer.compress(lines)
            lines[:] = packed + self._packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        self._put(lines)

    def _put(self, data: bytearray) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._written += len(data)
        except OSError as error:
            self.stopped = True
            with contextlib.suppress(OSError):  # a pipe or a device
                self._file.truncate(self._written)
            logger.warning(
                "[no-space] %s: the trace stopped at event %d (%s); the search goes on.",
                self.path,
                self.events - 1,
                error.strerror,
            )


class NamelessTrace(TraceWriter):
    """A writer whose file has no name, so that nothing of it is left however its process ends.

    Args:
        path: where the trace will lie, as a search and its solution name it; nothing is written
            there.
        text: as for `TraceWriter`.

    Raises:
        UsageError: there is no room for temporary files.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, text: Literal["full", "none"] = "full"
    ) -> None:
        super().__init__(path, text=text)

    def take(self) -> bytes:
        """The whole trace, once, after the writer was closed."""
        with self._kept as file:
            file.seek(0)
            return file.read()

    def _open(self, overwrite: bool) -> FileIO:
        with tempfile.TemporaryFile(buffering=0) as file:
            self._kept = FileIO(os.dup(file.fileno()), "rb")
            return FileIO(os.dup(file.fileno()), "wb")

    def _remove(self) -> None:
        self._kept.close()
