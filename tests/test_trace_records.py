"""Events from JSON records: the reader accepts what the schema accepts, and says why it refuses."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.damage import VALUES
from support.fake_run import fake_run, tick
from test_trace_tools import violations

from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.records import (
    MOST_DEPTH,
    Unreadable,
    from_record,
    number_of,
    parse,
    seconds_of,
    trace_schema,
)
from arbor.trace.repair import repair_trace
from arbor.view import read_page_trace

SCHEMA = trace_schema()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "run.arbor.jsonl")


def written(path: Path, text: Any = "full") -> Path:
    with TraceWriter(path, clock=tick(), text=text) as writer:
        for event in fake_run(seed=1):
            writer(event)
    return path


def changed(trace: Path, kind: str, value: str, *keys: str | int) -> int:
    """Puts JSON text into the first line of a type; returns the line's number, from 1."""
    lines = trace.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["e"] == kind)
    record = json.loads(lines[at])
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = "@"
    lines[at] = json.dumps(record).replace('"@"', value)
    trace.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return at + 1


@pytest.mark.parametrize(
    ("kind", "keys", "value", "reason"),
    [
        ("header", ("kv", "budget_tokens"), '"abc"', 'kv: budget_tokens: "abc" is not an integer'),
        ("header", ("kv", "full_tokens"), "null", "kv: full_tokens: null is not an integer"),
        ("header", ("seed",), "1.5", "seed: 1.5 is not an integer"),
        ("header", ("config", "later"), "1e999", "1e999 is beyond a float"),
        ("node", ("tokens",), "true", "tokens: true is not an integer"),
        ("node", ("tokens",), "10000000000000000000", "10000000000000000000 is not an integer"),
        ("boundary", ("ids",), "[[1, 2], [3, 4]]", "ids: a list of 2 is not an integer"),
        ("boundary", ("ids", 0), "9223372036854775808", "ids: 9223372036854775808 is not an"),
        ("boundary", ("logprob",), '"abc"', 'logprob: "abc" is not a number'),
        ("boundary", ("top1",), "1" + "0" * 400, "is not a number"),
        ("boundary", ("stop",), '"tired"', 'stop: "tired" is not one of step, eos, length, limit'),
        ("boundary", ("text",), "7", "text: 7 is not a string"),
        ("select", ("leaves", 0), "[1]", "leaves: a list of 1 is not a list of 2"),
        ("forward", ("kv",), "[1]", "kv: a list of 1 is not an object"),
        ("forward", ("kv", "device"), '"3"', 'kv: device: "3" is not an integer'),
        ("forward", ("elapsed_s",), "true", "elapsed_s: true is not a number"),
        ("forward", ("elapsed_s",), "1e999", "1e999 is beyond a float"),
        ("forward", ("rows",), "NaN", "NaN is not JSON"),
        ("forward", ("i",), "-1", "i: -1 is not an integer from 0"),
        ("forward", ("i",), '"7"', 'i: "7" is not an integer from 0'),
        ("forward", ("i",), "9223372036854775807", "is not an integer from 0"),
        ("forward", ("t",), "-0.5", "t: -0.5 is not a number from 0"),
        ("forward", ("t",), "[1]", "t: a list of 1 is not a number from 0"),
        ("forward", ("later",), "[" * 99 + "]" * 99, f"nested deeper than {MOST_DEPTH} levels"),
        ("forward", ("later",), "1" + "0" * 5000, "not JSON"),
        ("answer", ("correct",), "1", "correct: 1 is not true or false"),
        ("answer", ("node",), "{}", "node: an object is not an integer"),
        ("end", ("metrics", "wall_s"), '"abc"', 'metrics: wall_s: "abc" is not a number'),
        ("end", ("metrics",), "[]", "metrics: a list of 0 is not an object"),
        ("end", ("e",), "3", "e: 3 is not a string"),
        ("end", ("status",), '["solved"]', "status: a list of 1 is not one of solved"),
    ],
)
def test_a_value_of_the_wrong_kind_makes_a_line_unreadable_and_a_repair_removes_it(
    trace: Path, kind: str, keys: tuple[str | int, ...], value: str, reason: str
) -> None:
    count = len(read_trace(trace).events)
    line = changed(trace, kind, value, *keys)

    read = read_trace(trace)

    assert (len(read.events), read.bad_lines, read.first_bad_line) == (count - 1, 1, line)
    named = f"line {line} is unreadable: "
    assert named in read.banner and reason in read.banner
    assert any(each.startswith(named) and reason in each for each in Replay.of(read).problems)
    assert named in read_page_trace(trace).banner
    repaired = repair_trace(trace)
    assert repaired.dropped == 1
    clean = read_trace(repaired.path)
    assert not clean.bad and clean.events[: line - 1] == read.events[: line - 1]


def is_readable(record: dict[str, Any]) -> bool:
    """Whether a reader accepts a record."""
    try:
        read = parse(json.dumps(record).encode())
        number_of(read, 0)
        seconds_of(read)
        from_record(read)
    except Unreadable:
        return False
    return True


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value in a JSON value."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = [(*at, key) for key, _ in items]
    for key, inner in items:
        if isinstance(inner, dict | list):
            found += places(inner, (*at, key))
    return found


def json_values() -> list[Any]:
    """The values that are JSON, and not nested so deep that only the reader refuses them."""
    found = []
    for text in VALUES:
        if "[" * 60 in text or '{"a":{' in text or text in ("NaN", "Infinity"):
            continue
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if "e999" not in text and len(text) < 400:
            found.append(value)
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = written(tmp_path_factory.mktemp("t") / "run.arbor.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@given(seed=st.integers(0, 10**9))
def test_the_reader_accepts_what_the_schema_accepts(
    records: list[dict[str, Any]], seed: int
) -> None:
    draw = random.Random(seed)
    values = json_values()
    for _ in range(20):
        record = copy.deepcopy(draw.choice(records))
        *keys, last = draw.choice([at for at in places(record) if at not in (("e",), ("schema",))])
        inner = record
        for key in keys:
            inner = inner[key]
        inner[last] = draw.choice(values)

        broken = list(violations(SCHEMA, record, SCHEMA))

        assert is_readable(record) == (not broken), (record, broken)
