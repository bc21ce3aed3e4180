"""SearchSpans: a listener that reports searches as spans of OpenTelemetry while they run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from arbor._version import __version__
from arbor.errors import UsageError
from arbor.events import Ended, Event, Header
from arbor.integrations.telemetry.spans import Moment, SpanBegins, SpanChange, SpanFold

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

ALONE = -1  # the place of a search that is not one of several


class SearchSpans:
    """A listener that reports searches as spans of OpenTelemetry while they run.

        with Solver(listeners=[SearchSpans()]) as solver:
            solver.solve("4 5 6 10")

    The spans are those of `arbor.integrations.telemetry.spans`, with the attributes of
    OpenInference. They go where the tracer provider sends them, below the span that is current when
    a search begins. Needs ``arbor-search[otel]``.

    A solver's listener hears all of its searches, so that it can report one at a time only; several
    at a time are reported by `hear`: ``solver.as_completed(jobs, listen=spans.hear)``.

    Args:
        provider: of tracers; by default the process's own (``opentelemetry.trace``).
        words: whether spans hold the texts of problem, thoughts and answer.

    Raises:
        UsageError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None, words: bool = True) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise UsageError(
                "extra-missing",
                "OpenTelemetry is not installed.",
                "pip install 'arbor-search[otel]'",
            ) from error
        self._tracer = (provider or trace.get_tracer_provider()).get_tracer("arbor", __version__)
        self._words = words
        self._searches: dict[int, _Spans] = {}

    def __call__(self, event: Event) -> None:
        """Hears an event of the solver's only search.

        Raises:
            UsageError: another search began before this one ended.
        """
        if isinstance(event, Header) and ALONE in self._searches:
            raise UsageError(
                "otel-several",
                "several searches at a time, and a listener cannot say whose an event is.",
                "Report them by as_completed(jobs, listen=spans.hear).",
            )
        self.hear(ALONE, event)

    def hear(self, place: int, event: Event) -> None:
        """Hears an event of one of several searches.

        Args:
            place: its number.
            event: of it.
        """
        if isinstance(event, Header):
            self._searches[place] = _Spans(self._tracer, SpanFold(self._words))
        search = self._searches.get(place)
        if search is None:
            return
        search.feed(event)
        if isinstance(event, Ended):
            del self._searches[place]


class _Spans:
    """The spans of one search."""

    def __init__(self, tracer: Any, fold: SpanFold) -> None:
        self._tracer = tracer
        self._fold = fold
        self._began_ns = time.time_ns()
        self._clock = time.perf_counter()
        self._open: dict[str, Span] = {}

    def feed(self, event: Event) -> None:
        for change in self._fold.feed(event, time.perf_counter() - self._clock):
            self._apply(change)

    def _apply(self, change: SpanChange) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        at_ns = self._began_ns + round(change.seconds * 1e9)
        if isinstance(change, SpanBegins):
            parent = None if change.parent is None else self._open[change.parent]
            self._open[change.key] = self._tracer.start_span(
                change.name,
                context=None if parent is None else set_span_in_context(parent),
                attributes=change.attributes,
                start_time=at_ns,
            )
        elif isinstance(change, Moment):
            self._open[change.key].add_event(change.name, change.attributes, at_ns)
        else:
            span = self._open.pop(change.key)
            for name, value in change.attributes.items():
                span.set_attribute(name, value)
            code = StatusCode.ERROR if change.error else StatusCode.OK
            span.set_status(Status(code, change.error or None))
            span.end(at_ns)
