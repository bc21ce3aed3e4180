"""ServerMetrics: what Prometheus reads of a server, and what counts its requests and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from arbor.events import Ended, Event, Opened, Shared
from arbor.run.choices import RunCost

CLIENT_GONE = 499  # nginx's status for it; nobody reads it
UNCOUNTED = ("/health", "/ready", "/metrics")  # paths that programs ask for all the time
OTHER = "other"  # the endpoint of unknown URLs
# bounds of the histograms of seconds
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """What Prometheus reads of a server.

    Args:
        gauges: (name, words, what reads it) of each number that goes up and down.
    """

    def __init__(self, gauges: Sequence[tuple[str, str, Callable[[], int]]]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "arbor_requests",
            f"Requests but those of {', '.join(UNCOUNTED)}, by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.cancelled = Counter(
            "arbor_requests_cancelled",
            "Requests whose client went away before the end.",
            registry=registry,
        )
        self.seconds = Histogram(
            "arbor_request_seconds",
            "Seconds from a request's arrival to its end.",
            ["endpoint"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_seconds = Histogram(
            "arbor_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first text, of streams.",
            buckets=SECONDS,
            registry=registry,
        )
        self.tokens = Counter(
            "arbor_tokens",
            "Tokens of searches: read as prompts, reused from earlier requests and, once a search has "
            "ended or was given up, generated, recomputed or fetched after eviction.",
            ["kind"],
            registry=registry,
        )
        for name, words, read in gauges:
            Gauge(name, words, registry=registry).set_function(read)

    def hear(self, event: Event) -> None:
        """Count the tokens of an event of any search; called in the thread of the searches."""
        if not isinstance(event, Opened | Shared | Ended):
            return
        cost = RunCost()
        cost.count(event)
        counts = {"prompt": cost.prompt, "reused": cost.reused}
        for kind in ("generated", "recomputed", "fetched"):
            counts[kind] = cost.counters.get(f"tokens_{kind}", 0)
        for kind, count in counts.items():
            self.tokens.labels(kind).inc(count)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class CountedRequests:
    """An application whose requests are counted, each when it has been answered.

    Args:
        app: which answers.
        metrics: which count.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, whole = 500, True  # where an error leaves the answer to others

        async def watched(message: Any) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status, whole = message["status"], False
            await send(message)
            if message["type"] == "http.response.body":
                whole = not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._count(scope, status if whole else CLIENT_GONE)

    def _count(self, scope: Scope, status: int) -> None:
        endpoint = getattr(scope.get("route"), "path", OTHER)
        if endpoint in UNCOUNTED:
            return
        self._metrics.requests.labels(endpoint, str(status)).inc()
        if status == CLIENT_GONE:
            self._metrics.cancelled.inc()
