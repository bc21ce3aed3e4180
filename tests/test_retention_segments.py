"""Allocators that divide the sequence: strata, chunks and AMS."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.models import build
from support.offers import SEEDS, offer, room_for
from support.policies import POLICIES
from support.trees import GREEDY, PROMPT, Lab

from arbor.errors import UsageError
from arbor.papers.ams.ams import AMS, pooled, segments
from arbor.papers.ams.strata import Strata
from arbor.papers.related.chunks import Chunks
from arbor.retention.allocators.segments import TokenSequence, quotas_of
from arbor.retention.base import Blocks, TokenAllocator
from arbor.retention.policy import Protect
from arbor.retention.scorers.heavy_hitters import HeavyHitters
from arbor.retention.scorers.window import Window
from arbor.retention.selection import select
from arbor.tree import ThoughtTree

ALLOCATORS: tuple[TokenAllocator, ...] = (
    Strata(4),
    Chunks(3),
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


@given(
    weight=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 30), min_size=20, max_size=20),
    least=st.integers(0, 5),
    share=SHARES,
)
def test_quotas_hold_the_minimum_the_caps_and_the_sum(
    weight: list[float], sizes: list[int], least: int, share: float
) -> None:
    size = np.array(sizes[: len(weight)])
    room = round(share * int(size.sum()))

    quotas = quotas_of(np.array(weight), size, least, room)

    assert (quotas >= 0).all() and (quotas <= size).all() and int(quotas.sum()) == room
    if least * len(size) <= room:
        assert (quotas >= np.minimum(least, size)).all()


def test_more_segments_than_room_end_with_one_token_for_the_heaviest() -> None:
    quotas = quotas_of(np.array([0.1, 0.5, 0.2, 0.4]), np.array([9, 9, 9, 9]), 8, 2)
    assert quotas.tolist() == [0, 1, 0, 1]


def test_quotas_go_by_weight_and_by_largest_remainder() -> None:
    assert quotas_of(np.array([0.5, 0.3, 0.2]), np.array([90, 90, 90]), 0, 11).tolist() == [6, 3, 2]
    # what a full segment cannot take goes to the others in proportion
    assert quotas_of(np.array([0.6, 0.3, 0.1]), np.array([2, 90, 90]), 0, 10).tolist() == [2, 6, 2]


@given(
    mass=st.lists(st.floats(0.001, 1), min_size=1, max_size=120),
    delta=st.floats(0.01, 1),
    shortest=st.integers(1, 20),
    more=st.integers(0, 40),
)
def test_segments_keep_their_lengths(
    mass: list[float], delta: float, shortest: int, more: int
) -> None:
    longest = 2 * shortest + more
    weights = np.array(mass) / sum(mass)

    size = segments(weights, delta, shortest, longest)

    assert int(size.sum()) == len(mass)
    assert int(size.max()) <= longest
    assert len(size) == 1 or int(size.min()) >= shortest


@example(10)
@given(count=st.integers(1, 60))
def test_equal_attention_gives_equal_segments(count: int) -> None:
    size = segments(np.full(10 * count, 1 / (10 * count)), 0.1, 1, 10 * count)
    assert size.tolist() == [count] * 10


def test_a_short_segment_joins_the_smaller_neighbour_or_shares_with_it() -> None:
    # masses: the cuts give 3, 1, 2 tokens
    mass = np.array([0.1, 0.1, 0.1, 0.35, 0.2, 0.15])
    assert segments(mass, 0.33, 1, 9).tolist() == [3, 1, 2]
    assert segments(mass, 0.33, 2, 9).tolist() == [3, 3]
    assert segments(np.full(9, 1 / 9), 0.9, 4, 8).tolist() == [5, 4]


def test_neighbours_are_pooled_and_fewer_at_the_ends() -> None:
    assert pooled(np.array([3.0, 0, 0, 9]), 3).tolist() == [1.5, 1, 3, 4.5]


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


def test_the_ablations_of_ams_cut_by_length_and_give_equal_quotas() -> None:
    settings: dict[str, Any] = {"delta": 0.25, "shortest": 1, "pool": 1, "least": 0}
    sequence = TokenSequence(flat([1.0] * 8 + [3.0] * 8), 8, HeavyHitters())

    segment, quotas = AMS(cut="length", **settings).divide(sequence)
    assert np.bincount(segment).tolist() == [4, 4, 4, 4] and quotas.tolist() == [1, 1, 3, 3]
    segment, quotas = AMS(quotas="equal", **settings).divide(sequence)
    # by mass: of the first eight tokens one segment
    assert np.bincount(segment).tolist() == [8, 3, 2, 3] and quotas.tolist() == [2, 2, 2, 2]


def test_the_mass_of_ams_as_published_counts_protected_tokens_and_pads_the_window() -> None:
    settings: dict[str, Any] = {"delta": 0.25, "shortest": 1, "pool": 1, "least": 0}
    blocks = flat([4.0] + [1.0] * 11 + [0.0] * 4, protected=4)
    sequence = TokenSequence(blocks, 10, HeavyHitters())

    segment, quotas = AMS(mass="paper", padded=4, **settings).divide(sequence)
    # the window has 16 of 31, so that what may leave is cut in two and gets 8 and 7
    assert np.bincount(segment).tolist() == [5, 7] and quotas.tolist() == [3, 3]
    segment, quotas = AMS(mass="paper", padded=0, **settings).divide(sequence)
    assert len(quotas) == 4
    segment, quotas = AMS(**settings).divide(sequence)
    assert len(quotas) == 4


def test_the_credit_of_ams_begins_with_the_first_mass_and_follows_it() -> None:
    allocator = AMS(decay=0.75, pool=1)
    _, first = allocator.credited(flat([1.0, 3.0]), 1, HeavyHitters())
    assert first == pytest.approx([0.25, 0.75])

    _, then = allocator.credited(flat([3.0, 1.0], first.tolist()), 1, HeavyHitters())
    assert then == pytest.approx([0.375, 0.625])


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


def test_an_allocator_without_credit_credits_nothing() -> None:
    blocks = flat([1.0, 2.0, 3.0])
    _, chosen = select(blocks, 2, Strata(4), HeavyHitters())
    assert [len(column) for column in chosen.credited()] == [0, 0, 0]


def test_credit_weighs_in_where_the_blend_says_so() -> None:
    blocks = flat([1.0] * 8, [0.9 / 4] * 4 + [0.1 / 4] * 4)
    settings: dict[str, Any] = {"delta": 0.25, "shortest": 1, "least": 0, "pool": 1, "decay": 0.99}
    alike = AMS(blend=1.0, **settings).leaving(blocks, 4, HeavyHitters())
    credited = AMS(blend=0.0, **settings).leaving(blocks, 4, HeavyHitters())
    assert sorted(alike) == [0, 2, 4, 6]
    assert sorted(credited) == [3, 4, 5, 6]  # segments of 1, 1, 1 and 5 tokens keep one each


def test_strata_keep_as_many_of_each_stretch() -> None:
    gone = Strata(4).leaving(flat([9.0] * 4 + [1.0, 2, 3, 4] + [0.0] * 4), 6, HeavyHitters())
    assert sorted(set(range(12)) - set(gone.tolist())) == [2, 3, 6, 7, 10, 11]


def test_chunks_leave_whole_but_one() -> None:
    gone = Chunks(4).leaving(flat([9.0] * 4 + [1.0, 2, 3, 4] + [0.0] * 4), 6, HeavyHitters())
    assert sorted(set(range(12)) - set(gone.tolist())) == [0, 1, 2, 3, 6, 7]


def test_the_engine_carries_credit_from_event_to_event() -> None:
    policy = dataclasses.replace(POLICIES["ams"], protect=Protect(sinks=2, recent=4))
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)

    credit = lab.state.statistics.view(block.row, np.arange(60)).credit
    assert (credit[:20] > 0).any()
    assert not credit[-4:].any()  # protected at every event


def test_choosing_what_comes_back_is_not_an_event_of_the_credit() -> None:
    policy = dataclasses.replace(POLICIES["ams"], protect=Protect(sinks=2, recent=4))
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)
    before = lab.state.statistics.view(block.row, np.arange(60)).credit.copy()

    lab.residency.choose(block.path, [block], 20)

    after = lab.state.statistics.view(block.row, np.arange(60)).credit
    assert (after == before).all()


@pytest.mark.parametrize("among", ["together", "fair"])
def test_credit_is_remembered_of_every_search(among: Any) -> None:
    protect = Protect(sinks=2, recent=4)
    policy = dataclasses.replace(POLICIES["ams"], protect=protect, among=among)
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    first, second = ThoughtTree(PROMPT), ThoughtTree(PROMPT[::-1])
    lab.open(first, 40, pool=80)
    lab.open(second, 40, alone=False)
    for tree in (first, second):
        lab.extend(tree.root)
    (one,) = lab.sprout([(first.root, 1)], GREEDY, 40)
    (other,) = lab.sprout([(second.root, 1)], GREEDY, 40)

    for block in (one, other):
        credit = lab.state.statistics.view(block.row, np.arange(40)).credit
        assert (credit[block.span.resident] > 0).any()


def test_tokens_of_one_position_are_neighbours() -> None:
    blocks = offer(7)
    sequence = TokenSequence(blocks, int(blocks.resident.sum()), Window())
    assert (np.diff(sequence.positions) >= 0).all()
    assert len(sequence) == len(set(sequence.at.tolist()))
    assert sequence.room == len(sequence)


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
        (Chunks, {"size": 0}),
    ],
)
def test_settings_are_checked(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be"):
        kind(**settings)
