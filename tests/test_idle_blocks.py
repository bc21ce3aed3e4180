"""``idle=newest``: what blocks off the running paths keep, whatever decides on the paths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.head_reads import held
from support.models import build
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, Lab

from arbor.events import Allocated
from arbor.retention.head_budgets import HeadShares
from arbor.retention.policy import Policy, Protect
from arbor.tree import Node, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

PATHS = ["h2o", "keydiff", "strata", "pyramidkv", "adakv"]


def newest(name: str) -> Policy:
    return dataclasses.replace(POLICIES[name], spares_paths=True, idle="newest")


def wide(policy: Policy | str, slots: int) -> tuple[Lab, ThoughtTree]:
    """A tree of which each path fits, and all of them together do not."""
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(slots)
    for parent in lab.sprout([(tree.root, 3)], length=12):
        lab.sprout([(parent, 2)], GREEDY, 12)
    return lab, tree


@pytest.mark.parametrize("name", every(3, PATHS))
def test_trees_whose_paths_fit_are_those_of_ends(name: str) -> None:
    (lab, tree), (other, same) = (wide(policy, 64) for policy in (newest(name), "ends"))

    assert [node.tokens for node in tree] == [node.tokens for node in same]
    lost = [
        [event.nodes for event in each.events if isinstance(event, Allocated)]
        for each in (lab, other)
    ]
    assert lost[0] == lost[1] and any(lost[0])
    held = [[node.span.resident.tolist() for node in each] for each in (tree, same)]
    assert held[0] == held[1]


@pytest.mark.parametrize("name", every(3, PATHS))
def test_a_path_that_does_not_fit_is_decided_as_ever(name: str) -> None:
    """There are no idle blocks, so the policy alone decides."""
    found = []
    for policy in (newest(name), POLICIES[name]):
        lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
        tree = lab.plant(30)
        leaf = tree.root
        for _ in range(3):
            (leaf,) = lab.sprout([(leaf, 1)], GREEDY, 15)
        found.append([(node.tokens, node.span.resident.tolist()) for node in leaf.path])
    assert found[0] == found[1]


def of_heads(lab: Lab, block: Node) -> list[list[int]]:
    """Positions of what each KV head holds of a block, increasing."""
    positions, heads = held(lab.memory, [block])
    return [sorted(positions[heads == head].tolist()) for head in range(len(positions))]


@pytest.mark.parametrize("heads", ["equal", "adaptive", "pyramid"])
def test_each_head_keeps_the_newest_of_what_it_holds(heads: HeadShares) -> None:
    policy = dataclasses.replace(
        POLICIES["h2o"],
        granularity="head",
        heads=heads,
        spares_paths=True,
        idle="newest",
        protect=Protect(sinks=2, recent=3),
    )
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(36)
    (long,) = lab.sprout([(tree.root, 1)], GREEDY, 40)
    before = of_heads(lab, long)
    assert any(each != before[0] for each in before), "heads hold the same tokens"

    lab.sprout([(tree.root, 1)], GREEDY, 12)

    after, slots = of_heads(lab, long), int(np.count_nonzero(long.span.resident))
    assert 0 < slots < np.mean([len(each) for each in before])
    for kept, was in zip(after, before, strict=True):
        assert kept == was[len(was) - len(kept) :]
        assert len(kept) >= min(slots, len(was))
