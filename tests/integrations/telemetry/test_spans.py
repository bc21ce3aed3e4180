"""Spans of a search: a tree in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_run import fake_run

from arbor import Solver, read_trace
from arbor.cli import main
from arbor.events import KV, Ended, Forwarded, Header, Opened, Pruned
from arbor.integrations.telemetry.otlp import _SpanFold, to_otlp

pytestmark = pytest.mark.usefixtures("loaded_once")

SMALL: dict[str, Any] = {"controller": "beam,beam_size=2,width=3", "budget": "300tok"}


@settings(max_examples=30)
@given(
    seed=st.integers(0, 500),
    step=st.sampled_from([1e-6, 1e-3, 0.2]),
    lost=st.sampled_from([0, 1, 40]),  # events at the beginning, with the header
    cut=st.integers(1, 400),
)
def test_every_span_ends_once_within_the_one_it_lies_in(
    seed: int, step: float, lost: int, cut: int
) -> None:
    every = list(fake_run(seed))
    header = None if lost else every[0]
    assert header is None or isinstance(header, Header)
    fold = _SpanFold(header, "run")

    for number, event in enumerate(every[lost:cut]):
        fold.feed(event, number * step)
    fold.close()

    spans = list(fold.spans.values())
    ids = {span["spanId"]: span for span in spans}
    assert len(ids) == len(spans)
    for span in spans:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        if span is spans[0]:
            assert "parentSpanId" not in span and span["name"].startswith("search")
            continue
        above = ids[span["parentSpanId"]]
        assert int(above["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(above["endTimeUnixNano"])
        assert span["status"] == {"code": 1}
    assert ("message" in spans[0]["status"]) == (cut < len(every))


@pytest.mark.parametrize("late", [1e300, 1e12, float("inf"), float("nan"), -1e300])
def test_a_time_beyond_the_protocol_is_that_of_the_event_before(late: float) -> None:
    *every, last = fake_run(1)
    fold, plain = _SpanFold(None, "run"), _SpanFold(None, "run")
    took = Forwarded(kind="prefill", rows=1, steps=1, read_tokens=1, unique_read_tokens=1,
                     kv=KV(1), peak=1, elapsed_s=late)  # fmt: skip

    for number, event in enumerate([*every, took]):
        fold.feed(event, number * 0.1)
        plain.feed(replace(event, elapsed_s=0.0) if event is took else event, number * 0.1)
    fold.feed(last, late)
    plain.feed(last, len(every) * 0.1)

    times = [
        [
            (int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]))
            for span in each.spans.values()
        ]
        for each in (fold, plain)
    ]
    assert [end for _, end in times[0]] == [end for _, end in times[1]]
    assert all(0 <= start <= end for start, end in times[0])


@pytest.mark.parametrize("parent", ["itself", "one below it", "one that is unknown"])
def test_a_tree_that_is_damaged_is_converted_and_ends(parent: str) -> None:
    events = list(fake_run(1))
    below = {event.node: event.parent for event in events if isinstance(event, Opened)}
    child, node = next((c, p) for c, p in below.items() if p and below[p] is not None)
    wrong = {"itself": node, "one below it": child, "one that is unknown": 10**6}[parent]
    spoiled = [
        replace(each, parent=wrong) if isinstance(each, Opened) and each.node == node else each
        for each in events
    ]
    again = next(each for each in events if isinstance(each, Opened) and each.node == child)
    fold = _SpanFold(None, "run")

    more = [replace(again, parent=node), Pruned((node,))]
    for number, event in enumerate([*spoiled[:-1], *more, spoiled[-1]]):
        fold.feed(event, number * 0.1)

    assert all("endTimeUnixNano" in span for span in fold.spans.values())
    assert len({span["spanId"] for span in fold.spans.values()}) == len(fold.spans)
    assert {f"block {each}" for each in below if each} <= set(fold.spans)


def test_a_trace_without_its_header_is_converted(trace: Path, tmp_path: Path) -> None:
    beheaded, out = tmp_path / "beheaded.arbor.jsonl", tmp_path / "run.otlp.json"
    beheaded.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[1:]))

    code = main(["trace", "convert", str(beheaded), "--format", "otlp", "-o", str(out)])

    spans = spans_of(json.loads(out.read_text(encoding="utf-8")))
    assert code == 0 and len(spans) == len(spans_of(to_otlp(read_trace(trace))))
    assert (spans[0]["name"], attributes(spans[0])["arbor.status"]) == ("search", "solved")


def test_the_budget_of_a_part_is_the_most_that_it_came_to(tmp_path: Path) -> None:
    path = tmp_path / "part.arbor.jsonl"
    with Solver(**SMALL | {"budget": "0.5"}) as solver:
        found = solver.solve("4 5 6 10", seed=2, trace=path)

    about = attributes(spans_of(to_otlp(read_trace(path)))[0])
    assert about["arbor.budget_tokens"] == found.metrics.budget_tokens < found.metrics.full_tokens


def spans_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    (resource,) = document["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    found: list[dict[str, Any]] = scope["spans"]
    return found


def plain(value: dict[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [plain(each) for each in inner["values"]]
    return int(inner) if kind == "intValue" else inner


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: plain(each["value"]) for each in span["attributes"]}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spans") / "run.arbor.jsonl"
    with Solver(**SMALL) as solver:
        solver.solve("4 5 6 10", seed=2, trace=path)
    return path


def test_a_trace_is_converted_to_otlp(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.otlp.json"

    code = main(["trace", "convert", str(trace), "--format", "otlp", "-o", str(out)])

    document = json.loads(out.read_text(encoding="utf-8"))
    read = read_trace(trace)
    spans = spans_of(document)
    ids = {span["spanId"]: span for span in spans}
    assert code == 0 and document == to_otlp(read)
    assert len(ids) == len(spans) and len({span["traceId"] for span in spans}) == 1
    for span in spans:
        assert len(span["spanId"]) == 16 and len(span["traceId"]) == 32
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        above = ids.get(span.get("parentSpanId"))
        assert (above is None) == (span["name"] == "search game24")
        if above is not None:
            assert int(above["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(span["endTimeUnixNano"]) <= int(above["endTimeUnixNano"])
    (search,) = (span for span in spans if "parentSpanId" not in span)
    ended = read.events[-1]
    assert isinstance(ended, Ended)
    facts = attributes(search)
    assert facts["input.value"] == "4 5 6 10" and facts["openinference.span.kind"] == "CHAIN"
    assert facts["llm.token_count.completion"] == ended.metrics["tokens_generated"]
    assert facts["arbor.status"] == ended.status
    decoded = [attributes(span) for span in spans if span["name"] == "decode"]
    assert (
        sum(each["llm.token_count.completion"] for each in decoded)
        == (ended.metrics["tokens_generated"])
    )
    assert {each["openinference.span.kind"] for each in decoded} == {"LLM"}
    assert any(moment["name"] == "evict" for moment in search["events"])
