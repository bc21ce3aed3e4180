"""Damaged traces: every command that reads one gives a result or an error with a code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from support.damage import damage
from support.searches import IN_PIECES, PREEMPTED, Search, model

from arbor.cli import main
from arbor.errors import TraceError
from arbor.trace import Replay, read_trace
from arbor.trace.repair import repair_trace

SEED = 20240
CASES = 60
SOURCES: tuple[tuple[Search, Literal["full", "none"]], ...] = (
    (PREEMPTED, "full"),
    (PREEMPTED, "none"),
    (IN_PIECES, "full"),
    (Search(task="game24", controller="beam,beam_size=3", detail="tokens", depth=1), "full"),
)
COMMANDS = (
    ("trace", "check"),
    ("trace", "check", "--json"),
    ("trace", "info"),
    ("trace", "info", "--json"),
    ("trace", "events"),
    ("trace", "events", "--json"),
    ("trace", "config"),
    ("trace", "config", "--json"),
    ("trace", "convert"),
    ("view", "--output", "-"),
    ("view", "--term"),
    ("replay", "--policy", "lru", "--budget", "0.5"),
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Traces of real searches."""
    folder = tmp_path_factory.mktemp("traces")
    with model() as sapling:
        return [
            sapling.trace(search, folder / f"{number}.arbor.jsonl", text)
            for number, (search, text) in enumerate(SOURCES)
        ]


@pytest.fixture(autouse=True)
def no_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exception that a command would report as a bug reaches the test."""

    def reach(output: Any, words: list[str], error: Exception) -> int:
        raise AssertionError(f"arbor {' '.join(words)}") from error

    monkeypatch.setattr("arbor.cli.app._crash", reach)
    monkeypatch.chdir(tmp_path)


def cases(traces: list[Path], numbers: range) -> Iterator[tuple[int, Path]]:
    """Damaged copies, in files of the current folder."""
    whole = [path.read_bytes() for path in traces]
    for number in numbers:
        draw = random.Random(SEED + number)
        path = Path(f"{number}.arbor.jsonl")
        path.write_bytes(damage(draw.choice(whole), draw))
        yield number, path
        path.unlink()


def read_by_every_command(path: Path, other: Path) -> None:
    for command in COMMANDS:
        main([*command, str(path)])
    main(["trace", "diff", str(path), str(other)])
    main(["trace", "diff", str(other), str(path), "--json"])


def check_repair(path: Path) -> None:
    """What a repair leaves is readable to its last line, and says what is lost."""
    try:
        before = read_trace(path)
        done = repair_trace(path, "repaired.arbor.jsonl")
    except TraceError:
        return
    trace = read_trace(done.path)
    assert (trace.bad, trace.cut) == ([], False)
    assert trace.end is not None
    assert done.dropped == before.bad_lines
    assert done.kept == len(before.events) + before.unknown == before.lines - done.dropped
    assert trace.gaps or not done.lost
    expected = Replay.of(before).problems
    faults = ("is unreadable", "the file is cut off", "the end is missing")
    remain = [each for each in Replay.of(trace).problems if each not in expected]
    assert not any(fault in each for each in remain for fault in faults)
    again = repair_trace(done.path, "again.arbor.jsonl")
    assert (again.dropped, again.ended, again.lost) == (0, False, done.lost)
    assert again.path.read_bytes() == done.path.read_bytes()
    public = repair_trace(path, "public.arbor.jsonl", text="none")
    assert not read_trace(public.path).bad


def run(traces: list[Path], numbers: range, capsys: pytest.CaptureFixture[str]) -> None:
    for number, path in cases(traces, numbers):
        try:
            read_by_every_command(path, traces[0])
            check_repair(path)
        except Exception as error:
            raise AssertionError(f"case {number}") from error
        capsys.readouterr()


@pytest.mark.slow
def test_a_damaged_trace_is_read_or_refused_by_every_command(
    traces: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(traces, range(CASES), capsys)
