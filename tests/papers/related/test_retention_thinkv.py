"""ThinKV: sparsity, steps, K-means and bits, each against a plain loop, and in the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.offers import SEEDS, offer, room_for
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, Lab

from arbor import Solver
from arbor.errors import UsageError
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.memory.packed_store import PackedStore
from arbor.memory.stores import LowerRoom
from arbor.papers.related.thinkv import (
    ThinKV,
    credit_of,
    query_sparsity,
    remembered,
    representatives,
)
from arbor.papers.related.thinkv_bits import ThinKVBits
from arbor.retention.base import NEVER, Blocks, Floats, Tokens
from arbor.retention.policy import Protect, Trigger
from arbor.retention.scorers import Recency
from arbor.retention.token_kv import KVSequence
from arbor.testing import random_kv
from arbor.tree import Node, Tier

SHARES = st.floats(0, 1)
FEW = settings(max_examples=25)
DENSE, MIDDLE, SPARSE = 0.3, 0.6, 0.9  # execution, reasoning, transition
VALLEYS = (0.5, 0.8)
TYPED = ThinKV(valleys=VALLEYS, choose="score")


@pytest.mark.parametrize("layers", ["20,27", "3,6"])
def test_layers_that_the_model_lacks_are_refused_before_it_loads(layers: str) -> None:
    policy = f"thinkv,valleys=0.4,0.7,layers={layers}"
    refused = pytest.raises(UsageError, match=f"layers={layers}: .* of this model, 0 to 5")
    with Solver(mode="lossy", policy=policy) as solver, refused:
        solver.plan("4 5 6 10")


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


def without_queries(blocks: Blocks, seed: int) -> Blocks:
    """The offer where no sparsity is measured: what is remembered counts."""
    blind = random_kv(seed, 1).sequences[0]
    nobody = dataclasses.replace(blind, wrote=np.full(len(blind.wrote), -1))
    tokens = blocks.tokens
    hidden = dataclasses.replace(
        tokens,
        kv=dataclasses.replace(
            tokens.kv, sequences=(nobody,), place=np.full(len(tokens.block), -1)
        ),
    )
    return dataclasses.replace(blocks, see=hidden.only)


@given(seed=SEEDS, share=SHARES, segment=st.integers(1, 20), least=st.integers(0, 5))
def test_counts_are_those_of_a_plain_loop(
    seed: int, share: float, segment: int, least: int
) -> None:
    blocks = without_queries(typed(seed), seed)
    room = room_for(blocks, share)
    allocator = dataclasses.replace(TYPED, segment=segment, least=least, schedule=(0.6, 0.3, 0.1))

    assert kept(allocator, blocks, room) == plain_steps(allocator, blocks, room)


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


# The policy


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


# Bits

KINDS = (DENSE, MIDDLE, SPARSE)
NAMES = ("execution", "reasoning", "transition")


@pytest.mark.parametrize("packed", [("transition",), ("execution", "transition"), NAMES])
def test_closed_segments_of_the_types_named_are_packed_once(packed: tuple[Any, ...]) -> None:
    blocks = chain(
        [4, 8, 8, 8, 8],
        [math.nan, *KINDS, SPARSE],
        protected=[(), (7,), (), (0, 1), ()],
        scheduled=[NEVER, NEVER, NEVER, NEVER, 0],
    )
    done = np.isin(blocks.tokens.position, [5, 21])  # an execution's, a transition's
    allocator = ThinKVBits(valleys=VALLEYS, packed=packed)

    found = blocks.tokens.position[allocator.packing(blocks, done, Recency())]

    places = {"execution": [4, *range(6, 11)], "reasoning": range(12, 20)}
    places["transition"] = range(22, 28)
    assert found.tolist() == sorted(at for name in packed for at in places[name])


@given(seed=SEEDS)
def test_what_is_destroyed_is_what_transitions_ask_for_and_no_more(seed: int) -> None:
    blocks = without_queries(typed(seed), seed)
    allocator = ThinKVBits(segment=7, valleys=VALLEYS, choose="score", least=2)
    plain = dataclasses.replace(TYPED, segment=7, least=2)
    held = int(blocks.resident.sum())

    excess = allocator.excess(blocks)

    stays = allocator.counts(blocks, held - excess, Recency()).tolist()
    assert sum(stays) == held - excess
    assert stays == plain_steps(plain, blocks, held - excess)
    _, credit = allocator.credited(blocks, held - excess - 5, Recency())
    assert not remembered(credit)[0].any(), "room asks for no step"


def tiered(
    valleys: tuple[float, float], slots: int = 200, tail: int = 0, lengths: Sequence[int] = (60,)
) -> tuple[Lab, Node]:
    """A lab whose host memory has few bits, and the end of a path of blocks, in segments of 8."""
    policy = dataclasses.replace(
        POLICIES["thinkv-bits"],
        allocator=ThinKVBits(segment=8, valleys=valleys, packed=("transition", "execution")),
        protect=Protect(sinks=2, recent=4, tail=tail, prompt=True),
        trigger=Trigger(every=8),
    )
    lab = Lab(
        build("llama"),
        policy=policy,
        mode="lossy",
        rehydrate="off",
        share="off",
        backend=RowwiseAttention(),
        lower=LowerRoom(200, host_bits=4, staging=4, inexact=True),
        debug=True,
    )
    tree = lab.plant(slots)
    block = tree.root
    for length in lengths:
        (block,) = lab.sprout([(block, 1)], GREEDY, length)
    return lab, block


@pytest.mark.parametrize("slots", every(2, [200, 40]))
def test_executions_are_packed_and_nothing_is_destroyed_without_a_transition(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedStore, "group", 4)

    lab, block = tiered((0.999, 1.0), slots)

    span = block.span
    assert span.present.all()
    rounded = np.flatnonzero((span.tier == Tier.COMPRESSED) | (span.origin >= 0))
    assert len(rounded) >= 40 and rounded.max() < 56
    assert lab.memory.peak <= slots


def test_transitions_step_segments_down_and_types_are_remembered_where_they_are_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PackedStore, "group", 4)

    lab, block = tiered((0.0, 1e-9))

    kept_ = [int(block.span.present[at : at + 8].sum()) for at in range(0, 48, 8)]
    # the last asked at 56 tokens: the seventh segment has closed, and each before it has stepped
    assert kept_[:4] == [4, 4, 4, 4] and lab.memory.peak <= 200
    assert block.span.present[48:].all()
    _, tokens = shown(lab, [block])
    _, sparsity = remembered(tokens.credit)
    mine = (tokens.block == 1) & (tokens.offset < 40)
    assert mine.any() and not np.isnan(sparsity[mine]).any()


def test_a_protected_tail_in_host_memory_is_not_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PackedStore, "group", 4)

    _, block = tiered((0.0, 1e-9), slots=40, tail=12, lengths=[20] * 5)

    blocks = block.path[1:]
    assert any(node.span.attended[-12:].any() for node in blocks)
    assert all(node.span.present[-12:].all() for node in blocks)
    assert not all(node.span.present.all() for node in blocks)


def test_bits_without_types_are_those_of_reasoning() -> None:
    assert set(ThinKVBits().packed) == set(NAMES)
    with pytest.raises(UsageError, match=r"packed=.*valleys"):
        ThinKVBits(packed=("execution",))
    with pytest.raises(UsageError, match=r"packed=.*some of"):
        ThinKVBits(packed=("prompt",))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"packed=.*some of"):
        ThinKVBits(valleys=VALLEYS, packed=())
