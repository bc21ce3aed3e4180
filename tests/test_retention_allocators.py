"""Allocators: each rule against its formula, and against every other way to share the room."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.offers import SEEDS, AtMost, blocks_of, choices, offer, room_for
from support.policies import of_papers
from support.slow_cases import every

from arbor.retention.allocators.by_block import LRU, Belady, Ends, Reentry, Uniform
from arbor.retention.allocators.per_tree import Among, PerTree, divided
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.allocators.segments import quotas_of
from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import (
    NEVER,
    Allocator,
    Blocks,
    CappedAllocator,
    Floats,
    TokenAllocator,
    Tokens,
)
from arbor.retention.ordering import order
from arbor.retention.policy import Policy
from arbor.retention.scorers import Recency, Window
from arbor.retention.selection import select

SHARES = st.floats(0, 1)
DIVIDED: tuple[Among, ...] = ("fair", "first-come", "shortest-first")
ANY = Recency()


# Sorting


@given(seed=SEEDS, kinds=st.lists(st.sampled_from("bifnF"), min_size=1, max_size=6))
def test_order_sorts_by_all_keys_and_then_by_index(seed: int, kinds: list[str]) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 60))
    makers = {
        "b": lambda: rng.random(size) < 0.5,
        "i": lambda: rng.integers(-3, 4, size),
        "f": lambda: rng.integers(-2, 3, size) / 3 * (1 - 2 * rng.integers(0, 2, size)),
        "n": lambda: np.where(rng.random(size) < 0.5, NEVER, rng.integers(0, 3, size)),
        "F": lambda: rng.choice([-1e300, 5e-324, 0.0, -0.0, 1e300], size),
    }
    keys = [makers[kind]() for kind in kinds]

    found = order(*keys)

    expected = sorted(range(size), key=lambda i: (*(key[i] for key in keys), i))
    assert found.tolist() == expected


# Water-filling


@given(seed=SEEDS, share=SHARES, spread=st.sampled_from([0.0, 1.0, 20.0, 200.0, 2000.0]))
def test_water_filling_meets_the_sum_and_the_kkt_conditions(
    seed: int, share: float, spread: float
) -> None:
    """k = clip(w / mu, floor, cap), one mu: at the cap w / k >= mu, at the floor w / k <= mu."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    cap = rng.integers(1, 130, size)
    floor = rng.integers(0, cap + 1) // 2
    log_weight = rng.normal(0, 1, size) * spread
    room = float(floor.sum()) + share * float((cap - floor).sum())

    kept = waterfill(log_weight, floor, cap, room)

    assert (floor <= kept).all() and (kept <= cap).all()
    assert kept.sum() == pytest.approx(min(room, cap.sum()), rel=1e-9)
    with np.errstate(divide="ignore"):
        price = log_weight - np.log(kept)  # ln(w / k)
    faint = log_weight < log_weight.max() - 590  # below the range of distinct weights
    between = (kept > floor + 1e-6) & (kept < cap - 1e-6) & ~faint
    if between.any():
        level = price[between].mean()
        assert np.ptp(price[between]) < 1e-6
        assert (price[(kept >= cap) & (cap > floor)] >= level - 1e-6).all()
        assert (price[(kept <= floor) & (floor > 0) & (cap > floor)] <= level + 1e-6).all()


@given(seed=SEEDS, spread=st.sampled_from([1.0, 50.0, 1000.0]))
def test_water_filling_keeps_whole_blocks_where_these_take_all_the_room(
    seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 40))
    cap = rng.integers(1, 130, size)
    log_weight = np.sort(rng.normal(0, 1, size) * spread)[::-1]
    whole = int(rng.integers(1, size))
    log_weight[:whole] += spread * 10  # far above the others

    kept = waterfill(log_weight, np.zeros(size, np.int64), cap, float(cap[:whole].sum()))

    assert kept.sum() == pytest.approx(cap[:whole].sum(), rel=1e-9)


@given(seed=SEEDS, share=SHARES)
def test_rounding_changes_no_share_by_a_token(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 50))
    cap = rng.integers(0, 20, size)
    floor = rng.integers(0, cap + 1)
    room = int(floor.sum() + share * (cap - floor).sum())
    shares = waterfill(rng.normal(0, 1, size), floor, cap, room)

    counts = rounded(shares, floor, cap, room)

    assert counts.sum() == min(room, cap.sum())
    assert (np.abs(counts - shares) < 1 + 1e-6).all()
    assert (floor <= counts).all() and (counts <= cap).all()
    up, down = counts > shares + 1e-6, counts < shares - 1e-6
    if up.any() and down.any():
        remainder = shares - np.floor(shares)
        assert remainder[up].min() >= remainder[down].max() - 1e-6


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


@given(seed=SEEDS, share=SHARES)
def test_ends_keeps_paths_before_it_shares_the_rest(seed: int, share: float) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)

    counts = Ends().counts(blocks, room, ANY)

    assert counts.sum() == min(room, blocks.resident.sum())
    assert (counts >= blocks.floor).all() and (counts <= blocks.resident).all()
    active, idle = blocks.active, ~blocks.active
    if (counts[idle] > blocks.floor[idle]).any():
        assert (counts[active] == blocks.resident[active]).all()


# Whole blocks


def test_reentry_serves_the_operation_in_progress_first() -> None:
    blocks = blocks_of(
        5,
        scheduled=[NEVER, 2, 1, NEVER, 2],
        reentry=[0.9, 0.0, 0.0, 0.5, 0.1],
    )

    assert Reentry().counts(blocks, 15, ANY).tolist() == [0, 0, 10, 0, 5]
    assert Reentry().counts(blocks, 45, ANY).tolist() == [10, 10, 10, 5, 10]


def random_forest(seed: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Parents, leaf probabilities, and each block's reentry: the sum over the leaves below."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    parent = [-1] + [int(rng.integers(0, i)) for i in range(1, size)]
    leaf = np.where(np.isin(np.arange(size), parent), 0.0, rng.random(size))
    leaf /= max(1.0, leaf.sum())
    total = leaf.copy()
    for i in range(size - 1, 0, -1):
        total[parent[i]] += total[i]
    return parent, leaf, total


@given(seed=SEEDS, share=SHARES)
def test_reentry_costs_as_little_as_any_choice_can(seed: int, share: float) -> None:
    """Expected tokens to compute again, sum(P (n - k)), against every choice; up to 8 blocks."""
    _, _, total = random_forest(seed)
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 4, len(total))
    resident = rng.integers(0, length + 1)
    blocks = blocks_of(
        len(total),
        length=length,
        resident=resident,
        floor=resident // 3,
        reentry=total,
        last_used=rng.integers(0, 5, len(total)),
    )
    room = room_for(blocks, share)

    counts = Reentry().counts(blocks, room, ANY)

    least = min(float(total @ (length - np.array(each))) for each in choices(blocks, room))
    assert float(total @ (length - counts)) == pytest.approx(least, abs=1e-12)


def replay(rule: object, lengths: tuple[int, ...], reads: list[int], slots: int) -> int:
    """Tokens computed when these blocks are read in turn; each read needs its block whole."""
    held = np.zeros(len(lengths), np.int64)
    used = np.zeros(len(lengths), np.int64)
    paid = 0
    for clock, block in enumerate(reads):
        others = np.flatnonzero((np.arange(len(lengths)) != block) & (held > 0))
        after = reads[clock + 1 :]
        offered = blocks_of(
            len(others),
            length=np.array(lengths)[others],
            resident=held[others],
            last_used=used[others],
            next_use=[after.index(i) if i in after else NEVER for i in others],
        )
        held[others] = rule.counts(offered, slots - lengths[block], ANY)  # type: ignore[attr-defined]
        paid += int(lengths[block] - held[block])
        held[block], used[block] = lengths[block], clock + 1
    return paid


def least_possible(lengths: tuple[int, ...], reads: list[int], slots: int) -> int:
    """The same cost, least over all evictions: every state of every step."""

    @functools.cache
    def cost(clock: int, held: tuple[int, ...]) -> int:
        if clock == len(reads):
            return 0
        block = reads[clock]
        paid = lengths[block] - held[block]
        room = slots - lengths[block]
        options = [
            range(count + 1) if i != block else [lengths[block]] for i, count in enumerate(held)
        ]
        return paid + min(
            cost(clock + 1, after)
            for after in itertools.product(*options)
            if sum(after) - lengths[block] <= room
        )

    return cost(0, (0,) * len(lengths))


@given(seed=SEEDS)
def test_nobody_beats_belady(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = tuple(rng.integers(1, 3, 4).tolist())
    reads = rng.integers(0, 4, 7).tolist()
    slots = int(rng.integers(max(lengths), sum(lengths) + 1))

    paid = replay(Belady(), lengths, reads, slots)

    assert paid == least_possible(lengths, reads, slots)
    assert paid <= replay(LRU(), lengths, reads, slots)


# Pooled


@given(seed=SEEDS, share=SHARES)
def test_pooled_keeps_the_best_tokens_wherever_they_lie(seed: int, share: float) -> None:
    """Against the rule by hand: floors first, of each block's best; then the best of the rest."""
    blocks = offer(seed)
    tokens, scores = blocks.tokens, ANY.scores(blocks.tokens)
    scores = np.random.default_rng(seed).integers(0, 3, len(scores)).astype(float)
    room = room_for(blocks, share)
    keys = [
        (not tokens.protected[i], -scores[i], -tokens.position[i], tokens.block[i])
        for i in range(len(scores))
    ]
    ranked = sorted(range(len(scores)), key=lambda i: (*keys[i], -i))
    taken: list[int] = []
    for block, floor in enumerate(blocks.floor.tolist()):
        taken += [i for i in ranked if tokens.block[i] == block][:floor]
    taken += [i for i in ranked if i not in taken][: room - len(taken)]

    counts = Pooled().counts(blocks, room, Scored(tuple(scores)))

    assert counts.tolist() == np.bincount(tokens.block[taken], minlength=len(blocks)).tolist()


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores that are given."""

    values: tuple[float, ...]
    observes: bool = False

    def scores(self, tokens: Tokens) -> Floats:
        return np.array(self.values)


# Room divided among trees


HELD = ([12, 8], [20], [10])  # tokens of the blocks of three trees


@pytest.mark.parametrize(
    ("among", "room", "kept"),
    [
        ("first-come", 25, [20, 5, 0]),
        ("first-come", 45, [20, 20, 5]),
        ("shortest-first", 25, [15, 0, 10]),
        ("shortest-first", 36, [20, 6, 10]),  # of equal ones the one opened first
        ("fair", 24, [8, 8, 8]),
        ("fair", 36, [13, 13, 10]),
        ("fair", 50, [20, 20, 10]),
        ("fair", 2, [1, 1, 0]),
    ],
)
def test_the_room_is_divided_among_trees(among: Among, room: int, kept: list[int]) -> None:
    turn = [place for place, tree in enumerate(HELD) for _ in tree]
    tokens = [count for tree in HELD for count in tree]
    blocks = blocks_of(len(turn), turn=turn, length=tokens, resident=tokens)

    counts = PerTree(LRU(), among).counts(blocks, room, ANY)

    assert np.bincount(blocks.turn, counts).astype(int).tolist() == kept


OF_PAPERS = of_papers("allocator", ("kkt", {}), ("ratio", {}))


@pytest.mark.parametrize("among", DIVIDED)
@given(seed=SEEDS, share=SHARES, ties=st.booleans())
def test_every_tree_keeps_between_its_floors_and_all(
    among: Among, seed: int, share: float, ties: bool
) -> None:
    blocks = offer(seed, 12, ties=ties)
    room = room_for(blocks, share)
    for allocator in (LRU(), Reentry(), Uniform(), Pooled(), *OF_PAPERS):
        counts = PerTree(allocator, among).counts(blocks, room, ANY)
        assert (counts >= blocks.floor).all() and (counts <= blocks.resident).all()
        assert counts.sum() <= room


ALL_TOKEN_ALLOCATORS: tuple[TokenAllocator, ...] = (
    Pooled(),
    *of_papers(
        "allocator",
        ("strata", {"size": 4}),
        ("chunks", {"size": 3}),
        ("ams", {"delta": 0.2, "shortest": 2, "longest": 6}),
    ),
)


def chosen_by(allocator: Allocator, blocks: Blocks, room: int) -> tuple[set[tuple[int, ...]], list]:
    """The tokens that leave, as block and offset, and what those that stay are credited with."""
    _, chosen = select(blocks, room, allocator, Window())
    leaving = {tuple(pair) for pair in np.stack(chosen.leaving(), 1).tolist()}
    return leaving, [column.tolist() for column in chosen.credited()]


@pytest.mark.parametrize("allocator", ALL_TOKEN_ALLOCATORS, ids=repr)
@pytest.mark.parametrize("among", DIVIDED)
@given(seed=SEEDS, share=SHARES)
def test_of_one_tree_the_same_tokens_leave_however_room_is_divided(
    among: Among, allocator: TokenAllocator, seed: int, share: float
) -> None:
    blocks = offer(seed, longest=30)
    blocks = dataclasses.replace(blocks, turn=np.full(len(blocks), 2))
    room = room_for(blocks, share)

    assert chosen_by(divided(allocator, among), blocks, room) == chosen_by(allocator, blocks, room)


@pytest.mark.parametrize("allocator", every(3, ALL_TOKEN_ALLOCATORS), ids=repr)
@pytest.mark.parametrize("among", DIVIDED)
@given(seed=SEEDS, share=SHARES)
def test_within_each_tree_the_allocator_chooses_the_tokens(
    among: Among, allocator: TokenAllocator, seed: int, share: float
) -> None:
    blocks = offer(seed, longest=30)
    room = room_for(blocks, share)
    shared = divided(allocator, among)

    leaving, (block, offset, credit) = chosen_by(shared, blocks, room)

    counts = shared.counts(blocks, room, Window())
    found: set[tuple[int, ...]] = set()
    credited: dict[tuple[int, int], float] = {}
    for turn in np.unique(blocks.turn).tolist():
        mine = np.flatnonzero(blocks.turn == turn)
        gone, own = chosen_by(allocator, blocks.only(mine), int(counts[mine].sum()))
        found |= {(int(mine[at]), offset) for at, offset in gone}
        for at, place, figure in zip(*own, strict=True):
            credited[int(mine[at]), place] = figure
    assert leaving == found
    assert dict(zip(zip(block, offset, strict=True), credit, strict=True)) == credited
    lost = np.bincount([at for at, _ in leaving], minlength=len(blocks))
    assert (counts == blocks.resident - lost).all()


CAPPED = [AtMost(2), *of_papers("allocator", ("hierarchy", {"ratio": 0.5, "first": 0}))]


@pytest.mark.parametrize("allocator", CAPPED)
@pytest.mark.parametrize("among", DIVIDED)
@given(seed=SEEDS)
@example(seed=30716)  # a tree gives up a token of its floors
def test_a_capacity_holds_for_each_tree(
    among: Among, allocator: CappedAllocator, seed: int
) -> None:
    blocks = offer(seed, 12)
    parts = [blocks.only(np.flatnonzero(blocks.turn == turn)) for turn in np.unique(blocks.turn)]
    own = [allocator.excess(part) for part in parts]
    capped = Policy(allocator, Window(), among=among).capped
    assert capped is not None

    excess = capped.excess(blocks)

    assert excess == sum(own)
    counts, _ = select(blocks, int(blocks.resident.sum()) - excess, capped, Window())
    lost = np.bincount(blocks.turn, blocks.resident - counts).astype(int)
    assert lost[np.unique(blocks.turn)].tolist() == own
