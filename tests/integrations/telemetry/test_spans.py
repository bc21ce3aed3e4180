"""Spans of a search: a tree in time, the same from a trace as from a search that runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_run import fake_run

from arbor import Solver, TraceWriter, read_trace
from arbor.cli import main
from arbor.errors import UsageError
from arbor.events import Answered, Boundary, Ended, Event, Evicted, Header, Opened, Verified
from arbor.integrations.telemetry.otlp import to_otlp
from arbor.integrations.telemetry.search_spans import SearchSpans
from arbor.integrations.telemetry.spans import (
    SEARCH,
    Moment,
    SpanBegins,
    SpanChange,
    SpanEnds,
    SpanFold,
)

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


@settings(max_examples=30)
@given(seed=st.integers(0, 500))
def test_every_thought_is_a_span_with_its_text_and_value(seed: int) -> None:
    run = list(fake_run(seed))
    changes = folded(run)
    began = {change.key: change for change in changes if isinstance(change, SpanBegins)}
    ended = {change.key: change for change in changes if isinstance(change, SpanEnds)}
    values: dict[int, float] = {}
    order = [change for change in changes if not isinstance(change, Moment)]

    for event in run:
        match event:
            case Opened(node=node, parent=int(parent)):
                above, own = f"block {parent}", began[f"block {node}"]
                over = above not in began or order.index(ended[above]) < order.index(own)
                assert own.parent == (SEARCH if over else above)
            case Boundary(node=node, text=text) if node:
                assert ended[f"decode {node}"].attributes.get("output.value", "") == text
            case Verified(nodes=nodes, values=found):
                values |= dict(zip(nodes, found, strict=True))
            case Answered(text=text):
                assert ended[SEARCH].attributes.get("output.value") == text
            case _:
                pass
    for node, value in values.items():
        if f"block {node}" in ended:
            assert ended[f"block {node}"].attributes["arbor.value"] == value
    moments = Counter(change.name for change in changes if isinstance(change, Moment))
    assert moments["evict"] == sum(isinstance(event, Evicted) for event in run)


def test_words_can_be_left_out() -> None:
    run = list(fake_run(seed=1))
    texts = {event.text for event in run if isinstance(event, Boundary)}

    shown = str(folded(run, words=False))

    assert not any(repr(text) in shown for text in texts)
    assert "input.value" not in shown and "output.value" not in shown


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


def test_the_json_is_that_of_the_protocol(trace: Path) -> None:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="opentelemetry-proto is not installed",
    )
    from google.protobuf.json_format import ParseDict

    document = to_otlp(read_trace(trace))

    request = ParseDict(document, service.ExportTraceServiceRequest())

    (scope,) = request.resource_spans[0].scope_spans
    assert [span.name for span in scope.spans] == [span["name"] for span in spans_of(document)]


def test_a_trace_without_words_has_spans_without_words(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path, text="none") as writer:
        for event in fake_run(seed=1):
            writer(event)

    text = json.dumps(to_otlp(read_trace(path)))

    assert "output.value" not in text and "input.value" not in text and "decode" in text


# While it runs


@pytest.fixture
def exported() -> Any:
    """A tracer provider, and what it has exported."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(span_limits=SpanLimits(max_events=10_000))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def shape(spans: list[tuple[str, str, str | None, dict[str, Any], list[str]]]) -> Counter[str]:
    """Names, parents, attributes and moments of spans, without ids and times."""
    names = {identity: name for identity, name, *_ in spans}
    clocks = ("arbor.run",)
    return Counter(
        f"{name} in {names.get(parent or '')}: "
        f"{sorted((k, v) for k, v in about.items() if k not in clocks)} {moments}"
        for _, name, parent, about, moments in spans
    )


def from_trace(path: Path) -> Counter[str]:
    return shape(
        [
            (
                span["spanId"],
                span["name"],
                span.get("parentSpanId"),
                attributes(span),
                [moment["name"] for moment in span["events"]],
            )
            for span in spans_of(to_otlp(read_trace(path)))
        ]
    )


def from_exporter(exporter: Any) -> Counter[str]:
    return shape(
        [
            (
                f"{span.context.span_id:x}",
                span.name,
                None if span.parent is None else f"{span.parent.span_id:x}",
                {
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in span.attributes.items()
                },
                [moment.name for moment in span.events],
            )
            for span in exporter.get_finished_spans()
        ]
    )


def test_a_search_that_runs_has_the_spans_of_its_trace(trace: Path, exported: Any) -> None:
    provider, exporter = exported

    with Solver(**SMALL, listeners=[SearchSpans(provider)]) as solver:
        solver.solve("4 5 6 10", seed=2)

    assert from_exporter(exporter) == from_trace(trace)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 1
    for span in spans:
        assert span.start_time <= span.end_time and span.status.is_ok


def test_several_searches_have_a_trace_each(exported: Any) -> None:
    provider, exporter = exported
    spans = SearchSpans(provider)

    with Solver(**SMALL) as solver:
        jobs = [("4 5 6 10", {"seed": 1}), ("1 2 3 4", {"seed": 1})]
        for _ in solver.as_completed(jobs, listen=spans.hear):
            pass

    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert {root.attributes["input.value"] for root in roots} == {"4 5 6 10", "1 2 3 4"}
    assert len({root.context.trace_id for root in roots}) == 2


def test_a_listener_of_several_searches_at_a_time_is_refused(exported: Any) -> None:
    spans = SearchSpans(exported[0])
    header = next(event for event in fake_run(seed=1) if isinstance(event, Header))

    spans(header)
    with pytest.raises(UsageError, match="as_completed"):
        spans(header)


def test_a_failed_search_is_an_error(exported: Any) -> None:
    provider, exporter = exported
    spans = SearchSpans(provider)
    run = list(fake_run(seed=1))

    for event in [*run[:-1], Ended("error", 0)]:
        spans(event)

    (root,) = (span for span in exporter.get_finished_spans() if span.parent is None)
    assert not root.status.is_ok and root.attributes["arbor.status"] == "error"
