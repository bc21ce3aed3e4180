"""What is made of a trace: a schema, a clean copy, a comparison, a timeline."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_run import fake_run, tick

from arbor.cli import main
from arbor.events import Boundary, Event, Forwarded, Header, Limited, Opened, Terminal
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.diff import diff_traces
from arbor.trace.perfetto import to_perfetto
from arbor.trace.records import trace_schema
from arbor.trace.repair import repair_trace
from arbor.view.picture import search_picture

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


@pytest.mark.parametrize("taken", [(), (4, 5, 12)], ids=["whole", "lines lost"])
def test_lines_out_of_order_are_not_lost(
    tmp_path: Path, run: list[Event], taken: tuple[int, ...]
) -> None:
    lines = write(tmp_path / "run.jsonl", run).read_bytes().splitlines(keepends=True)
    lines[6] = lines[6].replace(b'"e":"', b'"e":"later_', 1)
    kept = [line for number, line in enumerate(lines) if number not in taken]
    kept[5:30] = random.Random(0).sample(kept[5:30], 25)
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"".join([*kept[:-3], kept[-2], kept[-3]]))

    repaired = repair_trace(path)

    trace = read_trace(repaired.path)
    assert (repaired.kept, repaired.lost, repaired.ended) == (len(kept) - 1, len(taken), True)
    assert trace.sequence[-1] == len(lines) - 1 and trace.unknown == 1


# Comparison


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


def test_a_cost_that_one_run_alone_has_is_compared_with_0(tmp_path: Path, run: list[Event]) -> None:
    limited = [run[0], Limited(tokens=40, retained=80), *run[1:]]
    plain, other = (
        read_trace(write(tmp_path / name, events))
        for name, events in (("a.jsonl", run), ("b.jsonl", limited))
    )

    for traces, costs in (((plain, other), (0, 80)), ((other, plain), (80, 0))):
        found = {row.name: (row.first, row.second) for row in diff_traces(*traces).metrics}
        assert found["retained_tokens"] == costs


def test_a_field_that_one_event_alone_has_is_named_from_both_sides(
    tmp_path: Path, run: list[Event]
) -> None:
    at = next(i for i, event in enumerate(run) if isinstance(event, Terminal))
    guessed = [*run[:at], dataclasses.replace(run[at], guessed=True), *run[at + 1 :]]
    one, other = (
        read_trace(write(tmp_path / name, events))
        for name, events in (("a.jsonl", run), ("b.jsonl", guessed))
    )

    for traces in ((one, other), (other, one)):
        parting = diff_traces(*traces).parting
        assert parting is not None and (parting.at, parting.fields) == (at - 1, ("guessed",))


def test_a_trace_without_some_times_costs_as_much_as_itself(
    tmp_path: Path, run: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "whole.jsonl", run)
    parts = [
        dataclasses.replace(each, elapsed_s=math.nan) if isinstance(each, Forwarded) else each
        for each in run
    ]
    timeless = write(tmp_path / "timeless.jsonl", parts)

    found = diff_traces(read_trace(timeless), read_trace(timeless))
    assert found.metrics == () and found.same_tree and found.parting is None
    assert main(["trace", "diff", str(whole), str(timeless)]) == 0
    shown = capsys.readouterr().out
    assert "prefill_s" in shown and "x nan" not in shown


@pytest.mark.parametrize("change", [{"text": "Use 1 2 3 4"}, {"tokens": 3}])
def test_a_tree_with_another_prompt_is_not_the_same(
    tmp_path: Path, run: list[Event], change: dict[str, Any]
) -> None:
    others = [
        dataclasses.replace(each, **change)
        if isinstance(each, Opened) and each.parent is None
        else each
        for each in run
    ]

    found = diff_traces(
        read_trace(write(tmp_path / "a.jsonl", run)),
        read_trace(write(tmp_path / "b.jsonl", others)),
    )

    assert (found.same_tree, found.blocks) == (False, ((),))


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


@pytest.mark.parametrize(("allowed", "budget"), [([], None), ([40, 72, 60], 72)])
def test_the_budget_of_a_part_is_the_most_that_it_came_to(
    tmp_path: Path, run: list[Event], allowed: list[int], budget: int | None
) -> None:
    first = run[0]
    assert isinstance(first, Header)
    part = dataclasses.replace(first, kv={**first.kv, "part": 0.3})
    limits = [Limited(tokens=tokens, retained=2 * tokens) for tokens in allowed]
    trace = read_trace(write(tmp_path / "part.jsonl", [part, *run[1:-1], *limits, run[-1]]))

    shown = [
        row["args"]["tokens"]
        for row in to_perfetto(trace)["traceEvents"]
        if row["name"] == "KV budget"
    ]

    assert shown == ([] if budget is None else [budget, budget])
    drawn = search_picture(Replay.of(trace))
    assert "budget" not in drawn if budget is None else f"the budget of {budget}" in drawn


def test_the_slice_of_the_prompt_has_its_tokens(tmp_path: Path, run: list[Event]) -> None:
    root = next(each for each in run if isinstance(each, Opened))
    rows = to_perfetto(read_trace(write(tmp_path / "run.jsonl", run)))["traceEvents"]

    (end,) = (row for row in rows if row["ph"] == "e" and row["args"]["block"] == root.node)
    assert end["args"]["tokens"] == root.tokens > 0
