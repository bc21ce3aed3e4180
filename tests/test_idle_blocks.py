"""``idle=newest``: what blocks off the running paths keep, whatever decides on the paths."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import build
from support.offers import AtMost
from support.policies import POLICIES
from support.trees import GREEDY, Lab

from arbor.components import build as built
from arbor.components import spec_of
from arbor.errors import UsageError
from arbor.events import Allocated
from arbor.retention.allocators.per_tree import divided
from arbor.retention.allocators.uniform import Uniform
from arbor.retention.policy import Policy
from arbor.retention.scorers.recency import Recency
from arbor.tree import ThoughtTree

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


@pytest.mark.parametrize("name", PATHS)
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


@pytest.mark.parametrize("name", PATHS)
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


def test_idle_blocks_leave_whole_where_paths_do_not_fit() -> None:
    lab = Lab(build("llama"), policy=newest("pyramidkv"), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    (idle,) = lab.sprout([(tree.root, 1)], GREEDY, 15)
    (leaf,) = lab.sprout([(tree.root, 1)], length=40)
    assert not idle.span.resident.any()
    assert lab.memory.mixed(leaf).any()


def test_policies_that_do_not_spare_paths_are_refused() -> None:
    for policy in (POLICIES["h2o"], dataclasses.replace(POLICIES["lru"], allocator=AtMost(2))):
        with pytest.raises(UsageError) as caught:
            dataclasses.replace(policy, idle="newest")
        assert caught.value.code == "idle" and "spares_paths=true" in caught.value.hint
    with pytest.raises(UsageError, match="it must be one of scored, newest"):
        built("policy", "h2o,idle=last")
    with pytest.raises(UsageError, match="idle=last: it must be scored or newest"):
        dataclasses.replace(POLICIES["lru"], idle="last")


def test_a_trace_holds_the_setting_where_it_is_set() -> None:
    policy = built("policy", "pyramidkv,spares_paths=true,idle=newest")
    assert spec_of(policy)["idle"] == "newest"
    assert built("policy", spec_of(policy)) == policy
    assert "idle" not in spec_of(POLICIES["ends"])


def test_searches_next_to_each_other_divide_the_room_of_idle_blocks_too() -> None:
    policy = "keydiff,spares_paths=true,idle=newest,among=fair"
    assert built("policy", policy).for_idle == (divided(Uniform(), "fair"), Recency())
    assert newest("keydiff").for_idle == (Uniform(), Recency())
