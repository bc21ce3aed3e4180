"""Events from JSON records: the reader accepts what the schema accepts, and says why it refuses."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.damage import VALUES
from support.fake_run import fake_run, tick
from test_trace_tools import violations

from arbor import Solver
from arbor.controllers.base import Expansion
from arbor.events import Boundary, Event, Forwarded, Opened, Sampled, Selected
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.records import (
    MOST_DEPTH,
    MOST_TOKENS_LEFT_OUT,
    Unreadable,
    from_record,
    number_of,
    parse,
    seconds_of,
)
from arbor.trace.repair import repair_trace
from arbor.trace.schema import trace_schema
from arbor.tree import Node, ThoughtTree
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
    assert clean.bad == () and clean.events[: line - 1] == read.events[: line - 1]


def test_every_bad_line_is_named(trace: Path) -> None:
    lines = changed(trace, "select", "3", "leaves"), changed(trace, "forward", "null", "rows")
    read = read_trace(trace)

    problems = Replay.of(read).problems

    first, second = sorted(lines)
    assert read.bad_lines == 2
    assert f"2 lines are unreadable, first line {first} is unreadable: " in read.banner
    for line in (first, second):
        assert any(each.startswith(f"line {line} is unreadable: ") for each in problems)


def test_numbers_keep_their_kind(trace: Path) -> None:
    changed(trace, "boundary", "0", "logprob")
    changed(trace, "end", "null", "metrics", "wall_s")

    read = read_trace(trace)

    closed = next(event for event in read.events if isinstance(event, Boundary))
    assert type(closed.logprob) is float and closed.logprob == 0
    assert read.end is not None
    assert math.isnan(read.end.metrics["wall_s"])
    assert type(read.end.metrics["rows"]) is int


def test_a_number_of_ids_that_no_block_has_is_refused(tmp_path: Path) -> None:
    for tokens in (MOST_TOKENS_LEFT_OUT + 1, -1, 10**12, "true", '"5"'):
        trace = written(tmp_path / "run.arbor.jsonl", text="none")
        line = changed(trace, "boundary", str(tokens), "tokens")

        read = read_trace(trace)

        assert read.first_bad_line == line
        assert "ids: tokens: " in read.banner


def test_a_byte_order_mark_is_not_damage(trace: Path) -> None:
    events = read_trace(trace).events
    trace.write_bytes(b"\xef\xbb\xbf" + trace.read_bytes())

    assert read_trace(trace).events == events


EVENTS: list[Event] = list(fake_run(seed=1))


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


def test_a_line_that_the_schema_requires_a_field_of_is_not_readable_without_it(
    records: list[dict[str, Any]],
) -> None:
    for record in records:
        required = SCHEMA["$defs"][record["e"]]["required"]
        for name in record.keys() - {"e", "i", "t"}:
            rest = {key: value for key, value in record.items() if key != name}
            private = {"ids"} & {name}  # left out for privacy, their number is there
            rest |= {"tokens": 1} if private else {}
            assert is_readable(rest) == (name not in required), name


def test_defaults_and_words_that_were_left_out_are_filled_in() -> None:
    kv = {"device": 3}
    record = {"e": "forward", "kind": "decode", "rows": 1, "steps": 1, "read_tokens": 1}
    record |= {"unique_read_tokens": 1, "kv": kv, "peak": 3, "elapsed_s": 0.5}

    event = from_record(record)
    opened = from_record(
        {"e": "node", "node": 1, "parent": None, "index": 0, "depth": 1, "tokens": 2}
    )

    assert isinstance(event, Forwarded) and (event.held, event.kv.host) == (0, 0)
    assert isinstance(opened, Opened) and opened.text == ""


def test_whole_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    """A controller may compute its widths with numpy."""

    class Counting:
        def __init__(self, tree: ThoughtTree) -> None:
            self._leaves: list[Node] = [tree.root]

        def ask(self, room: int) -> list[Expansion]:
            return [Expansion(leaf, np.int64(2)) for leaf in self._leaves]  # type: ignore[arg-type]

        def tell(self, children: Sequence[Node]) -> None:
            self._leaves = []

        def best(self) -> list[Node]:
            return []

    class Counts:
        def start(self, tree: ThoughtTree, max_depth: int) -> Counting:
            return Counting(tree)

        def max_blocks(self, max_depth: int) -> int:
            return 2

    path = tmp_path / "run.jsonl"
    with Solver(controller=Counts(), verifier="exact") as solver:
        solver.solve("4 5 6 10", trace=path)

    trace = read_trace(path)
    assert not trace.bad
    (selected,) = [event for event in trace.events if isinstance(event, Selected)]
    assert [width for _, width in selected.leaves] == [2]


@pytest.mark.parametrize("others", [(), ((), ((3, -0.1), (4, -2.5)))], ids=["none", "some"])
@pytest.mark.parametrize("text", ["full", "none"])
def test_alternatives_are_written_where_there_are_any(
    tmp_path: Path, others: Any, text: Any
) -> None:
    event = Sampled((1, 2), (3, 4), (-0.1, -0.2), others)
    path = tmp_path / "x.arbor.jsonl"
    with TraceWriter(path, clock=tick(), text=text) as writer:
        writer(event)

    record = json.loads(path.read_text(encoding="utf-8"))

    assert ("alternatives" in record) == (bool(others) and text == "full")
    schema = trace_schema()
    assert list(violations(schema, record, schema)) == []
    if text == "full":
        assert from_record(record) == event
