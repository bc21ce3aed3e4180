"""ArborKV's allocators: what blocks keep by its ratio, and by its optimisation view."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS, blocks_of, choices, offer, room_for

from arbor.components import build
from arbor.errors import UsageError
from arbor.papers.arborkv.kkt import KKT
from arbor.papers.arborkv.ratio import Ratio
from arbor.retention.allocators.waterfill import waterfill
from arbor.retention.base import Ints
from arbor.retention.scorers import Recency

SHARES = st.floats(0, 1)
ANY = Recency()


# KKT


def utility(weight: np.ndarray, counts: tuple[int, ...] | Ints) -> float:
    """sum(w ln k), the objective of the paper's optimisation view."""
    return sum(
        w * (math.log(k) if k > 0 else -math.inf) if w > 0 else 0.0
        for w, k in zip(weight.tolist(), counts, strict=True)
    )


@given(seed=SEEDS, share=SHARES)
def test_kkt_is_the_best_of_all_ways_to_keep_whole_tokens(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    length = rng.integers(1, 8, size)
    blocks = blocks_of(
        size,
        length=length,
        floor=np.minimum(length, 1),
        score=rng.random(size) * 0.9 + 0.05,
        distance=rng.integers(0, 4, size),
    )
    room = room_for(blocks, share)
    weight = blocks.score**2 * np.exp(-0.5 * blocks.distance)

    counts = KKT().counts(blocks, room, ANY)

    best = max(utility(weight, each) for each in choices(blocks, room))
    parts = waterfill(np.log(weight), blocks.floor, blocks.resident, room)
    assert utility(weight, counts) == pytest.approx(best, abs=1e-9)
    assert best <= utility(weight, parts) + 1e-9
    assert (np.abs(counts - parts) < 2).all()


@given(seed=SEEDS, share=SHARES)
def test_kkt_is_what_the_papers_loop_arrives_at(seed: int, share: float) -> None:
    """Pressure with the marginal loss as its priority, and an end: take the cheapest token."""
    blocks = offer(seed, 1 + seed % 30, ties=False, longest=30)
    blocks = dataclasses.replace(blocks, floor=np.maximum(blocks.floor, 1))
    room = room_for(blocks, share)
    weight = blocks.score**2 * np.exp(-0.5 * blocks.distance)
    loop = blocks.resident.copy()
    while loop.sum() > room:
        worth = [
            w * math.log(k / (k - 1)) if k > low else math.inf
            for w, k, low in zip(weight, loop.tolist(), blocks.floor.tolist(), strict=True)
        ]
        loop[np.argmin(worth)] -= 1

    counts = KKT().counts(blocks, room, ANY)

    assert counts.tolist() == loop.tolist()


# TAE


@given(seed=SEEDS, share=SHARES)
def test_a_block_on_a_running_path_keeps_at_least_what_it_would_keep_off_it(
    seed: int, share: float
) -> None:
    blocks = offer(seed, ties=False)
    off = dataclasses.replace(blocks, active=np.zeros(len(blocks), np.bool_))
    room = room_for(blocks, share)
    for index in range(len(blocks)):
        active = off.active.copy()
        active[index] = True
        on = dataclasses.replace(off, active=active)

        more = Ratio().counts(on, room, ANY)[index] - Ratio().counts(off, room, ANY)[index]

        assert more >= 0


@given(seed=SEEDS, share=SHARES)
def test_without_sibling_coordination_it_does_not_matter_who_is_active(
    seed: int, share: float
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)
    rule = Ratio(eta=1.0)

    counts = rule.counts(blocks, room, ANY)

    turned = dataclasses.replace(blocks, active=~blocks.active)
    assert (rule.counts(turned, room, ANY) == counts).all()


def test_ratio_is_equation_2_with_alpha_solved() -> None:
    """r = alpha eta^[off] s^gamma e^(-0.5 distance): eta 2 : 1, score 4 : 1, two edges e : 1."""
    blocks = blocks_of(
        4,
        length=[1000, 1000, 500, 1000],
        score=[0.8, 0.8, 0.8, 0.4],
        distance=[0, 2, 0, 0],
        active=[True, True, False, False],
    )

    counts = Ratio().counts(blocks, 1000, ANY)

    ratio = counts / blocks.length
    assert ratio[0] / ratio[1] == pytest.approx(math.e, rel=0.02)
    assert ratio[0] / ratio[2] == pytest.approx(2, rel=0.02)
    assert ratio[2] / ratio[3] == pytest.approx(4, rel=0.02)
    assert counts.sum() == 1000


# Settings


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("arborkv", "eta", 0.0),
        ("arborkv", "eta", 1.5),
        ("arborkv", "gamma", 0.0),
        ("arborkv", "gamma", float("inf")),
        ("arborkv", "lambda_distance", -0.1),
        ("arborkv", "lambda_depth", float("nan")),
        ("arborkv", "ratio_min", 1.5),
        ("kkt", "gamma", -1.0),
        ("arborkv", "ratio_min", -0.1),
        ("arborkv", "lambda_depth", float("inf")),
        ("arborkv", "gamma", 1e308),
        ("kkt", "lambda_distance", 1e308),
        ("arborkv", "lambda_distance", float("inf")),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{setting}={value}")):
        build("policy", name, **{setting: value})
