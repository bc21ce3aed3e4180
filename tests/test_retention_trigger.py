"""Trigger: a policy that acts at its own time, and not only when room runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models import Words, build
from support.offers import AtMost
from support.policies import POLICIES
from support.trees import SAMPLED, Lab, relative_error
from support.trees import grown as grown_tree

from arbor.engine import residency
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import UsageError
from arbor.events import Event, Evicted, Forwarded, Rehydrated
from arbor.retention.policy import Protect, Trigger
from arbor.tasks.base import BlockLimits
from arbor.tree import NodeState, ThoughtTree

POOL = 120
NOTHING = Protect(sinks=0)
GROWTH = Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 30, 8), ()))


def grown(trigger: Trigger, mode: str = "lossless", policy: str = "lru") -> tuple[Lab, ThoughtTree]:
    """A tree of two levels and then a third below its first branch, in steps of their own."""
    lab = Lab(
        build("llama"),
        policy=replace(POLICIES[policy], trigger=trigger),
        mode=mode,  # type: ignore[arg-type]
        debug=True,
    )
    tree = ThoughtTree((5, 17, 40, 8, 77, 23, 61, 5, 90, 33, 12, 50))
    lab.open(tree, POOL, detail="steps")
    lab.extend(tree.root)
    first, *_ = lab.sprout([(tree.root, 4)], length=8)
    (below,) = lab.sprout([(first, 1)], length=8)
    lab.sprout([(below, 1)], length=8)
    return lab, tree


def causes(lab: Lab) -> list[str]:
    return [event.cause for event in lab.events if isinstance(event, Evicted)]


def test_without_a_trigger_nothing_leaves_while_there_is_room() -> None:
    lab, _ = grown(Trigger())

    assert causes(lab) == []


def test_what_is_above_the_part_leaves_at_once() -> None:
    lab, tree = grown(Trigger(above=0.3))
    alone, _ = grown(Trigger())

    assert set(causes(lab)) == {"clock"}
    assert [node.tokens for node in tree] == [node.tokens for node in alone.tree]
    paths = 12 + 3 * 8
    last = [e for e in lab.events if isinstance(e, Forwarded) and e.kind == "decode"][-1]
    assert last.kv.device <= max(int(0.3 * POOL), paths) + 1, "and the token of the step itself"
    assert alone.memory.used >= 0.5 * POOL


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"every": 0}, "at least 1"), ({"above": 0.0}, "above 0"), ({"above": 1.5}, "at most 1")],
)
def test_a_trigger_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match="setting-range") as caught:
        Trigger(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_policy_that_fails_at_its_own_time_ends_the_last_operation_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, tree = grown(Trigger(above=0.3))
    other = ThoughtTree((9, 3, 3, 41))
    lab.open(other, POOL, alone=False, pool=POOL)
    first = lab.begin_grow([(tree.root.children[0], 1)], GROWTH)
    second = lab.begin_grow([(other.root, 1)], GROWTH)
    lab.step()
    right = residency.select

    def wrong(*args: object) -> object:
        raise UsageError("policy", "a wrong answer")

    while not second.done:
        lab.extend(tree.root.children[-1])  # something that may leave
        monkeypatch.setattr(residency, "select", wrong)
        lab.step()
        monkeypatch.setattr(residency, "select", right)

    with pytest.raises(UsageError, match="a wrong answer"):
        second.result()
    while not first.done:
        lab.step()
    assert first.result()


# A capacity of the policy's own


@pytest.mark.parametrize("capacity", [1, 2])
def test_blocks_beyond_a_capacity_leave_although_there_is_room(capacity: int) -> None:
    policy = replace(POLICIES["lru"], allocator=AtMost(capacity), protect=NOTHING)
    lab = Lab(build("llama"), policy=policy, debug=True)
    over: list[int] = []

    def watch(event: Event) -> None:
        lab.events.append(event)
        if isinstance(event, Evicted) and event.cause == "clock":
            running = [node for node in lab.tree if node.state is NodeState.OPEN]
            pinned = {id(node) for leaf in running for node in leaf.path}
            idle = [n for n in lab.tree if n.span.resident.any() and id(n) not in pinned]
            over.append(len(idle))

    lab.listener = watch
    tree, answers = grown_tree(lab)
    want, want_answers = grown_tree(Lab(build("llama")))

    assert over and max(over) <= capacity
    assert lab.memory.peak < 4096, "there was room"
    assert [node.tokens for node in tree] == [node.tokens for node in want]
    assert relative_error(answers, want_answers) < 1e-4
    assert any(isinstance(event, Rehydrated) for event in lab.events)
