"""Spans of a search, for tools that show traces: what begins, what happens, what ends.

A search is one span. Below it are its prefills, rehydrations and verifications, and its thoughts; a
thought lasts until the search abandons it or ends, so that the thoughts that follow it lie within
it and the tool shows the tree. Within a thought, ``decode`` is the span of its tokens. Evictions,
rehydrations and pressure are moments of the search. Attributes follow OpenInference where it has
them (https://arize-ai.github.io/openinference/spec/semantic_conventions.html), else they begin with
``arbor.``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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

KIND = "openinference.span.kind"
CHAIN, LLM, EVALUATOR = "CHAIN", "LLM", "EVALUATOR"
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

Attributes = Mapping[
    str, Any
]  # texts, truth values, finite numbers, and lists of one kind of these


@dataclass(frozen=True, slots=True)
class SpanBegins:
    """A span begins.

    Attributes:
        key: names it within the search.
        parent: key of the span it lies in; None for that of the search.
        name: for readers.
        seconds: since the search began.
        attributes: known from the beginning.
    """

    key: str
    parent: str | None
    name: str
    seconds: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Moment:
    """Something happens within a span."""

    key: str
    name: str
    seconds: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanEnds:
    """A span ends.

    Attributes:
        key: the span's.
        seconds: since the search began.
        attributes: known at its end.
        error: why it failed; empty if it did not.
    """

    key: str
    seconds: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


SpanChange = SpanBegins | Moment | SpanEnds


class SpanFold:
    """The spans of one search, folded from its events.

    Args:
        words: whether texts are among the attributes.
    """

    def __init__(self, words: bool = True) -> None:
        self._words = words
        self._now = 0.0
        self._model = ""
        self._open: dict[str, None] = {}  # keys of spans that have not ended, in their order
        self._parent: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._values: dict[int, float] = {}
        self._answers: dict[int, str | None] = {}
        self._prompt = 0  # tokens
        self._answer: dict[str, Any] = {}
        self._number = 0  # of spans without a block

    def feed(self, event: Event, seconds: float) -> Iterator[SpanChange]:
        """What an event begins, marks and ends.

        Args:
            event: the next.
            seconds: since the search began; its end, for an event that took time.
        """
        self._now = max(self._now, seconds) if math.isfinite(seconds) else self._now
        match event:
            case Header():
                self._model = str(event.model.get("id", ""))
                yield self._begin(SEARCH, None, f"search {event.task}", self._about(event))
            case Opened(parent=None):
                self._prompt = event.tokens
            case Opened():
                yield from self._opened(event)
            case Boundary():
                yield from self._boundary(event)
            case Verified():
                self._values.update(zip(event.nodes, event.values, strict=False))
                yield from self._timed(
                    f"verify {event.verifier}",
                    event.elapsed_s,
                    {KIND: EVALUATOR, "arbor.nodes": list(event.nodes)}
                    | {"arbor.values": list(event.values), "arbor.skipped": event.skipped},
                )
            case Scored():
                about = {KIND: EVALUATOR, "arbor.steps": event.steps}
                yield from self._timed(f"score {event.verifier}", event.elapsed_s, about)
            case Forwarded(kind="prefill" | "rehydrate"):
                about = {KIND: CHAIN, "arbor.rows": event.rows}
                yield from self._timed(event.kind, event.elapsed_s, about)
            case Evicted():
                tokens = sum(count for _, count in event.nodes)
                about = {"arbor.tokens": tokens, "arbor.cause": event.cause}
                yield self._moment("evict", about | {"arbor.kv.device": event.kv.device})
            case Rehydrated():
                tokens = sum(count for _, count in event.nodes)
                about = {"arbor.tokens": tokens, "arbor.mode": event.mode}
                yield self._moment("rehydrate", about | {"arbor.kv.device": event.kv.device})
            case Pressure():
                about = {"arbor.needed": event.needed, "arbor.free": event.free}
                yield self._moment("pressure", about)
            case Terminal():
                self._answers[event.node] = event.answer
            case Pruned():
                yield from self._end_blocks(event.nodes)
            case Answered():
                self._answer = self._text("output.value", event.text) | {
                    **({} if event.score is None else {"arbor.score": event.score}),
                    "arbor.path": list(event.path),
                }
                if event.correct is not None:
                    self._answer["arbor.correct"] = event.correct
            case Ended():
                yield from self._ended(event)
            case _:
                pass

    def close(self) -> Iterator[SpanChange]:
        """The end of what has not ended: the events stop before the end of the search."""
        for key in reversed(list(self._open)):
            yield self._end(key, {}, "the search was cut off" if key == SEARCH else "")

    # One event

    def _about(self, header: Header) -> dict[str, Any]:
        config = header.config
        names = {
            f"arbor.{part}": str((config.get(part) or {}).get("name", ""))
            for part in ("controller", "verifier", "policy")
            if isinstance(config.get(part), Mapping)
        }
        return {
            KIND: CHAIN,
            **self._text("input.value", header.problem),
            "arbor.run": header.run,
            "arbor.task": header.task,
            "arbor.seed": header.seed,
            **names,
            "arbor.budget": str(config.get("budget", "")),
            "arbor.budget_tokens": int(header.kv.get("budget_tokens", 0)),
        }

    def _opened(self, event: Opened) -> Iterator[SpanChange]:
        assert event.parent is not None, "the root is the search itself"
        self._parent[event.node] = event.parent
        self._children.setdefault(event.parent, []).append(event.node)
        above = f"block {event.parent}"
        key = f"block {event.node}"
        about = {
            KIND: CHAIN,
            "arbor.node": event.node,
            "arbor.depth": event.depth,
            "arbor.index": event.index,
        }
        parent = above if above in self._open else SEARCH
        yield self._begin(key, parent, f"thought {event.node}", about)
        model = {"llm.model_name": self._model} if self._model else {}
        yield self._begin(f"decode {event.node}", key, "decode", {KIND: LLM, **model})

    def _boundary(self, event: Boundary) -> Iterator[SpanChange]:
        sampled = len(event.ids) - event.given
        yield from self._end_if_open(
            f"decode {event.node}",
            self._text("output.value", event.text)
            | {
                "llm.token_count.completion": sampled,
                "arbor.logprob": event.logprob,
                "arbor.confidence": event.confidence,
                "arbor.stop": event.stop,
            },
        )

    def _end_blocks(self, nodes: Iterable[int]) -> Iterator[SpanChange]:
        """The end of blocks, each after those that follow it."""
        order: dict[int, None] = {}  # every block after the one it follows
        queue = list(nodes)
        while queue:
            node = queue.pop()
            order.pop(node, None)
            order[node] = None
            queue += self._children.get(node, ())
        for node in reversed(order):
            if f"block {node}" not in self._open:
                continue
            yield from self._end_if_open(f"decode {node}", {})
            about: dict[str, Any] = {}
            if node in self._values:
                about["arbor.value"] = self._values[node]
            if node in self._answers:
                about |= self._text("output.value", self._answers[node])
            yield self._end(f"block {node}", about)

    def _ended(self, event: Ended) -> Iterator[SpanChange]:
        roots = [node for node, parent in self._parent.items() if parent not in self._parent]
        yield from self._end_blocks(roots)
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
        failed = "the search failed" if event.status == "error" else ""
        yield from self._end_if_open(SEARCH, about, failed)

    # Changes

    def _text(self, name: str, text: str | None) -> dict[str, Any]:
        return {name: text} if self._words and text else {}

    def _begin(
        self,
        key: str,
        parent: str | None,
        name: str,
        attributes: Attributes,
        seconds: float | None = None,
    ) -> SpanBegins:
        self._open[key] = None
        began = self._now if seconds is None else seconds
        return SpanBegins(key, parent, name, began, _finite(attributes))

    def _timed(self, name: str, elapsed_s: float, attributes: Attributes) -> Iterator[SpanChange]:
        """A span that ends now."""
        self._number += 1
        key = f"{name} {self._number}"
        began = max(0.0, self._now - elapsed_s) if math.isfinite(elapsed_s) else self._now
        yield self._begin(key, SEARCH, name, attributes, began)
        yield self._end(key, {})

    def _moment(self, name: str, attributes: Attributes) -> Moment:
        return Moment(SEARCH, name, self._now, _finite(attributes))

    def _end(self, key: str, attributes: Attributes, error: str = "") -> SpanEnds:
        del self._open[key]
        return SpanEnds(key, self._now, _finite(attributes), error)

    def _end_if_open(
        self, key: str, attributes: Attributes, error: str = ""
    ) -> Iterator[SpanChange]:
        if key in self._open:
            yield self._end(key, attributes, error)


def _finite(attributes: Attributes) -> dict[str, Any]:
    """Attributes without numbers that are not finite, which no tool can read."""

    def readable(value: Any) -> bool:
        if isinstance(value, list):
            return all(readable(each) for each in value)
        return not isinstance(value, float) or math.isfinite(value)

    return {name: value for name, value in attributes.items() if readable(value)}
