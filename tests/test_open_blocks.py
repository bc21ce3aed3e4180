"""Blocks that lose tokens while they are decoded (lossy mode)."""

from __future__ import annotations

import dataclasses

import pytest
from support.masked_reads import Reads, masked_logits, recorded
from support.models import WINDOW, build
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, PROMPT, Lab, relative_error

from arbor.engine.mode import Rehydrate
from arbor.engine.scheduler import MARGIN
from arbor.events import Evicted, Forwarded
from arbor.retention.policy import Policy, Protect
from arbor.retention.trigger import Trigger

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


@pytest.mark.parametrize("rehydrate", ["off", "selective", "span"])
def test_the_budget_holds_at_every_step_with_several_rows(rehydrate: Rehydrate) -> None:
    lab = Lab(build("llama"), policy=guarded("h2o"), mode="lossy", rehydrate=rehydrate, debug=True)
    tree = lab.plant(2 * SLOTS)
    first, second = lab.sprout([(tree.root, 2)], GREEDY, LONG)
    (third,) = lab.sprout([(second, 1)], GREEDY, LONG)

    assert [len(each.tokens) for each in (first, second, third)] == [LONG] * 3
    peaks = [event.peak for event in lab.events if isinstance(event, Forwarded)]
    assert max(peaks) <= 2 * SLOTS


def test_sinks_and_the_newest_tokens_of_an_open_block_stay(
    seen: Reads,
) -> None:
    lab = Lab(build("llama"), policy=guarded("random"), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    for (_, position), held in seen.items():
        assert {0, 1} <= set(held)
        assert set(range(position - 3, position + 1)) <= set(held)
    assert len(block.tokens) == LONG


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


def test_the_tree_of_full_retention_where_everything_fits() -> None:
    whole = Lab(build("llama"), policy="full")
    tree = whole.plant()
    (want,) = whole.sprout([(tree.root, 1)], length=LONG)

    lab = Lab(build("llama"), policy=guarded("h2o"), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(LONG + len(PROMPT))
    (block,) = lab.sprout([(tree.root, 1)], length=LONG)

    assert block.tokens == want.tokens
    assert block.span.exact.all()


def test_a_protected_prompt_stays_whole_while_there_is_room_for_it() -> None:
    whole = dataclasses.replace(POLICIES["random"], protect=Protect(recent=2, prompt=True))
    lab = Lab(build("llama"), policy=whole, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(SLOTS)
    lab.sprout([(tree.root, 1)], GREEDY, LONG)
    assert tree.root.span.resident.all()

    tree = lab.plant(len(PROMPT))
    lab.sprout([(tree.root, 1)], GREEDY, LONG)
    assert not tree.root.span.resident.all()
    assert tree.root.span.resident[:4].all()  # the sinks are given up last


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


def free_after(policy: Policy, needed: int, paths: int) -> int:
    """Free slots of 76 that were full, after so many were needed for so many running paths."""
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(76)
    leaves = lab.sprout([(tree.root, 4)], GREEDY, 16)
    assert lab.memory.free == 0
    lab.residency.fit(needed, leaves[:paths], "pressure")
    return lab.memory.free


def test_what_a_policy_frees_at_once_is_for_each_running_path() -> None:
    policy = dataclasses.replace(guarded("streaming"), trigger=Trigger(spare=6))
    assert [free_after(policy, 3, paths) for paths in (1, 2, 3)] == [6, 12, 18]
    assert free_after(policy, 14, 2) == 14


def test_a_policy_frees_at_most_half_and_nothing_protected() -> None:
    policy = dataclasses.replace(guarded("streaming"), trigger=Trigger(spare=1000))
    assert free_after(policy, 4, 1) == 4 + 72 // 2
    # the sinks and the last 16 tokens before the end of each path stay
    careful = dataclasses.replace(policy, protect=Protect(sinks=2, recent=16))
    assert free_after(careful, 4, 4) == 76 - (2 + 4 * 16)
