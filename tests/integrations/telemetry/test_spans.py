"""Spans of a search: a tree in time, the same from a trace as from a search that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_run import fake_run

from arbor import Solver, read_trace
from arbor.cli import main
from arbor.events import Ended, Event
from arbor.integrations.telemetry.otlp import to_otlp
from arbor.integrations.telemetry.spans import SEARCH, SpanBegins, SpanChange, SpanEnds, SpanFold

pytestmark = pytest.mark.usefixtures("loaded_once")

SMALL: dict[str, Any] = {"controller": "beam,beam_size=2,width=3", "budget": "300tok"}


def folded(events: list[Event], step: float = 0.01, words: bool = True) -> list[SpanChange]:
    fold = SpanFold(words)
    changes = [c for number, event in enumerate(events) for c in fold.feed(event, number * step)]
    return [*changes, *fold.close()]


@settings(max_examples=30)
@given(seed=st.integers(0, 500), step=st.sampled_from([1e-6, 1e-3, 0.2]), cut=st.integers(1, 400))
def test_every_span_ends_once_within_the_one_it_lies_in(seed: int, step: float, cut: int) -> None:
    began: dict[str, SpanBegins] = {}
    ended: dict[str, SpanEnds] = {}

    for change in folded(list(fake_run(seed))[:cut], step):
        if isinstance(change, SpanBegins):
            assert change.key not in began
            if change.parent is None:
                assert change.key == SEARCH
            else:
                assert change.parent in began and change.parent not in ended
                assert change.seconds >= began[change.parent].seconds
            began[change.key] = change
        elif isinstance(change, SpanEnds):
            assert change.key in began and change.key not in ended
            assert change.seconds >= began[change.key].seconds
            within = {key for key, each in began.items() if each.parent == change.key}
            assert within <= ended.keys(), "what lies within it has ended"
            ended[change.key] = change
        else:
            assert change.key in began and change.key not in ended

    assert began.keys() == ended.keys()
    assert bool(ended[SEARCH].error) == (cut < len(list(fake_run(seed))))


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


# While it runs
