"""A trace as spans of OpenTelemetry: the JSON of its protocol (OTLP), which collectors read.

A search is one span. Below it are its prefills, rehydrations and verifications, and its thoughts; a
thought lasts until the search abandons it or ends, so that the thoughts that follow it lie within
it and the tool shows the tree. Within a thought, ``decode`` is the span of its tokens. Evictions,
rehydrations and pressure are moments of the search. Attributes follow OpenInference where it has
them (https://arize-ai.github.io/openinference/spec/semantic_conventions.html), else they begin with
``arbor.``. The protocol: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from arbor._version import __version__
from arbor.events import (
    Answered,
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Opened,
    Pressure,
    Pruned,
    Rehydrated,
    Scored,
    Terminal,
    Verified,
)
from arbor.trace.fold import budget_of
from arbor.trace.read import Trace

INTERNAL = 1  # the kind of a span: neither client nor server
OK, ERROR = 1, 2
KIND = "openinference.span.kind"
CHAIN, LLM, EVALUATOR = "CHAIN", "LLM", "EVALUATOR"
LONGEST_S = 2.0**63 / 1e9  # later times are none: the protocol counts nanoseconds in 64 bits
SEARCH = "search"  # key of the span of the whole search
COUNTS = (
    "tokens_generated",
    "tokens_prefilled",
    "tokens_shared",
    "tokens_recomputed",
    "tokens_fetched",
    "evictions",
    "peak_tokens",
    "nodes",
)

Attributes = Mapping[str, Any]  # texts, truth values, numbers, and lists of one kind of these


def to_otlp(trace: Trace) -> dict[str, Any]:
    """A trace as the body of a request to ``/v1/traces``; dump it as JSON.

    Ids follow from the run's name, so that a trace is converted to the same spans every time.
    """
    header = trace.header
    run = str(trace.path) if header is None else header.run
    fold = _SpanFold(header, run, budget_of(trace))
    for event, seconds in zip(trace.events, trace.times, strict=True):
        fold.feed(event, seconds)
    fold.close()
    resource = {"service.name": "arbor", "service.version": __version__}
    scope = {"name": "arbor", "version": __version__}
    scoped = {"scope": scope, "spans": list(fold.spans.values())}
    return {
        "resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": [scoped]}]
    }


class _SpanFold:
    """The spans of one search, folded from its events.

    Args:
        header: its settings; None where they are lost, as is the time at which it began.
        run: its name.
        budget: slots; None: unknown.

    Attributes:
        spans: by key, in the order of their beginnings.
    """

    def __init__(self, header: Header | None, run: str, budget: int | None = None) -> None:
        self.spans: dict[str, dict[str, Any]] = {}
        self._run = run
        self._origin_ns = 0 if header is None else _nanoseconds(header.created)
        self._trace_id = _digest(run, 16)
        self._now = 0.0
        self._model = "" if header is None else str(header.model.get("id", ""))
        self._open: dict[str, None] = {}  # keys of spans that have not ended, in their order
        self._children: dict[int | None, list[int]] = {None: []}  # None: of no block known so far
        self._values: dict[int, float] = {}
        self._answers: dict[int, str | None] = {}
        self._prompt = 0  # tokens
        self._answer: dict[str, Any] = {}
        name = "search" if header is None else f"search {header.task}"
        about = {} if header is None else _about(header)
        known = {} if budget is None else {"arbor.budget_tokens": budget}
        self._begin(SEARCH, None, name, {KIND: CHAIN, **about, **known})

    def feed(self, event: Event, seconds: float) -> None:
        """What an event begins, marks and ends.

        Args:
            event: the next.
            seconds: since the search began; its end, for an event that took time.
        """
        if seconds < LONGEST_S:
            self._now = max(self._now, seconds)
        about: dict[str, Any]
        match event:
            case Opened(parent=None):
                self._prompt = event.tokens
            case Opened():
                self._opened(event)
            case Boundary():
                about = {
                    "llm.token_count.completion": len(event.ids) - event.given,
                    "arbor.logprob": event.logprob,
                    "arbor.confidence": event.confidence,
                    "arbor.stop": event.stop,
                }
                self._end(f"decode {event.node}", _text("output.value", event.text) | about)
            case Verified():
                self._values.update(zip(event.nodes, event.values, strict=False))
                about = {
                    KIND: EVALUATOR,
                    "arbor.nodes": list(event.nodes),
                    "arbor.values": list(event.values),
                    "arbor.skipped": event.skipped,
                }
                self._timed(f"verify {event.verifier}", event.elapsed_s, about)
            case Scored():
                about = {KIND: EVALUATOR, "arbor.steps": event.steps}
                self._timed(f"score {event.verifier}", event.elapsed_s, about)
            case Forwarded(kind="prefill" | "rehydrate"):
                about = {KIND: CHAIN, "arbor.rows": event.rows}
                self._timed(event.kind, event.elapsed_s, about)
            case Evicted():
                self._moment("evict", {"arbor.cause": event.cause}, event)
            case Rehydrated():
                self._moment("rehydrate", {"arbor.mode": event.mode}, event)
            case Pressure():
                about = {"arbor.needed": event.needed, "arbor.free": event.free}
                self._moment("pressure", about)
            case Terminal():
                self._answers[event.node] = event.answer
            case Pruned():
                self._end_blocks(event.nodes)
            case Answered():
                self._answer = _text("output.value", event.text) | {
                    **({} if event.score is None else {"arbor.score": event.score}),
                    "arbor.path": list(event.path),
                    **({} if event.correct is None else {"arbor.correct": event.correct}),
                }
            case Ended():
                self._ended(event)
            case _:
                pass

    def close(self) -> None:
        """End what has not ended: the events stop before the end of the search."""
        for key in reversed(list(self._open)):
            self._end(key, {}, "the search was cut off" if key == SEARCH else "")

    # One event

    def _opened(self, event: Opened) -> None:
        if event.node in self._children:  # a damaged trace
            return
        self._children[event.parent if event.parent in self._children else None].append(event.node)
        self._children[event.node] = []
        above, key = f"block {event.parent}", f"block {event.node}"
        about = {
            KIND: CHAIN,
            "arbor.node": event.node,
            "arbor.depth": event.depth,
            "arbor.index": event.index,
        }
        parent = above if above in self._open else SEARCH
        self._begin(key, parent, f"thought {event.node}", about)
        model = {"llm.model_name": self._model} if self._model else {}
        self._begin(f"decode {event.node}", key, "decode", {KIND: LLM, **model})

    def _end_blocks(self, nodes: Iterable[int]) -> None:
        """End blocks, each after those that follow it."""
        order: dict[int, None] = {}  # every block after the one it follows
        queue = list(nodes)
        while queue:
            node = queue.pop()
            order.pop(node, None)
            order[node] = None
            queue += self._children.get(node, ())
        for node in reversed(order):
            self._end(f"decode {node}", {})
            about = _text("output.value", self._answers.get(node))
            if node in self._values:
                about["arbor.value"] = self._values[node]
            self._end(f"block {node}", about)

    def _ended(self, event: Ended) -> None:
        self._end_blocks(self._children[None])
        generated = int(event.metrics.get("tokens_generated", 0))
        about = self._answer | {
            "arbor.status": event.status,
            "llm.token_count.prompt": self._prompt,
            "llm.token_count.completion": generated,
            "llm.token_count.total": self._prompt + generated,
        }
        for name in COUNTS:
            value = event.metrics.get(name)
            if isinstance(value, int | float):
                about[f"arbor.{name}"] = value
        self._end(SEARCH, about, "the search failed" if event.status == "error" else "")

    # Spans

    def _begin(
        self,
        key: str,
        parent: str | None,
        name: str,
        attributes: Attributes,
        seconds: float | None = None,
    ) -> None:
        self._open[key] = None
        above = {} if parent is None else {"parentSpanId": self.spans[parent]["spanId"]}
        self.spans[key] = {
            "traceId": self._trace_id,
            "spanId": _digest(f"{self._run} {key}", 8),
            **above,
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": self._at(self._now if seconds is None else seconds),
            "attributes": _pairs(attributes),
            "events": [],
        }

    def _timed(self, name: str, elapsed_s: float, attributes: Attributes) -> None:
        """A span that ends now."""
        key = f"{name} {len(self.spans)}"
        began = self._now - elapsed_s if math.isfinite(elapsed_s) else self._now
        began = min(self._now, max(0.0, began))
        self._begin(key, SEARCH, name, attributes, began)
        self._end(key, {})

    def _moment(
        self, name: str, attributes: Attributes, moved: Evicted | Rehydrated | None = None
    ) -> None:
        if moved is not None:
            tokens = sum(count for _, count in moved.nodes)
            attributes = {"arbor.tokens": tokens, **attributes, "arbor.kv.device": moved.kv.device}
        moment = {"timeUnixNano": self._at(self._now), "name": name}
        self.spans[SEARCH]["events"].append({**moment, "attributes": _pairs(attributes)})

    def _end(self, key: str, attributes: Attributes, error: str = "") -> None:
        """End a span, unless it has ended."""
        if key not in self._open:
            return
        del self._open[key]
        span = self.spans[key]
        span["endTimeUnixNano"] = self._at(self._now)
        span["attributes"] += _pairs(attributes)
        span["status"] = {"code": ERROR, "message": error} if error else {"code": OK}

    def _at(self, seconds: float) -> str:
        return str(self._origin_ns + round(seconds * 1e9))


def _about(header: Header) -> dict[str, Any]:
    """The attributes of a search."""
    parts = {part: header.config.get(part) for part in ("controller", "verifier", "policy")}
    return {
        **_text("input.value", header.problem),
        "arbor.run": header.run,
        "arbor.task": header.task,
        "arbor.seed": header.seed,
        **{
            f"arbor.{part}": str(spec.get("name", ""))
            for part, spec in parts.items()
            if isinstance(spec, Mapping)
        },
        "arbor.budget": str(header.config.get("budget", "")),
    }


def _text(name: str, text: str | None) -> dict[str, Any]:
    return {name: text} if text else {}


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).hexdigest()


def _nanoseconds(created: str) -> int:
    """A time of ISO 8601 in nanoseconds since 1970; 0 for anything else."""
    try:
        return round(datetime.fromisoformat(created).timestamp() * 1000) * 1_000_000
    except (ValueError, OverflowError, OSError):
        return 0


def _pairs(attributes: Attributes) -> list[dict[str, Any]]:
    """Attributes as the protocol writes them; a number that is not finite has no JSON."""
    return [
        {"key": name, "value": _value(value)}
        for name, value in attributes.items()
        if all(
            not isinstance(each, float) or math.isfinite(each)
            for each in (value if isinstance(value, list) else [value])
        )
    ]


def _value(value: Any) -> dict[str, Any]:
    """A value as the protocol writes it: integers of 64 bits are texts."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
