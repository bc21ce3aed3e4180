"""Metrics: what a run cost, counted from its events."""

from __future__ import annotations

from support.fake_run import header

from arbor.events import (
    KV,
    Boundary,
    Ended,
    Evicted,
    Forwarded,
    Opened,
    Pressure,
    Pruned,
    Rehydrated,
    Selected,
    Transition,
    Verified,
)
from arbor.metrics import Metrics, MetricsFold, Unshared


def test_each_event_counts_what_it_says() -> None:
    now = iter([10.0, 12.5, 99.0])
    fold = MetricsFold(clock=lambda: next(now))
    for event in (
        header(),
        Opened(0, None, 0, 0, 15, "prompt"),
        Forwarded("prefill", 15, 1, 120, 15, KV(15), 15, 0.5),
        Selected(((0, 2),)),
        Transition((0,), (), 0),
        Opened(1, 0, 0, 1, 0, ""),
        Opened(2, 0, 1, 1, 0, ""),
        Boundary(1, (4, 5, 6), "x", "step", -1.0, 0.5, 0.5),
        Boundary(2, (4, 5), "x", "eos", -1.0, 0.5, 0.5),
        Forwarded("decode", 5, 3, 90, 60, KV(20), 20, 1.0),
        Forwarded("verify", 4, 1, 40, 30, KV(24), 24, 0.25),
        Verified("self", (1, 2), (0.5, 0.25), 1, 0.3),
        Pressure(30, 10, 30),
        Evicted("pressure", ((1, 3), (2, 1)), KV(16, host=4)),
        Rehydrated(((1, 3),), "recompute", KV(19)),
        Rehydrated(((2, 1),), "fetch", KV(20)),
        Transition((1,), (0,), 3),
    ):
        fold(event)

    metrics = fold.metrics()
    fold(Ended("solved", 3, metrics.to_dict()))

    assert fold.metrics() == metrics
    assert metrics == Metrics(
        wall_s=2.5,
        prefill_s=0.5,
        decode_s=1.0,
        verify_s=0.25,
        tokens_prefilled=15,
        tokens_generated=5,
        tokens_recomputed=3,
        tokens_fetched=1,
        rows=24,
        steps=5,
        read_tokens=250,
        unique_read_tokens=105,
        rounds=1,
        expansions=1,
        nodes=3,
        budget_tokens=200,
        full_tokens=1000,
        smallest_tokens=50,
        bytes_per_token=64,
        peak_tokens=24,
        peak_unshared_tokens=15 + 3 + 15 + 2,
        mean_tokens=(15 + 3 * 20 + 24) / 5,
        peak_host_tokens=4,
        evicted_tokens=4,
        evictions=1,
        rehydrations=2,
        transitions=2,
        transition_distance=3,
        pressure_events=1,
        verified=2,
        asked=1,
    )


def test_unshared_leaves_hold_their_whole_paths_until_the_search_gives_them_up() -> None:
    count = Unshared()
    for event in (
        Opened(0, None, 0, 0, 10, "prompt"),
        Opened(1, 0, 0, 1, 0, ""),
        Opened(2, 0, 1, 1, 0, ""),
        Boundary(1, (4, 5, 6), "x", "step", -1.0, 0.5, 0.5),
        Boundary(2, (4, 5), "x", "step", -1.0, 0.5, 0.5),
        Verified("self", (1, 2), (0.5, 0.25), 1, 0.3),
        Pruned((2,)),
        Opened(3, 1, 0, 2, 0, ""),
        Opened(4, 1, 1, 2, 0, ""),
        Boundary(3, (7,), "x", "step", -1.0, 0.5, 0.5),
        Boundary(4, (8, 9), "x", "step", -1.0, 0.5, 0.5),
        Verified("self", (3, 4), (0.5, 0.25), 1, 0.3),
    ):
        count(event)

    assert count.rounds == [13 + 12, 14 + 15]
