"""Traces: what is written comes back, damage is survived and said, and replay agrees with the
run."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import logging
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_run import BUDGET, fake_run, header, tick

from arbor.errors import TraceError
from arbor.events import (
    KV,
    Boundary,
    Ended,
    Event,
    Forwarded,
    Limited,
    Opened,
)
from arbor.metrics import Metrics, MetricsFold
from arbor.trace import Replay, TraceWriter, canonical, read_trace
from arbor.trace.diff import diff_traces
from arbor.trace.records import NO_TOKEN
from arbor.trace.repair import repair_trace
from arbor.trace.write import NamelessTrace


def write(path: Path, events: list[Event]) -> Path:
    """The events as a trace file."""
    with TraceWriter(path, clock=tick()) as writer:
        for event in events:
            writer(event)
    return path


@pytest.fixture
def run() -> list[Event]:
    return list(fake_run(seed=1))


@pytest.mark.parametrize("name", ["run.arbor.jsonl", "run.arbor.jsonl.gz"])
def test_what_is_written_comes_back(tmp_path: Path, run: list[Event], name: str) -> None:
    trace = read_trace(write(tmp_path / name, run))

    assert list(trace.events) == run
    assert trace.sequence == list(range(len(run)))
    assert (trace.bad_lines, trace.unknown, trace.cut, trace.gaps) == (0, 0, False, [])
    assert trace.banner == ""


def test_each_event_is_on_disk_before_the_next(tmp_path: Path, run: list[Event]) -> None:
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)

    for count, event in enumerate(run[:5], start=1):
        writer(event)
        assert len(path.read_bytes().splitlines()) == count
    writer.close()


def test_a_fork_that_lives_on_does_not_keep_a_closed_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)
    with multiprocessing.get_context("fork").Pool(1):
        writer.close()
        TraceWriter(path).close()


def test_a_nameless_trace_is_that_of_a_file_and_leaves_none(
    tmp_path: Path, run: list[Event]
) -> None:
    path = tmp_path / "run.arbor.jsonl.gz"
    for events in (run, []):
        writer = NamelessTrace(path)
        writer._clock = tick()
        for event in events:
            writer(event)

        assert writer.finish() == bool(events)
        assert list(tmp_path.iterdir()) == []
        if events:
            assert writer.take() == write(path, run).read_bytes()
            path.unlink()


@pytest.mark.parametrize("name", ["run.arbor.jsonl", "run.arbor.jsonl.gz"])
def test_a_trace_without_words_holds_none_and_still_replays(
    tmp_path: Path, run: list[Event], name: str
) -> None:
    with TraceWriter(tmp_path / name, clock=tick(), text="none") as writer:
        for event in run:
            writer(event)

    raw = (tmp_path / name).read_bytes()
    raw = gzip.decompress(raw) if name.endswith(".gz") else raw
    for word in (b"Use 4 5 6 10", b"4 5 6 10", b"thought", b"(10 - 4)", b'"ids"'):
        assert word not in raw
    trace = read_trace(tmp_path / name)
    replay = Replay.of(trace)
    assert not trace.words and trace.banner == "" and replay.problems == []
    assert replay.metrics() == Replay.of(read_trace(write(tmp_path / "full", run))).metrics()
    assert trace.header is not None and trace.header.problem == ""
    for event in trace.events:
        if isinstance(event, Boundary):
            assert set(event.ids) == {NO_TOKEN} and event.text == ""


def test_a_trace_without_words_has_no_prompt_or_stop_of_its_user(tmp_path: Path) -> None:
    reward = {"name": "prm", "model": "/my models/prm", "good": "+", "threshold": 0.5}
    config = {
        "task": {"name": "reasoning", "system": "SECRET", "stop": ["SECRET"], "chat": "auto"},
        "controller": {"name": "tot", "strategy": "bfs", "beam": 5},
        "verifier": {"name": "sum", "parts": [reward], "of_a_plugin": "a SECRET text"},
        "step_format": "regex:SECRET",
        "model": "/my models/m",
        "sampling": {"temperature": 0.7},
    }
    run = [header(config=config), *list(fake_run(1))[1:]]
    full, quiet = tmp_path / "full.arbor.jsonl", tmp_path / "quiet.arbor.jsonl"
    for path, text in ((full, "full"), (quiet, "none")):
        with TraceWriter(path, clock=tick(), text=text) as writer:  # type: ignore[arg-type]
            for event in run:
                writer(event)

    repaired = repair_trace(full, text="none").path

    assert b"SECRET" in full.read_bytes()
    for path in (quiet, repaired):
        assert b"SECRET" not in path.read_bytes()
        trace = read_trace(path)
        assert trace.header is not None and trace.header.config == {
            "task": {"name": "reasoning", "chat": "auto"},
            "controller": {"name": "tot", "strategy": "bfs", "beam": 5},
            "verifier": {
                "name": "sum",
                "parts": [{"name": "prm", "model": "/my models/prm", "threshold": 0.5}],
            },
            "model": "/my models/m",
            "sampling": {"temperature": 0.7},
        }
        assert diff_traces(read_trace(full), trace).settings == ()


def test_a_full_disk_stops_the_trace_with_one_warning_and_never_the_search(
    tmp_path: Path, run: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        closed = False

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def truncate(self, size: int) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")  # a device

        def fileno(self) -> int:
            raise OSError(errno.EBADF, "no file")

        def close(self) -> None:
            self.closed = True

    writer = TraceWriter(tmp_path / "run.jsonl")
    writer(run[0])
    writer._file.close()
    writer._file = Full()

    with caplog.at_level(logging.WARNING):
        for event in run[1:]:
            writer(event)
    writer.close()

    assert [record.getMessage() for record in caplog.records] == [
        f"[no-space] {tmp_path / 'run.jsonl'}: the trace stopped at event 1 "
        "(No space left on device); the search goes on."
    ]
    assert writer.stopped


@given(at=st.integers(0, 10**6), packed=st.booleans())
def test_a_file_cut_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    run = list(fake_run(seed=3))
    path = write(folder / ("run.gz" if packed else "run.jsonl"), run)
    data = path.read_bytes()
    path.write_bytes(data[: at % len(data)])

    try:
        trace = read_trace(path)
    except TraceError as error:
        assert error.code == "trace-corrupt"
    else:
        assert list(trace.events) == run[: len(trace.events)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"not json",
        b"[]",
        b"3",
        b'{"e":"evict"}',
        b'{"i":3}',
        b"\xff\xfe",
        b'{"e":NaN}',
        b"[" * 9999,
    ],
)
def test_a_bad_line_is_skipped_and_counted(
    tmp_path: Path, run: list[Event], garbage: bytes
) -> None:
    path = write(tmp_path / "run.jsonl", run)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], garbage + b"\n", *lines[3:]]))

    trace = read_trace(path)

    assert list(trace.events) == run
    assert (trace.bad_lines, trace.first_bad_line, trace.gaps) == (1, 4, [])
    assert "line 4 is unreadable" in trace.banner


@given(seed=st.integers(0, 10**6))
def test_replaying_a_trace_gives_the_metrics_of_the_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    run = list(fake_run(seed))
    live = MetricsFold()
    for event in run:
        live(event)
    end = run[-1]
    assert isinstance(end, Ended)

    replay = Replay.of(read_trace(write(tmp_path_factory.mktemp("run") / "run.jsonl", run)))

    assert replay.problems == []
    assert replay.metrics() == live.metrics() == Metrics.from_dict(end.metrics)


def break_parent(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Opened) and e.parent is not None)
    run[at] = dataclasses.replace(run[at], parent=99)


def break_count(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Forwarded))
    run[at] = dataclasses.replace(run[at], kv=KV(3))


def break_budget(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Forwarded))
    run[at] = dataclasses.replace(run[at], peak=BUDGET + 1)


def break_part(run: list[Event]) -> None:
    """The most at any instant, of which no event's own slots tell, against what a part allowed."""
    run[0] = dataclasses.replace(run[0], kv=run[0].kv | {"part": 0.25})
    at = max(i for i, e in enumerate(run) if isinstance(e, Forwarded))
    run[at] = dataclasses.replace(run[at], peak=BUDGET + 1)
    run.insert(at + 1, Limited(BUDGET, 4 * BUDGET))


def break_order(run: list[Event]) -> None:
    run.append(run[-2])


def break_end(run: list[Event]) -> None:
    run.pop()


def break_header(run: list[Event]) -> None:
    run.pop(0)


def break_closing(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Boundary))
    run.insert(at, run[at])


def break_given(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Boundary))
    boundary = run[at]
    assert isinstance(boundary, Boundary)
    run[at] = dataclasses.replace(boundary, given=len(boundary.ids) + 1)


def break_counters(run: list[Event]) -> None:
    end = run[-1]
    assert isinstance(end, Ended)
    run[-1] = dataclasses.replace(end, metrics=end.metrics | {"rows": 7})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (break_counters, "the end counts rows 7, the events"),
        (break_parent, "unknown block 99"),
        (break_count, "the device holds 3 tokens, the events so far add up to"),
        (break_budget, f"{BUDGET + 1} tokens on the device, the budget is {BUDGET}"),
        (break_part, f"{BUDGET + 1} tokens on the device, {BUDGET} were allowed at most"),
        (break_order, "'answer' after the end"),
        (break_end, "the end is missing"),
        (break_header, "the header is missing"),
        (break_closing, "closes twice"),
        (break_given, "were given"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_replay_says_where_a_trace_contradicts_itself(
    tmp_path: Path, run: list[Event], damage: object, sentence: str
) -> None:
    damage(run)

    problems = Replay.of(read_trace(write(tmp_path / "run.jsonl", run))).problems

    assert any(sentence in problem for problem in problems), problems


def test_the_canonical_form_is_the_same_for_two_runs(tmp_path: Path) -> None:
    def again(number: int) -> list[Event]:
        run = list(fake_run(seed=1))
        run[0] = header(run=f"run {number}", created=f"{number}", device={"name": f"m{number}"})
        return [
            dataclasses.replace(e, elapsed_s=number) if isinstance(e, Forwarded) else e for e in run
        ]

    first = canonical(read_trace(write(tmp_path / "a.jsonl", again(1))))
    second = canonical(read_trace(write(tmp_path / "b.jsonl", again(2))))

    assert first == second
    assert not any('_s"' in line or '"t":' in line for line in first)
