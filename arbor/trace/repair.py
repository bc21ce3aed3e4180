"""Writes the readable lines of a damaged trace to a clean file."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arbor.errors import UsageError
from arbor.events import Ended
from arbor.support.atomic_write import write_atomically
from arbor.trace.fold import Replay
from arbor.trace.read import Trace, records_of
from arbor.trace.write import GZIP, to_line, to_record, without_words


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair.

    Attributes:
        path: the clean file.
        kept: number of lines copied.
        dropped: number of unreadable lines.
        lost: number of events missing before the last of the others; their numbers stay free.
        ended: whether an end was added because the trace had none.
    """

    path: Path
    kept: int
    dropped: int
    lost: int
    ended: bool


def repair_trace(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    text: Literal["full", "none"] = "full",
) -> Repaired:
    """Copies every readable line, unknown types and fields included; adds a missing end.

    Numbers and times are unchanged, so a lost line remains visible as a gap. The added end has the
    status ``interrupted`` and the counters of the readable events.

    Args:
        path: the damaged file.
        output: the clean file, compressed if its name ends in ``.gz``; by default in its folder.
        text: ``none`` leaves out the words of problem, thoughts, answer and settings.

    Raises:
        TraceError: unreadable, or without events.
        UsageError: the clean file cannot be written, or is the damaged one.
    """
    source = Path(path)
    target = Path(output) if output is not None else _repaired(source)
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(
            "output-is-input", f"{target} is the trace itself.", "Name another file with --output."
        )
    trace = Trace(source)
    records: list[dict[str, Any]] = []
    numbers: set[int] = set()
    for record in records_of(trace):
        records.append(record)
        numbers.add(trace.due - 1)
    due = max(numbers) + 1
    kept, ended = len(records), trace.end is None
    if ended:
        replay = Replay.of(trace)
        end = Ended("interrupted", len(replay.blocks), replay.metrics().to_dict())
        place = {"i": due, "t": records[-1].get("t", 0.0)}
        records.append({"e": end.name, **place, **to_record(end), "repaired": True})
    if text == "none":
        records = [without_words(record) for record in records]
    _write(target, records)
    return Repaired(target, kept, trace.bad_lines, due - len(numbers), ended)


def _repaired(source: Path) -> Path:
    """``run.arbor.jsonl.gz`` -> ``run.repaired.arbor.jsonl.gz``."""
    stem, dot, rest = source.name.partition(".")
    return source.with_name(f"{stem}.repaired{dot}{rest}")


def _write(target: Path, records: list[dict[str, Any]]) -> None:
    """Writes all lines or none."""
    data = b"".join(to_line(record) + b"\n" for record in records)
    if target.suffix == ".gz":
        packer = zlib.compressobj(9, wbits=GZIP)
        data = packer.compress(data) + packer.flush()
    write_atomically(target, data)
