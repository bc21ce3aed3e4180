"""ThinKV: sparsity, steps and K-means, each against a plain loop, and in the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import build
from support.offers import SEEDS, offer, room_for
from support.policies import POLICIES
from support.trees import GREEDY, Lab

from arbor import Solver
from arbor.components import build as component
from arbor.errors import UsageError
from arbor.model.runner import ModelRunner
from arbor.papers.related.keydiff import KeyDiff
from arbor.papers.related.rkv import RKV
from arbor.papers.related.thinkv import (
    Segments,
    ThinKV,
    clustered,
    credit_of,
    query_sparsity,
    remembered,
    representatives,
    row_sparsity,
    token_sparsity,
)
from arbor.papers.related.window_attention import WindowAttention
from arbor.retention.base import NEVER, Blocks, Floats, Tokens
from arbor.retention.observation import Observation
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers.recency import Recency
from arbor.retention.token_kv import KVSequence
from arbor.retention.trigger import Trigger
from arbor.testing import random_kv
from arbor.tree import Node

SHARES = st.floats(0, 1)
FEW = settings(max_examples=25)
DENSE, MIDDLE, SPARSE = 0.3, 0.6, 0.9  # execution, reasoning, transition
VALLEYS = (0.5, 0.8)
TYPED = ThinKV(valleys=VALLEYS, choose="score")

# K-means


def distance(a: Floats, b: Floats) -> float:
    return float(((a - b) ** 2).sum())


def plain_kmeans(points: Floats, count: int) -> list[int]:
    """The same by vectors, one at a time."""
    size = len(points)
    if count in (0, size):
        return list(range(count))

    equal = 1e-5 * sum(distance(point, points.mean(0)) for point in points) / size

    def last_of(values: Sequence[float], wanted: float) -> int:
        return max(at for at, value in enumerate(values) if abs(value - wanted) <= equal)

    def add_farthest(chosen: list[int]) -> None:
        near = [min(distance(points[at], points[each]) for each in chosen) for at in range(size)]
        near = [-math.inf if at in chosen else value for at, value in enumerate(near)]
        chosen.append(last_of(near, max(near)))

    to_mean = [distance(point, points.mean(0)) for point in points]
    chosen = [last_of(to_mean, min(to_mean))]
    while len(chosen) < count:
        add_farthest(chosen)
    centres = [points[at] for at in chosen]
    groups: list[list[int]] = []
    for _ in range(20):
        owner = []
        for point in points:
            away = [distance(point, centre) for centre in centres]
            owner.append(next(each for each in range(len(away)) if away[each] <= min(away) + equal))
        after = [[at for at in range(size) if owner[at] == each] for each in range(len(centres))]
        after = [group for group in after if group]
        if after == groups:
            break
        groups = after
        centres = [points[group].mean(0) for group in groups]
    found = []
    for group, centre in zip(groups, centres, strict=True):
        away = [distance(points[at], centre) for at in group]
        found.append(group[last_of(away, min(away))])
    while len(found) < count:
        add_farthest(found)
    return sorted(found)


@FEW
@given(seed=SEEDS, size=st.integers(1, 14), share=SHARES)
def test_representatives_are_those_of_k_means_with_vectors(
    seed: int, size: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(size, 3)) if seed % 2 else rng.integers(0, 3, (size, 2)) * 1.0
    points -= points.mean(0)
    count = round(share * size)

    found = representatives(points @ points.T, count)

    assert found.tolist() == plain_kmeans(points, count)
    assert len(set(found.tolist())) == count


def test_each_cluster_is_represented_by_its_point_nearest_to_the_centre() -> None:
    points = np.array([[0.0, 0], [0, 1], [0, 3], [9, 0], [9, 1], [9, 5]])
    assert representatives(points @ points.T, 2).tolist() == [1, 4]
    assert representatives(points @ points.T, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert representatives(points @ points.T, 0).tolist() == []


def test_of_equal_points_the_later_ones_stand_for_all() -> None:
    assert representatives(np.zeros((5, 5)), 2).tolist() == [3, 4]
    points = np.array([[0.0], [5], [0], [5], [0]])
    assert representatives(points @ points.T, 2).tolist() == [3, 4]


def test_tokens_that_are_not_on_the_device_stand_for_others_last() -> None:
    kv = random_kv(1, 6)
    assert kv.place is not None
    some = dataclasses.replace(kv, place=np.where(np.arange(6) < 2, -1, kv.place))
    members = [np.arange(6)]

    (with_keys,) = clustered(some, members, [3])
    (more,) = clustered(some, members, [5])

    assert set(with_keys) <= {2, 3, 4, 5} and len(with_keys) == 3
    assert sorted(more) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(3))
def test_keys_of_all_observed_layers_and_heads_are_one_point(seed: int) -> None:
    kv = random_kv(seed, 12)
    (only,) = kv.sequences
    assert kv.place is not None
    points = np.concatenate(
        [only.keys(layer).flatten(1).double().numpy()[kv.place] for layer in only.layers], axis=1
    )
    first, second = np.array([0, 2, 4, 6, 8, 10]), np.array([1, 3, 5, 7, 9])

    stays = clustered(kv, [first, second], [2, 3])

    assert stays[0].tolist() == first[plain_kmeans(points[first], 2)].tolist()
    assert stays[1].tolist() == second[plain_kmeans(points[second], 3)].tolist()


# Sparsity


def plain_sparsity(logits: np.ndarray, heads: int) -> list[float]:
    """Of rows [w, H_q, n], number by number."""
    result = []
    for row in logits:
        groups = np.split(row, heads)
        seen = [at for at in range(row.shape[1]) if np.isfinite(row[0, at])]
        attention = np.zeros(row.shape[1])
        for group in groups:
            largest = [max(float(each[at]) for each in group) for at in seen]
            weight = np.exp(np.array(largest) - max(largest))
            attention[seen] += weight / weight.sum() / heads
        faint = [at for at in seen if attention[at] < 0.01 * max(attention)]
        result.append(len(faint) / len(seen))
    return result


@pytest.mark.parametrize("seed", range(4))
def test_sparsity_is_the_part_of_the_tokens_below_a_hundredth_of_the_largest(seed: int) -> None:
    (only,) = random_kv(seed, 30).sequences
    sharp = dataclasses.replace(
        only, whole=lambda layer: [4 * piece for piece in only.whole(layer)]
    )
    wanted = []
    for layer in sharp.layers:
        logits = torch.cat(list(sharp.whole(layer))[::-1]).double().numpy()
        wanted.append(plain_sparsity(logits, sharp.keys(layer).shape[1]))

    found = query_sparsity(sharp)

    assert found.tolist() == pytest.approx(np.mean(wanted, axis=0).tolist())
    assert (found > 0).any() and (found < 1).all()


def test_sparsity_by_hand() -> None:
    # largest logits of each pair of heads: a token at 1/200 of the largest is faint, 1/50 is not
    low, mid = -math.log(200), -math.log(50)
    even = torch.tensor([[[0.0, low, mid, 0.0], [low, low, low, low]]])
    assert row_sparsity(even, 1).tolist() == [0.25]
    unseen = torch.tensor([[[0.0, low, -math.inf, -math.inf]]])
    assert row_sparsity(unseen, 1).tolist() == [0.5]
    # where the two KV heads disagree, their mean counts
    apart = torch.tensor([[[0.0, low], [low, 0.0]]])
    assert row_sparsity(apart, 2).tolist() == [0.0]
    assert row_sparsity(apart[:, :1], 1).tolist() == [0.5]


def test_a_token_has_the_sparsity_of_its_own_query() -> None:
    kv = random_kv(2, 10)
    (only,) = kv.sequences
    each = query_sparsity(only)

    found = token_sparsity(kv)

    assert kv.place is not None
    for token, place in enumerate(kv.place.tolist()):
        at = np.flatnonzero(only.wrote == place)
        assert (np.isnan(found[token]) and not len(at)) or found[token] == each[at[0]]
    away = dataclasses.replace(kv, place=np.full(10, -1))
    assert np.isnan(token_sparsity(away)).all()
    nobody = dataclasses.replace(only, wrote=np.full(len(only.wrote), -1))
    assert np.isnan(token_sparsity(dataclasses.replace(kv, sequences=(nobody,)))).all()


# Steps


def chain(
    lengths: Sequence[int],
    sparsity: Sequence[float] = (),
    *,
    steps: Sequence[int] = (),
    keep: Sequence[Sequence[int]] = (),
    protected: Sequence[Sequence[int]] = (),
    **columns: Any,
) -> Blocks:
    """Blocks one after the other, the first of them the prompt.

    Args:
        lengths: tokens of each.
        sparsity: remembered of each; nan: of none.
        steps: remembered of each.
        keep: offsets on the device; all.
        protected: offsets protected; none.
        columns: of `Blocks`, instead of what a chain has.
    """
    count = len(lengths)
    held_ = [np.asarray(each) for each in keep] or [np.arange(n) for n in lengths]
    guarded = list(protected) or [()] * count
    resident = np.array([len(each) for each in held_])
    block, offset = np.repeat(np.arange(count), resident), np.concatenate(held_)
    start = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    depth = np.asarray(columns.get("depth", np.arange(count)))
    if "depth" in columns:  # branches begin where those of lesser depth end
        start = np.array([sum(lengths[list(depth).index(d)] for d in range(own)) for own in depth])
    known = np.full(count, np.nan) if not len(sparsity) else np.asarray(sparsity, float)
    taken = np.zeros(count, np.int64) if not len(steps) else np.asarray(steps)
    zero = np.zeros(len(block))
    whole = zero.astype(np.int64)
    tokens = Tokens(
        block=block,
        offset=offset,
        position=start[block] + offset,
        mass=zero,
        latest=zero,
        queries=whole,
        activated=whole,
        recurrence=whole,
        lately=zero,
        credit=credit_of(taken, known)[block],
        key=np.arange(len(block)).astype(np.uint64),
        protected=np.array([o in guarded[b] for b, o in zip(block, offset, strict=True)], np.bool_),
        kv=random_kv(1, len(block)),
    )
    plain: dict[str, Any] = {
        "ids": np.arange(count),
        "length": np.array(lengths),
        "resident": resident,
        "floor": np.bincount(block[tokens.protected], minlength=count),
        "depth": depth,
        "distance": depth[::-1].copy(),
        "active": np.ones(count, np.bool_),
        "last_used": depth,
        "scheduled": np.full(count, NEVER),
        "turn": np.zeros(count, np.int64),
        "next_use": np.full(count, NEVER),
    }
    for name in ("value", "confidence", "attention", "score", "reentry"):
        plain[name] = np.zeros(count)
    given_ = {name: np.asarray(column) for name, column in columns.items()}
    return Blocks(**{**plain, **given_}, see=tokens.only)


def kept(allocator: ThinKV, blocks: Blocks, room: int) -> list[int]:
    return allocator.counts(blocks, room, Recency()).tolist()


def after(allocator: ThinKV, blocks: Blocks, room: int) -> tuple[list[int], list[int]]:
    """How many tokens each block keeps, and the steps remembered of it."""
    gone, credit = allocator.credited(blocks, room, Recency())
    steps, _ = remembered(credit)
    stays = np.setdiff1d(np.arange(len(credit)), gone)
    block = blocks.tokens.block[stays]
    largest = [int(steps[stays][block == b].max(initial=0)) for b in range(len(blocks))]
    return np.bincount(block, minlength=len(blocks)).tolist(), largest


def test_the_default_schedule_is_the_published_one() -> None:
    allocator = ThinKV()
    assert allocator.limits(np.array([128])).tolist() == [[128, 64, 32, 16, 8, 4]]
    assert allocator.limits(np.array([20])).tolist() == [[20, 10, 5, 4, 4, 4]]
    assert allocator.limits(np.array([3])).tolist() == [[3, 3, 3, 3, 3, 3]]
    thirds = ThinKV(schedule=(0.3, 0.1), least=0)
    assert thirds.limits(np.array([30, 31])).tolist() == [[30, 9, 3], [31, 10, 4]]


def test_without_types_the_oldest_thought_steps_down_to_the_least_first() -> None:
    blocks = chain([10, 32, 32, 32])
    plain = ThinKV(choose="score")
    assert kept(plain, blocks, 106) == [10, 32, 32, 32]
    assert kept(plain, blocks, 90) == [10, 16, 32, 32]
    assert kept(plain, blocks, 78) == [10, 4, 32, 32]
    assert kept(plain, blocks, 62) == [10, 4, 16, 32]
    assert kept(plain, blocks, 22) == [10, 4, 4, 4]


def test_the_least_important_type_steps_first_and_of_it_the_oldest() -> None:
    # reasoning, execution, reasoning, execution; no transition
    blocks = chain([10, 32, 32, 32, 32], [DENSE, MIDDLE, DENSE, MIDDLE, DENSE])
    assert kept(TYPED, blocks, 122) == [10, 32, 16, 32, 32]
    assert kept(TYPED, blocks, 98) == [10, 32, 4, 32, 20]
    assert kept(TYPED, blocks, 74) == [10, 24, 4, 32, 4]


def test_a_transition_that_closed_halves_every_earlier_segment() -> None:
    blocks = chain([10, 128, 128, 128, 128], [MIDDLE, MIDDLE, MIDDLE, SPARSE, MIDDLE])
    # 64 of each earlier one; nothing after it, and not the transition itself
    assert kept(TYPED, blocks, 10 + 64 + 64 + 128 + 128) == [10, 64, 64, 128, 128]
    # a second one: 32, and 64 for what lies between
    both = chain([10, 128, 128, 128, 128], [MIDDLE, MIDDLE, SPARSE, MIDDLE, SPARSE])
    assert kept(TYPED, both, 10 + 32 + 64 + 64 + 128) == [10, 32, 64, 64, 128]


def test_what_transitions_entitle_to_leaves_in_the_order_of_importance_and_as_needed() -> None:
    blocks = chain([10, 128, 128, 128], [MIDDLE, MIDDLE, DENSE, SPARSE])
    assert kept(TYPED, blocks, 384) == [10, 128, 118, 128]
    assert kept(TYPED, blocks, 320) == [10, 118, 64, 128]


def test_steps_asked_by_room_and_by_transitions_add_up() -> None:
    quiet = chain([10, 128, 128], [MIDDLE, MIDDLE, MIDDLE])
    assert after(TYPED, quiet, 202) == ([10, 64, 128], [0, 1, 0])
    # half a step counts: it is taken to its end first
    assert after(TYPED, quiet, 170) == ([10, 32, 128], [0, 2, 0])
    assert after(TYPED, quiet, 190) == ([10, 52, 128], [0, 2, 0])
    turned = chain(
        [10, 128, 128],
        [MIDDLE, MIDDLE, SPARSE],
        steps=[0, 1, 0],
        keep=[range(10), range(64), range(128)],
    )
    # the transition leaves first of all types, but not before what it lets go
    assert after(TYPED, turned, 170) == ([10, 32, 128], [0, 1, 0])
    assert after(TYPED, turned, 106) == ([10, 32, 64], [0, 1, 1])


def test_in_a_tree_transitions_of_one_depth_count_once() -> None:
    # the prompt, its child, and two branches of two blocks each
    types = [MIDDLE, MIDDLE, SPARSE, SPARSE, MIDDLE, MIDDLE]
    blocks = chain([10, 128, 128, 128, 128, 128], types, depth=[0, 1, 2, 2, 3, 3])
    total = 10 + 5 * 128
    assert kept(TYPED, blocks, total - 64) == [10, 64, 128, 128, 128, 128]
    assert kept(TYPED, blocks, total - 100) == [10, 64, 92, 128, 128, 128]
    # a sparse segment one level below is another one; then transitions step on
    types[4] = SPARSE
    deeper = chain([10, 128, 128, 128, 128, 128], types, depth=[0, 1, 2, 2, 3, 3])
    assert kept(TYPED, deeper, total - 96 - 128) == [10, 32, 64, 64, 128, 128]


def test_trees_do_not_step_each_other_down() -> None:
    blocks = chain(
        [8, 128, 128, 8, 128, 128],
        [MIDDLE, MIDDLE, SPARSE, MIDDLE, MIDDLE, MIDDLE],
        depth=[0, 1, 2, 0, 1, 2],
        turn=[0, 0, 0, 1, 1, 1],
    )
    assert kept(TYPED, blocks, 8 + 64 + 128 + 8 + 128 + 128) == [8, 64, 128, 8, 128, 128]
    assert kept(TYPED, blocks, 8 + 64 + 88 + 8 + 128 + 128) == [8, 64, 88, 8, 128, 128]


def test_what_is_being_written_steps_after_all_others_and_the_prompt_last() -> None:
    blocks = chain([40, 32, 32], [SPARSE, MIDDLE, SPARSE], scheduled=[NEVER, NEVER, 0])
    # the open one does not count as a transition yet, and the prompt is of no type
    assert kept(TYPED, blocks, 88) == [40, 16, 32]
    assert kept(TYPED, blocks, 60) == [40, 4, 16]
    assert kept(TYPED, blocks, 30) == [22, 4, 4]
    assert after(TYPED, blocks, 60)[1] == [0, 3, 0]  # what grows remembers no steps


def test_below_the_least_all_keep_half_as_many_then_a_quarter() -> None:
    blocks = chain([10, 32, 32], [MIDDLE, MIDDLE, DENSE])
    assert kept(TYPED, blocks, 12) == [4, 4, 4]
    assert kept(TYPED, blocks, 9) == [4, 3, 2]
    assert kept(TYPED, blocks, 6) == [2, 2, 2]
    assert kept(TYPED, blocks, 3) == [1, 1, 1]
    assert kept(TYPED, blocks, 2) == [1, 1, 0]
    assert kept(TYPED, blocks, 0) == [0, 0, 0]


def test_protected_tokens_stay_and_count_among_those_kept() -> None:
    blocks = chain([10, 32, 32], protected=[(), (0, 1, 2, 3, 4, 5), (30, 31)])
    plain = ThinKV(choose="score")
    assert kept(plain, blocks, 20) == [10, 6, 4]
    gone = plain.leaving(blocks, 20, Recency())
    assert not blocks.tokens.protected[gone].any()
    assert kept(plain, blocks, 8) == [0, 6, 2]


def test_long_thoughts_are_cut_into_segments() -> None:
    blocks = chain([10, 70])
    cut = ThinKV(segment=32, choose="score")
    segments = Segments(blocks, 32)
    assert segments.held.tolist() == [10, 32, 32, 6]
    assert segments.length.tolist() == [10, 32, 32, 6]
    assert segments.start.tolist() == [0, 10, 42, 74]
    gone = cut.leaving(blocks, 80 - 28 - 10, Recency())
    # the first 32 keep 4, the next lose 10: the earliest ones
    assert sorted(blocks.tokens.position[gone].tolist()) == [*range(10, 38), *range(42, 52)]
    # the last piece of a block that is still written is open, a full one has closed
    writing = Segments(dataclasses.replace(blocks, scheduled=np.array([NEVER, 0])), 32)
    assert writing.open.tolist() == [False, False, False, True]
    full = Segments(dataclasses.replace(blocks, scheduled=np.array([NEVER, 0])), 35)
    assert full.open.tolist() == [False, False, False]


def plain_steps(allocator: ThinKV, blocks: Blocks, room: int) -> list[int]:
    """How many tokens each block keeps, one token and one step at a time."""
    tokens = blocks.tokens
    size = allocator.segment
    at = list(zip(tokens.block.tolist(), (tokens.offset // size).tolist(), strict=True))
    names = sorted(set(at))
    steps, sparsity = remembered(tokens.credit)
    least_of, length, rank, taken, count = {}, {}, {}, {}, {}
    for name in names:
        block, number = name
        mine = [i for i in range(len(at)) if at[i] == name]
        count[name] = len(mine)
        length[name] = min(size, int(blocks.length[block]) - number * size)
        known = [float(sparsity[i]) for i in mine if not math.isnan(sparsity[i])]
        mean = sum(known) / len(known) if known else math.nan
        kind = 2
        if known and mean < VALLEYS[0]:
            kind = 1
        if known and mean >= VALLEYS[1]:
            kind = 0
        if blocks.scheduled[block] == 0 and length[name] < size:
            kind = 3
        if blocks.depth[block] == 0:
            kind = 4
        start = min(int(tokens.position[i]) for i in mine)
        rank[name] = (kind, start, int(blocks.depth[block]), number, block)
        taken[name] = max(int(steps[i]) for i in mine)
    for name in names:
        block, number = name
        if rank[name][0] < 3:
            turns = {
                (int(blocks.depth[b]), n)
                for b, n in names
                if rank[b, n][0] == 0
                and blocks.turn[b] == blocks.turn[block]
                and (blocks.depth[b], n) > (blocks.depth[block], number)
            }
            taken[name] += len(turns)
    # protected tokens, and more up to the block's floor: the latest, by the scorer
    least_of = dict.fromkeys(names, 0)
    for block in range(len(blocks)):
        mine = [i for i in range(len(at)) if tokens.block[i] == block]
        mine.sort(key=lambda i: (not tokens.protected[i], -int(tokens.position[i])))
        for i in mine[: int(blocks.floor[block])]:
            least_of[at[i]] += 1

    def limit(name: tuple[int, int], step: int) -> int:
        if step == 0:
            return length[name]
        part = allocator.schedule[min(step, len(allocator.schedule)) - 1]
        return max(math.ceil(length[name] * part - 1e-9), min(allocator.least, length[name]))

    def lower(name: tuple[int, int], to: int) -> None:
        while count[name] > max(to, least_of[name]) and sum(count.values()) > room:
            count[name] -= 1

    preferred = sorted(names, key=lambda name: rank[name])
    for name in preferred:
        lower(name, limit(name, taken[name]))
    for name in preferred:
        for step in range(taken[name], len(allocator.schedule) + 1):
            lower(name, limit(name, step))
    part = allocator.least
    while sum(count.values()) > room:
        part //= 2
        for name in preferred:
            lower(name, min(part, limit(name, len(allocator.schedule))))
    return [sum(count[name] for name in names if name[0] == b) for b in range(len(blocks))]


def typed(seed: int) -> Blocks:
    """A random offer whose tokens have sparsities and steps."""
    blocks = offer(seed, longest=30)
    rng = np.random.default_rng(seed)
    known = np.where(
        rng.random(len(blocks)) < 0.8, rng.integers(0, 1025, len(blocks)) / 1024, np.nan
    )
    steps = rng.integers(0, 4, len(blocks))
    credit = credit_of(steps, known)[blocks.tokens.block]
    # some tokens are new
    credit[rng.random(len(credit)) < 0.2] = 0
    tokens = dataclasses.replace(blocks.tokens, credit=credit)
    return dataclasses.replace(blocks, see=tokens.only)


@given(seed=SEEDS, share=SHARES, segment=st.integers(1, 20), least=st.integers(0, 5))
def test_counts_are_those_of_a_plain_loop(
    seed: int, share: float, segment: int, least: int
) -> None:
    blocks = typed(seed)
    room = room_for(blocks, share)
    blind = random_kv(seed, 1).sequences[0]
    nobody = dataclasses.replace(blind, wrote=np.full(len(blind.wrote), -1))
    tokens = blocks.tokens
    hidden = dataclasses.replace(
        tokens,
        kv=dataclasses.replace(
            tokens.kv, sequences=(nobody,), place=np.full(len(tokens.block), -1)
        ),
    )
    blocks = dataclasses.replace(blocks, see=hidden.only)
    allocator = dataclasses.replace(TYPED, segment=segment, least=least, schedule=(0.6, 0.3, 0.1))

    assert kept(allocator, blocks, room) == plain_steps(allocator, blocks, room)


@FEW
@given(seed=SEEDS, share=SHARES, choose=st.sampled_from(["cluster", "score"]))
def test_just_what_has_to_leaves_and_nothing_protected(
    seed: int, share: float, choose: Any
) -> None:
    blocks = typed(seed)
    room = room_for(blocks, share)
    allocator = ThinKV(segment=7, valleys=VALLEYS, choose=choose)

    gone = allocator.leaving(blocks, room, Recency())

    assert len(set(gone.tolist())) == len(gone) == int(blocks.resident.sum()) - room
    assert not blocks.tokens.protected[gone].any()
    counts = allocator.counts(blocks, room, Recency())
    assert (counts >= blocks.floor).all()


@given(seed=SEEDS, share=SHARES, least=st.integers(1, 6))
def test_every_segment_keeps_the_least_where_that_is_possible(
    seed: int, share: float, least: int
) -> None:
    blocks = typed(seed)
    allocator = dataclasses.replace(TYPED, segment=6, least=least)
    segments = Segments(blocks, 6)
    room = room_for(blocks, share)
    # what all segments keep together at their last step
    fixed = np.bincount(segments.of[blocks.tokens.protected], minlength=len(segments))
    bottom = np.minimum(segments.held, np.maximum(allocator.limits(segments.length)[:, -1], fixed))

    gone = allocator.leaving(blocks, room, Recency())

    left = segments.held - np.bincount(segments.of[gone], minlength=len(segments))
    if (
        room >= int(bottom.sum())
        and not (
            blocks.floor
            > np.bincount(blocks.tokens.block[blocks.tokens.protected], minlength=len(blocks))
        ).any()
    ):
        assert (left >= np.minimum(segments.held, least)).all()


@given(
    steps=st.integers(0, 20),
    pieces=st.one_of(st.none(), st.integers(0, 1 << 20)),
)
@example(0, 0)
@example(3, 1 << 20)
def test_what_is_remembered_comes_back(steps: int, pieces: int | None) -> None:
    sparsity = math.nan if pieces is None else pieces / (1 << 20)
    number, known = remembered(credit_of(np.array([steps]), np.array([sparsity])))
    assert number.tolist() == [steps]
    assert known[0] == sparsity or (math.isnan(known[0]) and math.isnan(sparsity))
    nothing = remembered(np.array([0.0, 0.4, 1.9]))
    assert nothing[0].tolist() == [0, 0, 0] and np.isnan(nothing[1]).all()


def test_a_closed_segment_remembers_its_mean_and_an_open_one_each_query() -> None:
    blocks = chain([4, 8, 8], scheduled=[NEVER, NEVER, 0])
    tokens = blocks.tokens
    (only,) = tokens.kv.sequences
    place = np.arange(20)
    wrote = np.concatenate([np.arange(6, 12), np.arange(14, 20)])
    rows = 12

    def whole(layer: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(layer)
        return [4 * torch.randn(rows, 4, len(only), generator=generator)]

    known = dataclasses.replace(only, wrote=wrote, asked=np.arange(rows), whole=whole)
    kv = dataclasses.replace(tokens.kv, sequences=(known,), place=place)
    given_ = dataclasses.replace(tokens, kv=kv, credit=np.zeros(20))
    each = np.round(query_sparsity(known) * 2**20) / 2**20

    _, credit = TYPED.credited(dataclasses.replace(blocks, see=given_.only), 19, Recency())

    _, sparsity = remembered(credit)
    assert np.isnan(sparsity[:4]).all()
    assert sparsity[4:12] == pytest.approx(np.full(8, each[:6].mean()), abs=1e-6)
    assert len(set(sparsity[4:12].tolist())) == 1
    assert np.isnan(sparsity[12:14]).all() and sparsity[14:20].tolist() == each[6:].tolist()
    # measured once: what is remembered is not measured again
    again = dataclasses.replace(given_, credit=credit_of(np.zeros(20, int), np.full(20, 0.25)))
    _, credit = TYPED.credited(dataclasses.replace(blocks, see=again.only), 19, Recency())
    assert (remembered(credit)[1] == 0.25).all()


def test_where_all_fits_nothing_leaves_and_figures_are_remembered() -> None:
    blocks = chain([4, 9], [MIDDLE, SPARSE], steps=[0, 2])
    gone, credit = ThinKV(valleys=VALLEYS).credited(blocks, 13, Recency())
    assert not len(gone) and gone.dtype == np.int64
    assert credit.tolist() == pytest.approx(blocks.tokens.credit.tolist(), abs=1e-6)


def test_without_valleys_nothing_is_measured() -> None:
    assert ThinKV().observation == Observation(keys=True)
    assert ThinKV(choose="score").observation == Observation()
    assert TYPED.observation == Observation(keys=True, window=128)
    assert ThinKV(valleys=VALLEYS, lookback=9, layers=(1,)).observation == Observation(
        keys=True, window=9, layers=(1,)
    )
    _, credit = ThinKV(choose="score").credited(chain([4, 9], [0.1, 0.9]), 9, Recency())
    assert np.isnan(remembered(credit)[1]).all()


# The policy


def test_what_allocator_and_scorer_want_is_joined() -> None:
    assert Policy(ThinKV()).observation == Observation(keys=True)
    assert Policy(TYPED, KeyDiff()).observation == Observation(keys=True, window=128)
    alike = dataclasses.replace(TYPED, lookback=32)
    assert Policy(alike, WindowAttention(32)).observation == Observation(keys=True, window=32)
    with pytest.raises(UsageError, match="observes window 8 and the allocator 128"):
        Policy(TYPED, RKV())
    with pytest.raises(UsageError, match="observes layers None and the allocator"):
        Policy(ThinKV(layers=(1,)), KeyDiff())
    wide = Observation(keys=True, rotation=True).joined(Observation(attention=True))
    assert wide == Observation(attention=True, keys=True, rotation=True)
    assert Observation().joined(wide) == wide == wide.joined(Observation(every=1))


def test_heads_with_tokens_of_their_own_are_refused() -> None:
    with pytest.raises(UsageError, match="ThinKV chooses tokens by their places"):
        dataclasses.replace(POLICIES["thinkv"], granularity="head")


def test_settings_are_read_from_a_command_line() -> None:
    policy = component("policy", "thinkv,valleys=0.5,0.8,schedule=0.5,0.25,segment=16,layers=1,3")
    assert policy.allocator == ThinKV(
        valleys=(0.5, 0.8), schedule=(0.5, 0.25), segment=16, layers=(1, 3)
    )
    assert policy.protect == Protect(prompt=True)
    assert component("policy", "ams,allocator=thinkv").allocator == ThinKV()


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment": 0},
        {"schedule": ()},
        {"schedule": (0.5, 0.5)},
        {"schedule": (1.5,)},
        {"schedule": (0.5, 0.0)},
        {"schedule": (math.nan,)},
        {"least": -1},
        {"valleys": (0.5,)},
        {"valleys": (0.8, 0.5)},
        {"valleys": (0.5, 1.1)},
        {"valleys": (-0.1, 0.5)},
        {"lookback": 0},
        {"layers": (-1,)},
        {"choose": "best"},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}=.*: it must be"):
        ThinKV(**wrong)


# Engines


def shown(lab: Lab, leaves: Sequence[Node]) -> tuple[KVSequence, Tokens]:
    tokens = lab.residency.view.offered(leaves, where="anywhere").tokens
    (only,) = tokens.kv.sequences
    return only, tokens


@torch.inference_mode()
def own_attention(node: Node, layer: int) -> torch.Tensor:
    """Hugging Face's attention over the path to a block, [H, n, n]."""
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = torch.tensor([[token for each in node.path for token in each.tokens]])
    attention: torch.Tensor = model(ids, output_attentions=True, use_cache=False).attentions[layer]
    return attention[0]


def test_each_query_of_a_tree_is_shown_with_all_it_sees() -> None:
    """Where later queries leave tokens out of `logits`, and those of other branches too."""
    policy = dataclasses.replace(
        POLICIES["thinkv"], allocator=ThinKV(valleys=VALLEYS, lookback=6, layers=(0,))
    )
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(400)
    leaves = lab.sprout([(tree.root, 2)], GREEDY, 6)

    found, tokens = shown(lab, leaves)

    places = tokens.kv.places
    block, position = np.zeros(len(found), int), np.zeros(len(found), int)
    block[places], position[places] = tokens.block, tokens.position
    logits = torch.cat(list(found.whole(0))[::-1])
    weight = logits.softmax(-1)
    assert len(found.wrote) == 12 and (found.wrote >= 0).all()
    assert position[found.wrote].tolist() == found.asked.tolist()
    assert sorted(set(block[found.wrote].tolist())) == [leaf.id for leaf in leaves]
    for query, place in enumerate(found.wrote.tolist()):
        leaf = tree[int(block[place])]
        own = [at for at in range(len(found)) if tree[int(block[at])] in leaf.path]
        own = [at for at in own if position[at] <= position[place]]
        wanted = own_attention(leaf, 0)[:, position[place], : len(own)]
        assert torch.allclose(weight[query][:, own], wanted, atol=1e-5)
        assert weight[query].sum() == pytest.approx(len(weight[query]), abs=1e-4)
    left_out = torch.cat(list(found.logits(0))[::-1])
    assert (left_out == -torch.inf).sum() > (logits == -torch.inf).sum()


def test_a_query_whose_token_has_left_has_no_place() -> None:
    policy = dataclasses.replace(
        POLICIES["thinkv"],
        allocator=ThinKV(valleys=VALLEYS, lookback=30, least=1),
        protect=Protect(sinks=2, recent=4),
    )
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(30)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 40)

    found, tokens = shown(lab, [block])

    gone = found.wrote < 0
    assert gone.any() and not gone.all()
    here = set(zip(tokens.block.tolist(), tokens.position.tolist(), strict=True))
    assert all((1, position) not in here for position in found.asked[gone].tolist())
    assert found.positions[found.wrote[~gone]].tolist() == found.asked[~gone].tolist()


def test_figures_are_remembered_where_no_attention_is_observed() -> None:
    policy = dataclasses.replace(
        POLICIES["thinkv"],
        allocator=ThinKV(segment=8, valleys=VALLEYS, lookback=40),
        protect=Protect(sinks=2, recent=4),
        trigger=Trigger(spare=4),
    )
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    assert not policy.observes
    tree = lab.plant(40)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)

    _, tokens = shown(lab, [block])

    steps, sparsity = remembered(tokens.credit)
    mine = tokens.block == 1
    number = tokens.offset // 8
    closed = mine & (number < 6) & (steps > 0)
    assert closed.any() and not np.isnan(sparsity[closed]).any()
    for each in np.unique(number[closed]):
        assert len(set(sparsity[mine & (number == each)].tolist())) == 1
        assert np.count_nonzero(mine & (number == each)) >= 4
    assert lab.memory.peak <= 40


def test_sapling_solves_with_it_within_the_budget() -> None:
    chosen = "thinkv,valleys=0.4,0.7,segment=12"
    with Solver(
        task="chains", controller="chain", mode="lossy", policy=chosen, budget="96tok", seed=1
    ) as solver:
        solution = solver.solve(
            "Facts: Tom has 4 more than Amy. Amy has 3. How many does Tom have?"
        )
        assert solution.metrics.peak_tokens <= 96
        assert isinstance(solver.engine.runner, ModelRunner)
