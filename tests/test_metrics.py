"""Metrics: what a run cost, counted from its events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_run import fake_run, header

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


def test_without_sharing_an_open_block_counts_the_path_it_continues() -> None:
    fold = MetricsFold()
    for event in (
        Opened(0, None, 0, 0, 15, ""),
        Opened(1, 0, 0, 1, 0, ""),
        Opened(2, 0, 1, 1, 0, ""),
        Boundary(1, (5, 6, 7), "", "step", 0.0, 0.5, 0.5),
        Opened(3, 1, 0, 2, 0, ""),  # grows while block 2 does
        Boundary(2, (5, 6), "", "step", 0.0, 0.5, 0.5),
        Verified("exact", (2,), (0.5,), 0, 0.0),
    ):
        fold(event)

    assert fold.metrics().peak_unshared_tokens == (15 + 2) + (15 + 3)


def test_derived_numbers() -> None:
    metrics = Metrics(
        wall_s=2.0,
        tokens_prefilled=15,
        tokens_generated=25,
        nodes=6,
        budget_tokens=40,
        bytes_per_token=64,
        peak_tokens=10,
        read_tokens=200,
        unique_read_tokens=50,
    )

    assert (metrics.blocks, metrics.tree_tokens, metrics.peak_bytes) == (5, 40, 640)
    assert (metrics.tok_per_s, metrics.peak_share, metrics.budget_share) == (12.5, 0.25, 0.25)
    assert metrics.reads_saved == pytest.approx(0.75)


def test_nothing_happened_divides_by_nothing() -> None:
    metrics = MetricsFold().metrics()

    assert metrics == Metrics()
    assert metrics.to_dict()["tok_per_s"] == metrics.to_dict()["reads_saved"] == 0.0


@given(seed=st.integers(0, 10**6))
def test_metrics_survive_json(seed: int) -> None:
    fold = MetricsFold()
    for event in fake_run(seed):
        fold(event)
    metrics = fold.metrics()

    data = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))

    assert Metrics.from_dict(data | {"of_a_later_version": 1}) == metrics


def test_mean_occupancy_does_not_depend_on_how_often_steps_are_told() -> None:
    step = {"kind": "decode", "rows": 1, "read_tokens": 0, "unique_read_tokens": 0}
    finely, together = MetricsFold(), MetricsFold()
    for held in (10, 20, 60):
        finely(Forwarded(**step, steps=1, kv=KV(held), peak=60, elapsed_s=0.0, held=held))
    together(Forwarded(**step, steps=3, kv=KV(60), peak=60, elapsed_s=0.0, held=90))
    older = MetricsFold()
    older(Forwarded(**step, steps=3, kv=KV(60), peak=60, elapsed_s=0.0))

    assert finely.metrics().mean_tokens == together.metrics().mean_tokens == 30
    assert older.metrics().mean_tokens == 60


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
