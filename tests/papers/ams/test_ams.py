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
from arbor.events import Allocated
from arbor.heads.selection import HeadScorer, HeadSelection, select_by_head
from arbor.heads.sets import HeadStatistics
from arbor.papers.ams.ams import AMS, Strata
from arbor.retention.base import Blocks, TokenAllocator, Tokens
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


def test_the_window_and_the_interval_are_those_of_the_paper_with_any_scorer() -> None:
    policy = POLICIES["ams"]
    assert policy.trigger.spare == 512
    for name in ("ams", "keydiff", "rkv", "tova"):
        joined = dataclasses.replace(policy, scorer=POLICIES[name].scorer)
        assert joined.observation.lately == 128, name
    assert POLICIES["snapkv"].observation.lately == 32
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off")
    lab.plant(40)
    assert lab.state.statistics.fading == 1 - 1 / 128


def test_a_budget_below_window_and_interval_is_halved_at_each_event() -> None:
    policy = dataclasses.replace(POLICIES["ams"], protect=Protect(sinks=2, recent=4))
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    lab.sprout([(tree.root, 1)], GREEDY, 60)

    rooms = [event.room for event in lab.events if isinstance(event, Allocated)]
    assert rooms and all(15 <= room <= 20 for room in rooms)
    assert len(rooms) <= 4  # about every 20 tokens, not at each


def test_each_head_keeps_most_where_its_own_mass_lies() -> None:
    of_heads = np.array([[1.0] * 8 + [3.0] * 8, [3.0] * 8 + [1.0] * 8])
    blocks = flat(of_heads.mean(0).tolist())

    def by_head(tokens: Tokens) -> Tokens:
        columns = {each.name: getattr(tokens, each.name) for each in dataclasses.fields(Tokens)}
        kv = columns.pop("kv")
        tiled = {name: np.tile(column, 2) for name, column in columns.items()}
        return Tokens(**tiled | {"lately": of_heads.ravel(), "mass": of_heads.ravel()}, kv=kv)

    allocator = AMS(delta=0.25, shortest=1, longest=8, pool=1)
    scorer = HeadScorer(HeavyHitters(), by_head)
    counts, chosen = select_by_head(blocks, 8, allocator, scorer)

    assert isinstance(chosen, HeadSelection) and counts.tolist() == [8]
    held = np.tile(np.arange(16), (2, 1))
    moved = chosen.moved
    held[moved.into, moved.target] = held[moved.cell, moved.source]
    kept = held[:, ~moved.leaving]
    assert (kept < 8).sum(1).tolist() == [2, 6]
    assert chosen.head_credit is not None
    assert (chosen.head_credit[0, :8] < chosen.head_credit[1, :8]).all()


def test_the_credit_of_each_head_moves_with_its_tokens() -> None:
    protect = Protect(sinks=2, recent=4)
    policy = dataclasses.replace(POLICIES["ams"], protect=protect, granularity="head")
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    credits: list[Any] = []
    remember = HeadStatistics.remember
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            HeadStatistics,
            "remember",
            lambda self, slots, credit: (
                credits.append((self.makers(slots.astype(np.int64))["credit"](None), credit)),
                remember(self, slots, credit),
            ),
        )
        lab.sprout([(tree.root, 1)], GREEDY, 60)

    assert len(credits) >= 2
    before, first = credits[0]
    assert not before.any() and (first[0] != first[1]).any()
    later = credits[1][0].reshape(first.shape)
    assert (later > 0).any() and (later[0] != later[1]).any()
    assert np.isin(later[later > 0].astype(np.float32), first.astype(np.float32)).all()


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
        (AMS, {"queries": 31}),
        (Strata, {"size": 0}),
    ],
)
def test_settings_are_checked(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be"):
        kind(**settings)
