"""What is made of a trace: a schema, a clean copy, a comparison, a timeline."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_run import fake_run, tick

from arbor.cli import main
from arbor.errors import TraceError, UsageError
from arbor.events import EVENTS, Boundary, Ended, Event, Opened, Pruned, Rehydrated, Transition
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.diff import diff_traces
from arbor.trace.perfetto import TRACKS, to_perfetto
from arbor.trace.repair import repair_trace
from arbor.trace.schema import trace_schema
from arbor.trace.write import PRIVATE

GOLDEN = Path(__file__).parent / "golden"


def write(path: Path, events: list[Event], **settings: Any) -> Path:
    """The events as a trace file."""
    with TraceWriter(path, clock=tick(), **settings) as writer:
        for event in events:
            writer(event)
    return path


@pytest.fixture
def run() -> list[Event]:
    return list(fake_run(seed=1))


# Schema


def violations(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> Iterator[str]:
    """Where a value breaks a schema; knows the keywords that `trace_schema` uses and refuses
    others."""
    known = {"$schema", "$id", "$ref", "$defs", "title", "description", "type", "required", "allOf"}
    known |= {"properties", "if", "then", "enum", "const", "anyOf", "items", "prefixItems"}
    known |= {"minItems", "maxItems", "minimum", "maximum", "additionalProperties"}
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        yield from violations(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    types = schema.get("type", [])
    kinds = {
        "integer": type(value) is int,
        "number": type(value) in (int, float),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "null": value is None,
    }
    if types and not any(kinds[each] for each in ([types] if isinstance(types, str) else types)):
        yield f"{value!r} is not {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{value!r} is not {schema['const']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{value!r} is too small"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{value!r} is too large"
    if "anyOf" in schema and all(any(violations(s, value, root)) for s in schema["anyOf"]):
        yield f"{value!r} fits nothing"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{value!r} has the wrong length"
        for item, inner in zip(value, schema.get("prefixItems", []), strict=False):
            yield from violations(inner, item, root)
        for item in value if "items" in schema else []:
            yield from violations(schema["items"], item, root)
    if isinstance(value, dict):
        yield from (f"no {name}" for name in schema.get("required", []) if name not in value)
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from violations(inner, value[name], root)
        for item in value.values() if "additionalProperties" in schema else []:
            yield from violations(schema["additionalProperties"], item, root)
    for each in schema.get("allOf", []):
        if "if" not in each or not any(violations(each["if"], value, root)):
            yield from violations(each["then"] if "if" in each else each, value, root)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@given(seed=st.integers(0, 200), text=st.sampled_from(["full", "none"]))
def test_every_line_that_is_written_keeps_the_schema(
    tmp_path_factory: pytest.TempPathFactory, seed: int, text: Any
) -> None:
    schema = trace_schema()
    path = write(tmp_path_factory.mktemp("t") / "run.jsonl", list(fake_run(seed)), text=text)

    for record in records(path):
        assert list(violations(schema, record, schema)) == []


def test_the_golden_traces_keep_the_schema() -> None:
    schema = trace_schema()
    for path in GOLDEN.glob("*.jsonl"):
        for number, record in enumerate(records(path)):
            # times and the machine are left out of golden traces
            broken = violations(schema, {"i": number, "t": 0} | record, schema)
            times = {"no run", "no created", "no arbor", "no device", "no elapsed_s"}
            assert set(broken) <= times


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"node": "3"}, "'3' is not integer"),
        ({"stop": "tired"}, "'tired' is none of"),
        ({"ids": [1, "two"]}, "'two' is not integer"),
        ({"logprob": "low"}, "'low' is not"),
        ({"i": -1}, "-1 is too small"),
    ],
)
def test_a_line_that_breaks_the_schema_is_found(
    tmp_path: Path, run: list[Event], change: dict[str, Any], sentence: str
) -> None:
    schema = trace_schema()
    record = next(r for r in records(write(tmp_path / "r", run)) if r["e"] == "boundary") | change

    assert [each for each in violations(schema, record, schema) if sentence in each]
    del record["stop"]
    assert "no stop" in list(violations(schema, record, schema))


def test_types_and_fields_of_a_later_version_pass_the_schema() -> None:
    schema = trace_schema()

    assert not list(violations(schema, {"e": "dream", "i": 3, "t": 1.5, "of": "sheep"}, schema))


def test_the_schema_holds_every_event_and_field() -> None:
    definitions = trace_schema()["$defs"]

    assert list(definitions) == [kind.name for kind in EVENTS]
    for kind in EVENTS:
        names = {field.name for field in dataclasses.fields(kind)}
        assert set(definitions[kind.name]["properties"]) == names
        assert not set(PRIVATE) & set(definitions[kind.name]["required"])


# Repair


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_killed_run_is_repaired_to_a_trace_that_checks(
    tmp_path: Path, run: list[Event], suffix: str
) -> None:
    path = write(tmp_path / f"run.arbor.jsonl{suffix}", run[:40])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])

    repaired = repair_trace(path)

    assert repaired.path == tmp_path / f"run.repaired.arbor.jsonl{suffix}"
    assert (repaired.dropped, repaired.lost, repaired.ended) == (1 if not suffix else 0, 0, True)
    trace = read_trace(repaired.path)
    replay = Replay.of(trace)
    assert replay.problems == [] and trace.banner == ""
    assert replay.ended is not None and replay.ended.status == "interrupted"
    assert list(trace.events[:-1]) == run[: repaired.kept]
    assert path.read_bytes() == whole[:-5], "the damaged file stays as it was"


def test_a_line_lost_in_the_middle_stays_visible(tmp_path: Path, run: list[Event]) -> None:
    lines = write(tmp_path / "run.jsonl", run).read_bytes().splitlines(keepends=True)
    lines[7] = b'{"e":"forward","kind":\n'
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines))

    repaired = repair_trace(tmp_path / "run.jsonl", tmp_path / "clean.jsonl")

    assert (repaired.dropped, repaired.lost, repaired.ended) == (1, 1, False)
    trace = read_trace(tmp_path / "clean.jsonl")
    assert trace.bad_lines == 0 and len(trace.gaps) == 1
    assert any("event 8 instead of 7" in each for each in Replay.of(trace).problems)


def test_a_repair_keeps_what_it_does_not_know(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.jsonl", run)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = lines[3][:-1] + ',"mood":"good"}'
    stranger = f'{{"e":"dream","i":{len(run)},"t":9.5,"of":"sheep"}}'
    path.write_text("\n".join([*lines, stranger]) + "\n", encoding="utf-8")

    repair_trace(path, tmp_path / "clean.jsonl")

    assert (tmp_path / "clean.jsonl").read_text(encoding="utf-8") == path.read_text("utf-8")


def test_a_repair_can_leave_out_the_words(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.arbor.jsonl.gz", run)

    repair_trace(path, tmp_path / "public.arbor.jsonl.gz", text="none")

    data = gzip.decompress((tmp_path / "public.arbor.jsonl.gz").read_bytes())
    assert b"thought" not in data and b"4 5 6 10" not in data
    assert Replay.of(read_trace(tmp_path / "public.arbor.jsonl.gz")).problems == []


def test_a_repair_never_writes_over_its_source(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.jsonl", run)

    with pytest.raises(UsageError, match="is the trace itself"):
        repair_trace(path, path)
    with pytest.raises(UsageError, match="cannot be written"):
        repair_trace(path, tmp_path / "no" / "where.jsonl")


def test_a_file_that_is_not_a_trace_cannot_be_repaired(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n", encoding="utf-8")

    with pytest.raises(TraceError, match=r"no line is an event of arbor.trace/1"):
        repair_trace(tmp_path / "notes.txt")
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "run.arbor.jsonl").touch()

    with pytest.raises(TraceError, match="the file is empty"):
        read_trace(tmp_path / "run.arbor.jsonl")


# Comparison


def test_a_trace_does_not_differ_from_itself(tmp_path: Path, run: list[Event]) -> None:
    first = read_trace(write(tmp_path / "a.jsonl", run))
    second = read_trace(write(tmp_path / "b.jsonl.gz", run))

    diff = diff_traces(first, second)

    assert diff.same_tree and diff.parting is None
    assert (diff.settings, diff.blocks, diff.metrics) == ((), (), ())


def test_a_comparison_names_the_block_the_event_and_the_setting(
    tmp_path: Path, run: list[Event]
) -> None:
    changed = list(run)
    at = next(i for i, event in enumerate(run) if isinstance(event, Boundary))
    changed[at] = dataclasses.replace(run[at], ids=(7, *run[at].ids[1:]), text="other")
    header = changed[0]
    changed[0] = dataclasses.replace(header, seed=5, config={"controller": {"name": "beam"}})
    node = changed[at].node
    opened = next(e for e in run if isinstance(e, Opened) and e.node == node)

    diff = diff_traces(
        read_trace(write(tmp_path / "a.jsonl", run)),
        read_trace(write(tmp_path / "b.jsonl", changed)),
    )

    assert [(d.name, d.first, d.second) for d in diff.settings] == [
        ("controller.name", "tot", "beam"),
        ("seed", 0, 5),
    ]
    assert not diff.same_tree and diff.blocks == ((opened.index,),)
    assert diff.parting is not None
    assert (diff.parting.at, diff.parting.fields) == (at - 1, ("ids", "text"))
    assert diff.parting.second is not None and diff.parting.second["text"] == "other"


def test_a_comparison_says_where_the_shorter_one_ends(tmp_path: Path, run: list[Event]) -> None:
    diff = diff_traces(
        read_trace(write(tmp_path / "a.jsonl", run)),
        read_trace(write(tmp_path / "b.jsonl", run[:-2])),
    )

    assert diff.parting is not None and diff.parting.second is None
    assert diff.parting.first is not None and diff.parting.first["e"] == "answer"
    assert diff.same_tree


def test_a_comparison_counts_what_a_rehydration_more_costs(tmp_path: Path) -> None:
    run = list(fake_run(seed=1, rounds=40))
    at = next(i for i, event in enumerate(run) if isinstance(event, Rehydrated))
    fewer = [*run[:at], *run[at + 1 : -1]]

    diff = diff_traces(
        read_trace(write(tmp_path / "a.jsonl", run[:-1])),
        read_trace(write(tmp_path / "b.jsonl", fewer)),
    )

    reported = {d.name: d for d in diff.metrics}
    assert reported["rehydrations"].first == reported["rehydrations"].second + 1


def test_a_trace_does_not_differ_from_the_same_run_without_words(
    tmp_path: Path, run: list[Event]
) -> None:
    full = read_trace(write(tmp_path / "a.jsonl", run))
    none = read_trace(write(tmp_path / "b.jsonl", run, text="none"))

    for first, second in ((full, none), (none, full), (none, none)):
        diff = diff_traces(first, second)

        assert diff.same_tree and diff.parting is None
        assert (diff.settings, diff.blocks, diff.metrics) == ((), (), ())
        assert diff.words == (first.words, second.words)
    assert diff_traces(full, full).words == (True, True)


def test_without_words_the_rest_is_compared(tmp_path: Path, run: list[Event]) -> None:
    changed = list(run)
    at = next(i for i, event in enumerate(run) if isinstance(event, Boundary))
    changed[at] = dataclasses.replace(run[at], ids=(7, *run[at].ids), stop="length")
    changed[0] = dataclasses.replace(changed[0], seed=5, problem="1 2 3 4")

    diff = diff_traces(
        read_trace(write(tmp_path / "a.jsonl", run)),
        read_trace(write(tmp_path / "b.jsonl", changed, text="none")),
    )

    assert [(d.name, d.first, d.second) for d in diff.settings] == [("seed", 0, 5)]
    assert not diff.same_tree and len(diff.blocks) == 1
    assert diff.parting is not None
    assert (diff.parting.at, diff.parting.fields) == (at - 1, ("stop", "tokens"))


def test_a_trace_whose_header_is_lost_has_no_words_all_the_same(
    tmp_path: Path, run: list[Event]
) -> None:
    path = write(tmp_path / "a.jsonl", run, text="none")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))

    assert not read_trace(path).words
    assert read_trace(write(tmp_path / "b.jsonl", run[1:])).words


def test_the_command_says_on_which_side_words_are_left_out(
    tmp_path: Path, run: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    full, none = (
        str(write(tmp_path / "a.jsonl", run)),
        str(write(tmp_path / "b.jsonl", run, text="none")),
    )

    code = main(["trace", "diff", full, none, "--exit-code"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines == [
        f"words     (left out) of {none}: lengths of blocks are compared, not texts",
        "tree      the same, block by block, by length",
        "events    the same",
    ]
    main(["trace", "diff", none, none])
    assert f"(left out) of {none} and {none}: " in capsys.readouterr().out
    main(["trace", "diff", none, full, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["words"], document["same_tree"]) == ([False, True], True)
    main(["trace", "diff", full, full])
    assert "words" not in capsys.readouterr().out


# Timeline


def overlaps(rows: list[dict[str, Any]]) -> list[str]:
    """Slices of one track that overlap without one holding the other: what Perfetto drops."""
    wrong, tracks = [], defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            tracks[row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
    for track, slices in tracks.items():
        for (_, end), (start, _) in itertools.pairwise(slices):
            if start < end:
                wrong.append(f"track {track}: a slice begins at {start}, the last ended at {end}")
    return wrong


@given(seed=st.integers(0, 500), step=st.sampled_from([1e-6, 3.3e-4, 1e-3, 0.2]))
def test_a_timeline_has_whole_microseconds_and_no_overlaps(
    tmp_path_factory: pytest.TempPathFactory, seed: int, step: float
) -> None:
    run = list(fake_run(seed))
    now = iter(range(10**9))
    path = tmp_path_factory.mktemp("t") / "run.jsonl"
    with TraceWriter(path, clock=lambda: next(now) * step) as writer:
        for event in run:
            writer(event)

    rows = to_perfetto(read_trace(path))["traceEvents"]

    assert all(type(row.get("ts", 0)) is int and row.get("ts", 0) >= 0 for row in rows)
    assert all(type(row["dur"]) is int and row["dur"] >= 0 for row in rows if row["ph"] == "X")
    assert overlaps(rows) == []
    alive: dict[str, int] = {}
    for row in rows:
        if row["ph"] == "b":
            assert alive.setdefault(row["id2"]["local"], row["ts"]) == row["ts"]
        elif row["ph"] == "e":
            assert alive.pop(row["id2"]["local"]) <= row["ts"], "a block dies after it was born"
    assert alive == {}, "every block dies"


def test_overlaps_are_found() -> None:
    rows = [{"ph": "X", "tid": 1, "ts": 0, "dur": 5}, {"ph": "X", "tid": 1, "ts": 4, "dur": 5}]

    assert overlaps(rows) == ["track 1: a slice begins at 4, the last ended at 5"]


def test_a_timeline_holds_every_event(tmp_path: Path, run: list[Event]) -> None:
    document = to_perfetto(read_trace(write(tmp_path / "run.jsonl", run)))
    rows = document["traceEvents"]
    count = defaultdict(int)
    for row in rows:
        count[row["ph"], row["name"]] += 1

    for kind in (Boundary, Pruned, Transition, Ended):
        assert count["i", kind.name] == sum(isinstance(event, kind) for event in run)
    forwards = [event for event in run if event.name == "forward"]
    assert count["X", "decode"] == sum(event.kind == "decode" for event in forwards)
    reported = [event.kv.device for event in run if hasattr(event, "kv") and event.name != "header"]
    drawn = [row["args"]["tokens"] for row in rows if row["name"] == "KV device"]
    assert drawn == reported
    assert {row["args"]["name"] for row in rows if row["name"] == "thread_name"} == set(TRACKS)
    assert document["otherData"] == {"schema": "arbor.trace/1", "run": "01J"}
    text = json.dumps(document, allow_nan=False)
    assert not re.search(r'"ids"', text)


def test_a_cut_trace_has_a_timeline_too(tmp_path: Path, run: list[Event]) -> None:
    path = write(tmp_path / "run.jsonl", run)
    path.write_bytes(path.read_bytes()[:4000])

    assert overlaps(to_perfetto(read_trace(path))["traceEvents"]) == []
