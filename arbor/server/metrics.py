"""ServerMetrics: what Prometheus reads of a server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """What Prometheus reads of a server.

    Args:
        running, waiting: number of searches in progress, and of those that have not begun.
        slots: tokens of KV that there is room for.
        held: tokens of KV in use.
    """

    def __init__(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        slots: Callable[[], int],
        held: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "arbor_requests",
            "Requests answered, by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.cancelled = Counter(
            "arbor_requests_cancelled",
            "Requests whose client went away before the end.",
            registry=self.registry,
        )
        self.seconds = Histogram(
            "arbor_request_seconds",
            "Seconds from a request's arrival to its end.",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_seconds = Histogram(
            "arbor_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first text, of streams.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "arbor_tokens",
            "Tokens of ended searches: read as prompts, reused from earlier requests, generated, "
            "recomputed or fetched after eviction.",
            ["kind"],
            registry=self.registry,
        )
        for name, words, read in (
            ("arbor_searches_running", "Searches in progress.", running),
            ("arbor_searches_waiting", "Searches that have not begun.", waiting),
            ("arbor_kv_slots", "Tokens of KV that there is room for.", slots),
            ("arbor_kv_slots_used", "Tokens of KV in use, kept prompts included.", held),
        ):
            Gauge(name, words, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)
