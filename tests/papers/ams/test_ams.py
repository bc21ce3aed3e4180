"""AMS and its control, strata: what leaves, what is credited, which settings are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import build
from support.offers import SEEDS, offer, room_for
from support.policies import POLICIES, of_papers
from support.trees import GREEDY, Lab

from arbor.errors import UsageError
from arbor.papers.ams.ams import AMS, Strata
from arbor.retention.base import Blocks, TokenAllocator
from arbor.retention.policy import Protect
from arbor.retention.scorers import HeavyHitters
from arbor.retention.selection import select

ALLOCATORS: tuple[TokenAllocator, ...] = (
    Strata(4),
    *of_papers("allocator", ("chunks", {"size": 3})),
    AMS(delta=0.2, shortest=2, longest=6),
    AMS(delta=0.2, shortest=2, longest=6, mass="paper", padded=3),
    AMS(delta=0.2, shortest=2, longest=6, cut="length", quotas="equal"),
)
SHARES = st.floats(0, 1)


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)
@given(seed=SEEDS, share=SHARES)
def test_just_what_has_to_leaves_and_nothing_protected(
    allocator: TokenAllocator, seed: int, share: float
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)

    gone = allocator.leaving(blocks, room, HeavyHitters())

    assert len(set(gone.tolist())) == len(gone) == int(blocks.resident.sum()) - room
    assert not blocks.tokens.protected[gone].any()
    counts = allocator.counts(blocks, room, HeavyHitters())
    assert (counts >= blocks.floor).all() and int(counts.sum()) == room


def flat(lately: list[float], credit: list[float] | None = None, protected: int = 0) -> Blocks:
    """One block whose tokens received this attention, the last `protected` of them protected."""
    blocks = next(each for each in map(offer, range(1000)) if len(each) == 1 and each.length[0] > 9)
    count = len(lately)
    each = np.arange(count)
    zero = np.zeros(count)
    tokens = dataclasses.replace(
        blocks.tokens,
        **{name: zero.astype(int) for name in ("block", "queries", "activated", "recurrence")},
        offset=each,
        position=each,
        mass=np.array(lately),
        latest=zero,
        lately=np.array(lately),
        credit=zero if credit is None else np.array(credit),
        key=each.astype(np.uint64),
        protected=each >= count - protected,
    )
    number, floor = np.array([count]), np.array([protected])
    return dataclasses.replace(blocks, length=number, resident=number, floor=floor, see=tokens.only)


def test_ams_gives_segments_with_more_attention_more_tokens() -> None:
    lately = [1.0] * 8 + [3.0] * 8
    gone = AMS(delta=0.25, shortest=1, longest=8, pool=1).leaving(flat(lately), 8, HeavyHitters())
    kept = np.setdiff1d(np.arange(16), gone)
    assert (kept < 8).sum() == 2 and (kept >= 8).sum() == 6


@given(seed=SEEDS, share=SHARES)
def test_what_ams_credits_leaves_as_without_credit_and_skips_protected_tokens(
    seed: int, share: float
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)
    allocator = AMS(delta=0.2, shortest=2, longest=6)

    gone, credit = allocator.credited(blocks, room, HeavyHitters())

    assert sorted(gone) == sorted(allocator.leaving(blocks, room, HeavyHitters()))
    guarded = blocks.tokens.protected
    assert (credit[guarded] == blocks.tokens.credit[guarded]).all()
    _, chosen = select(blocks, room, allocator, HeavyHitters())
    block, offset, kept = chosen.credited()
    stay = np.setdiff1d(np.arange(len(credit)), gone)
    assert block.tolist() == blocks.tokens.block[stay].tolist()
    assert offset.tolist() == blocks.tokens.offset[stay].tolist()
    assert kept.tolist() == credit[stay].tolist()


def test_the_engine_carries_credit_from_event_to_event() -> None:
    policy = dataclasses.replace(POLICIES["ams"], protect=Protect(sinks=2, recent=4))
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)

    credit = lab.state.statistics.view(block.row, np.arange(60)).credit
    assert (credit[:20] > 0).any()
    assert not credit[-4:].any()  # protected at every event


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AMS, {"delta": 0.0}),
        (AMS, {"shortest": 9, "longest": 8}),
        (AMS, {"pool": 4}),
        (AMS, {"decay": 1.0}),
        (AMS, {"blend": 1.1}),
        (AMS, {"least": -1}),
        (AMS, {"cut": "half"}),
        (AMS, {"quotas": "fair"}),
        (AMS, {"mass": "all"}),
        (AMS, {"padded": -1}),
        (Strata, {"size": 0}),
    ],
)
def test_settings_are_checked(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be"):
        kind(**settings)
