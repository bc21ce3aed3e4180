"""RSBCM: the rule by hand and block by block, alone and in a search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import build
from support.offers import SEEDS, offer, room_for
from support.trees import Lab
from test_retention_allocators import blocks_of

from arbor.components import build as built
from arbor.errors import UsageError
from arbor.papers.rksc.rsbcm import POLICY, RSBCM
from arbor.retention.base import Blocks, Ints
from arbor.retention.policy import Protect
from arbor.retention.scorers import Recency

SHARES = st.floats(0, 1)
ANY = Recency()


def evicted_one_by_one(blocks: Blocks, room: int, capacity: int) -> Ints:
    """While too many blocks or tokens are left, the block with the least w loses its tokens."""
    counts = blocks.resident.copy()
    weight = (blocks.value / (blocks.depth + 1)).tolist()

    def worth(index: int) -> tuple[float, int, int]:
        return weight[index], int(blocks.last_used[index]), -index

    while True:
        held = [i for i in range(len(blocks)) if counts[i] > blocks.floor[i]]
        excess = int(counts.sum()) - room
        if len(held) <= capacity and excess <= 0:
            return counts
        worst = min(held, key=worth)
        lost = int(counts[worst] - blocks.floor[worst])
        if len(held) <= capacity:  # the last one is cut
            lost = min(lost, excess)
        counts[worst] -= lost


@given(seed=SEEDS, share=SHARES, capacity=st.integers(1, 6))
def test_rsbcm_evicts_the_least_value_per_depth_one_by_one(
    seed: int, share: float, capacity: int
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)

    counts = RSBCM(capacity).counts(blocks, room, ANY)

    # a block that is cut is one of those that the capacity allows
    assert counts.tolist() == evicted_one_by_one(blocks, room, capacity).tolist()


@given(seed=SEEDS, share=SHARES, capacity=st.integers(1, 60))
def test_rsbcm_may_count_tokens(seed: int, share: float, capacity: int) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)
    least = int(blocks.floor.sum())

    counts = RSBCM(capacity, "tokens").counts(blocks, room, ANY)

    by_room = RSBCM().counts(blocks, min(room, max(capacity, least)), ANY)
    assert counts.tolist() == by_room.tolist()


@given(seed=SEEDS, capacity=st.integers(1, 30), unit=st.sampled_from(("blocks", "tokens")))
def test_rsbcms_excess_is_what_it_gives_up_with_room_for_all(
    seed: int, capacity: int, unit: str
) -> None:
    blocks, policy = offer(seed), RSBCM(capacity, unit)  # type: ignore[arg-type]
    held = int(blocks.resident.sum())

    excess = policy.excess(blocks)

    assert excess == held - int(policy.counts(blocks, held, ANY).sum())


def test_rsbcm_by_hand() -> None:
    # w: 0.4, 0.5, 0.3, 0.3; the third was read later than the fourth
    blocks = blocks_of(4, value=[0.4, 1.0, 0.9, 0.3], depth=[0, 1, 2, 0], last_used=[1, 1, 5, 4])

    assert RSBCM().counts(blocks, 25, ANY).tolist() == [10, 10, 5, 0]
    assert RSBCM(3).counts(blocks, 40, ANY).tolist() == [10, 10, 10, 0]
    assert RSBCM(1).counts(blocks, 40, ANY).tolist() == [0, 10, 0, 0]
    assert RSBCM(1).excess(blocks) == 30
    with pytest.raises(UsageError, match="setting-range"):
        RSBCM(0)


def test_the_block_of_least_value_and_greatest_depth_leaves_first() -> None:
    policy = replace(POLICY, allocator=RSBCM(2), protect=Protect(sinks=0))
    lab = Lab(build("llama"), policy=policy, debug=True)
    tree = lab.plant(4096)
    nodes = lab.sprout([(tree.root, 3)])
    for node, value in zip(nodes, (0.9, 0.1, 0.5), strict=True):
        node.value, node.valued = value, True
    lab.changed(nodes)
    assert all(node.span.resident.all() for node in nodes)

    lab.sprout([(nodes[2], 1)])  # runs on the third: the others are two, and may stay
    assert all(node.span.resident.all() for node in nodes)
    lab.sprout([(tree.root, 1)])  # idle now: three blocks and the child of the third

    held = [bool(node.span.resident.all()) for node in nodes]
    assert held == [True, False, True]


def test_it_spares_paths_and_its_idle_blocks_are_not_cut_by_age() -> None:
    assert built("policy", "rsbcm").spares_paths
    with pytest.raises(UsageError) as caught:
        built("policy", "rsbcm,spares_paths=true,idle=newest")
    assert caught.value.code == "idle"
