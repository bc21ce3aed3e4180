"""Blocks that lose tokens while they are decoded (lossy mode)."""

from __future__ import annotations

import dataclasses

import pytest
from support.masked_reads import Reads, masked_logits, recorded
from support.models import WINDOW, build
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, PROMPT, Lab, relative_error

from arbor.engine.scheduler import MARGIN
from arbor.events import Evicted
from arbor.retention.policy import Policy, Protect, Trigger

SLOTS = 24
LONG = 60  # tokens of a block, more than the budget


def guarded(policy: str) -> Policy:
    return dataclasses.replace(POLICIES[policy], protect=Protect(sinks=2, recent=4))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What each decoded token attends to."""
    return recorded(monkeypatch)


@pytest.mark.parametrize(
    "policy", every(3, ["streaming", "tova", "h2o", "random", "uniform", "lru"])
)
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_each_token_reads_what_is_left_of_its_block(name: str, policy: str, seen: Reads) -> None:
    lab = Lab(build(name), policy=guarded(policy), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    window = WINDOW if name == "mistral_window" else None
    want = masked_logits(build(name), block, seen, window)
    assert len(block.tokens) == LONG
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == block.tokens
    assert relative_error(lab.state.logits[block.row], want[-1]) < 1e-4
    lost = [
        dict(event.nodes).get(block.id, 0) for event in lab.events if isinstance(event, Evicted)
    ]
    assert sum(lost) > LONG - SLOTS
    assert not block.span.exact[SLOTS:].any()


def test_a_block_is_whole_and_exact_again_once_it_fits() -> None:
    lab = Lab(
        build("llama"), policy=guarded("lru"), mode="lossy", rehydrate="selective", debug=True
    )
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
    assert not block.span.resident.all()

    lab = Lab(
        build("llama"), policy=guarded("lru"), mode="lossy", rehydrate="selective", debug=True
    )
    tree = lab.plant(LONG + len(PROMPT) + 8)
    (first,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
    (second,) = lab.sprout([(tree.root, 1)], GREEDY, LONG, seed=4)
    lab.extend(first)
    assert first.span.exact.all()
    assert not second.span.resident.all()


@pytest.mark.parametrize("spare", [0, 6])
def test_a_policy_may_free_several_slots_at_once(spare: int) -> None:
    policy = guarded("streaming")
    policy = dataclasses.replace(policy, trigger=Trigger(spare=spare))
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(SLOTS)
    lab.sprout([(tree.root, 1)], GREEDY, LONG)

    events = [event for event in lab.events if isinstance(event, Evicted)]
    lost = [sum(count for _, count in event.nodes) for event in events]
    assert max(lost) == max(spare, MARGIN)
