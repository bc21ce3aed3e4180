"""Trigger: a policy that acts at its own time, and not only when room runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models import build
from support.trees import Lab

from arbor import components
from arbor.errors import UsageError
from arbor.events import Event, Evicted, Forwarded
from arbor.retention.policy import POLICIES, Policy
from arbor.retention.trigger import Trigger
from arbor.tree import ThoughtTree

POOL = 120


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
    assert lab.memory.used <= 0.3 * POOL
    assert alone.memory.used > 0.3 * POOL


def test_it_looks_every_few_steps_only() -> None:
    def steps_of(events: list[Event]) -> list[int]:
        """Decode steps before each eviction."""
        steps, found = 0, []
        for event in events:
            if isinstance(event, Forwarded) and event.kind == "decode":
                steps += event.steps
            elif isinstance(event, Evicted):
                found.append(steps)
        return found

    often, seldom = grown(Trigger(above=0.3))[0], grown(Trigger(every=5, above=0.3))[0]

    assert len(causes(seldom)) < len(causes(often))
    # a step is reported after its eviction
    assert all((steps + 1) % 5 == 0 or steps % 5 == 0 for steps in steps_of(seldom.events))


def test_running_paths_lose_tokens_in_lossy_mode() -> None:
    lab, _ = grown(Trigger(above=0.3), "lossy", "streaming")

    assert "clock" in causes(lab)
    assert lab.memory.used <= 0.3 * POOL + 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"every": 0}, "at least 1"), ({"above": 0.0}, "above 0"), ({"above": 1.5}, "at most 1")],
)
def test_a_trigger_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match="setting-range") as caught:
        Trigger(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_it_is_a_setting_of_a_policy() -> None:
    policy: Policy = components.build("policy", "lru", above="0.5", every="8", among="fair")

    assert policy.trigger == Trigger(every=8, above=0.5)
    assert policy.among == "fair"
    assert components.build("policy", components.spec_of(policy)) == policy
