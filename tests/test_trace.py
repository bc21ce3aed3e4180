"""Traces: what is written comes back, damage is survived and said, and replay agrees with the
run."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_run import BUDGET, fake_run, header, tick

from arbor.errors import TraceError, UsageError
from arbor.events import (
    KV,
    Answered,
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Opened,
    Rehydrated,
    Terminal,
)
from arbor.metrics import Metrics, MetricsFold
from arbor.trace import Replay, TraceWriter, canonical, read_trace
from arbor.trace.records import NO_TOKEN
from arbor.trace.write import SYNC_EVERY, to_line, to_record
from arbor.tree import NodeState


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
    assert trace.sequence == tuple(range(len(run)))
    assert (trace.bad_lines, trace.unknown, trace.cut, trace.gaps) == (0, 0, False, ())
    assert trace.banner == ""


def test_every_line_begins_with_type_number_and_time(tmp_path: Path, run: list[Event]) -> None:
    lines = write(tmp_path / "run.jsonl", run).read_text(encoding="utf-8").splitlines()

    records = [json.loads(line) for line in lines]

    assert [list(record)[:3] for record in records] == [["e", "i", "t"]] * len(run)
    assert [record["i"] for record in records] == list(range(len(run)))
    assert records[0]["e"] == "header" and records[0]["t"] == 0
    assert records[-1]["e"] == "end"


def test_each_event_is_on_disk_before_the_next(tmp_path: Path, run: list[Event]) -> None:
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)

    for count, event in enumerate(run[:5], start=1):
        writer(event)
        assert len(path.read_bytes().splitlines()) == count
    writer.close()


def test_a_compressed_trace_that_is_not_closed_lacks_a_handful_of_events(tmp_path: Path) -> None:
    run = list(fake_run(seed=1, rounds=80))
    path = tmp_path / "run.jsonl.gz"
    writer = TraceWriter(path)
    writer(run[0])
    assert read_trace(path).header is not None

    for event in run[1:]:
        writer(event)

    events = read_trace(path).events
    assert len(run) - SYNC_EVERY < len(events) < len(run), "it takes several together"
    assert list(events) == run[: len(events)]
    writer.close()
    assert list(read_trace(path).events) == run


def test_a_compressed_trace_is_the_same_bytes_twice(tmp_path: Path, run: list[Event]) -> None:
    first = write(tmp_path / "a.gz", run).read_bytes()
    second = write(tmp_path / "b.gz", run).read_bytes()

    assert first == second
    assert gzip.decompress(first).count(b"\n") == len(run)


def test_numbers_that_are_none_become_null_and_read_as_nan(tmp_path: Path) -> None:
    event = Boundary(0, (1,), "x", "eos", logprob=-math.inf, confidence=math.nan, top1=0.5)
    path = write(tmp_path / "run.jsonl", [header(), event])

    back = read_trace(path).events[1]

    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes()
    assert isinstance(back, Boundary)
    assert math.isnan(back.logprob) and math.isnan(back.confidence) and back.top1 == 0.5


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


def test_a_record_in_a_hurry_is_the_record_at_leisure(run: list[Event], tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    events = [*run, Boundary(0, (1,), "x", "eos", -math.inf, math.nan, 0.5)]
    events += [Terminal(0, "7", guessed=True), Answered(0, (0,), "7", 0.5, None, guessed=True)]
    with TraceWriter(path) as writer:
        for event in events:
            writer(event)

    for line, event in zip(path.read_bytes().splitlines(), events, strict=True):
        record = json.loads(line)
        del record["i"], record["t"]
        assert record == json.loads(to_line(to_record(event)))


def test_a_guess_is_written_only_where_it_is_one(tmp_path: Path) -> None:
    events = [Terminal(0, "7"), Terminal(0, "7", guessed=True), Answered(0, (0,), "7", 0.5, None)]

    assert [to_record(event).get("guessed") for event in events] == [None, True, None]
    assert read_trace(write(tmp_path / "run", events)).events == tuple(events)


def test_text_that_utf8_cannot_hold_is_still_a_valid_trace(tmp_path: Path) -> None:
    event = Opened(0, None, 0, 0, 3, text="\udc80 \u2028 </script> é")

    back = read_trace(write(tmp_path / "run.jsonl", [header(), event])).events[1]

    assert back == event


def test_a_full_disk_stops_the_trace_with_one_warning_and_never_the_search(
    tmp_path: Path, run: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        closed = False

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def truncate(self, size: int) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")  # a device

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


def test_a_trace_in_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trace-unwritable"):
        TraceWriter(tmp_path / "nowhere" / "run.jsonl")


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_cut_file_gives_every_whole_line(tmp_path: Path, name: str) -> None:
    run = list(fake_run(seed=2, rounds=40))
    path = write(tmp_path / name, run)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])

    trace = read_trace(path)

    assert trace.cut
    assert list(trace.events) == run[: len(trace.events)]
    assert len(trace.events) > len(run) // 3
    assert "incomplete trace" in trace.banner
    assert any("cut off" in problem for problem in Replay.of(trace).problems)


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
    assert (trace.bad_lines, trace.first_bad_line, trace.gaps) == (1, 4, ())
    assert "line 4 is unreadable" in trace.banner


def test_a_trace_that_lacks_its_first_lines_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with TraceWriter(path, clock=tick()) as writer:
        for event in fake_run(seed=1):
            writer(event)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])

    assert read_trace(path).banner == "no header, events are missing or out of order before line 1"


def test_a_lost_line_is_a_gap(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.jsonl", run)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], *lines[4:]]))

    replay = Replay.of(read_trace(path))

    assert "line 4: event 4 instead of 3" in replay.problems


def test_unknown_events_and_fields_are_ignored(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.jsonl", run)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    records[0]["colour"] = "green"
    records.insert(1, {"e": "weather", "i": 1, "t": 0.0, "cpu_rss": 3})
    for number, record in enumerate(records):
        record["i"] = number
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    trace = read_trace(path)

    assert list(trace.events) == run
    assert (trace.unknown, trace.bad_lines, trace.gaps) == (1, 0, ())
    assert Replay.of(trace).problems == []


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", [header(schema="arbor.trace/2")])

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert caught.value.code == "trace-version"
    assert "arbor.trace/2; this arbor reads arbor.trace/1" in caught.value.message


def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", [header(schema="arbor.trace/1.7")])

    assert read_trace(path).header is not None


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a,b\n1,2\n", b"\x1f\x8bnot gzip at all"])
def test_a_file_without_events_is_not_a_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(content)

    with pytest.raises(TraceError, match="trace-corrupt"):
        read_trace(path)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace-unreadable"):
        read_trace(tmp_path / "none.jsonl")


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


def test_replay_rebuilds_the_tree(tmp_path: Path, run: list[Event]) -> None:
    replay = Replay.of(read_trace(write(tmp_path / "run.jsonl", run)))

    opened = [event for event in run if isinstance(event, Opened)]
    closed = {event.node: event for event in run if isinstance(event, Boundary)}
    assert list(replay.blocks) == [event.node for event in opened]
    for event in opened[1:]:
        block = replay.blocks[event.node]
        assert (block.parent, block.index, block.depth) == (event.parent, event.index, event.depth)
        assert block.tokens == len(closed[event.node].ids)
        assert block.text == closed[event.node].text
        assert block.id in replay.blocks[block.parent or 0].children
    assert replay.blocks[len(opened) - 1].state is NodeState.TERMINAL
    assert replay.answered is not None and replay.answered.score == 0.75
    assert replay.ended is not None and replay.ended.status == "solved"


def test_replay_shows_the_memory_after_each_event(tmp_path: Path, run: list[Event]) -> None:
    replay = Replay.of(read_trace(write(tmp_path / "run.jsonl", run)))

    reported = [
        (i, e.kv) for i, e in enumerate(run) if isinstance(e, Evicted | Rehydrated | Forwarded)
    ]

    assert replay.series == reported
    assert replay.kv == reported[-1][1]
    assert replay.peak == max(kv.device for _, kv in reported) <= BUDGET


def break_parent(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Opened) and e.parent is not None)
    run[at] = dataclasses.replace(run[at], parent=99)


def break_count(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Forwarded))
    run[at] = dataclasses.replace(run[at], kv=KV(3))


def break_budget(run: list[Event]) -> None:
    at = next(i for i, e in enumerate(run) if isinstance(e, Forwarded))
    run[at] = dataclasses.replace(run[at], peak=BUDGET + 1)


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


def test_time_that_runs_backwards_is_a_problem(run: list[Event]) -> None:
    replay = Replay()
    replay.feed(run[0], 1.0)
    replay.feed(run[1], 0.5)

    assert replay.problems == ["event 1: time 0.5 after 1.0"]


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


def test_the_canonical_form_shows_a_changed_token(tmp_path: Path, run: list[Event]) -> None:
    first = canonical(read_trace(write(tmp_path / "a.jsonl", run)))
    at = next(i for i, e in enumerate(run) if isinstance(e, Boundary))
    run[at] = dataclasses.replace(run[at], ids=(7,))

    second = canonical(read_trace(write(tmp_path / "b.jsonl", run)))

    assert [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b] == [at]


def test_one_event_costs_one_line_of_json(run: list[Event]) -> None:
    for event in run:
        line = to_line(to_record(event))
        assert b"\n" not in line
        assert json.loads(line)["e"] == event.name
