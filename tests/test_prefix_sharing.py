"""Prompts that begin alike share KV: fewer rows, fewer slots, the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.models import Words, build
from support.slow_cases import every
from support.trees import QUESTIONS, SAMPLED, Lab, relative_error

from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Event, Evicted, Rehydrated, Shared
from arbor.memory.prefix_cache import MOST_PREFIXES
from arbor.memory.stores import LowerRoom
from arbor.model.fetch_costs import FetchCosts
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

EXAMPLES = tuple(8 + (7 * i * i + 3 * i) % 80 for i in range(40))
FIRST, SECOND, THIRD = ((*EXAMPLES, *end) for end in ((9, 3), (60, 2, 71), (9, 41)))


def growth(length: int = 6) -> Growth:
    return Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), length, 8), ()))


def opened(lab: Lab, *prompts: Sequence[int], pool: int = 400) -> list[ThoughtTree]:
    trees = [ThoughtTree(prompt) for prompt in prompts]
    for tree in trees:
        lab.open(tree, pool, alone=False, pool=pool)
    return trees


def run(lab: Lab) -> None:
    while lab.busy:
        lab.step()


def extended(lab: Lab, *trees: ThoughtTree) -> None:
    """Run the prompts of trees, all of them at once."""
    operations = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)
    for operation in operations:
        operation.result()


def slots(tree: ThoughtTree, count: int = len(EXAMPLES)) -> list[int]:
    return tree.root.span.slot[:count].tolist()


def alone(prompt: Sequence[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Answers after a prompt, and its children, in an engine that never saw another prompt."""
    lab = Lab(build("llama"))
    tree = lab.plant(prompt=prompt)
    answers = lab.ask([tree.root] * len(QUESTIONS), QUESTIONS)
    return answers, [child.tokens for child in lab.grow([(tree.root, 2)], growth())]


def is_as_alone(lab: Lab, tree: ThoughtTree) -> None:
    answers, children = alone(tree.root.tokens)
    assert relative_error(lab.ask([tree.root] * len(QUESTIONS), QUESTIONS), answers) < 1e-5
    assert [child.tokens for child in lab.grow([(tree.root, 2)], growth())] == children


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_what_prompts_have_in_common_is_computed_and_held_once(together: bool) -> None:
    lab = Lab(build("llama"), debug=True)
    trees = opened(lab, FIRST, SECOND, THIRD)
    if together:
        extended(lab, *trees)
    else:
        for tree in trees:
            extended(lab, tree)

    once = len(FIRST) + len(SECOND) + len(THIRD) - len(EXAMPLES) - len(EXAMPLES) - 1
    assert lab.rows() == once == lab.memory.used
    assert slots(trees[0]) == slots(trees[1]) == slots(trees[2])
    assert slots(trees[2], 41)[-1] == slots(trees[0], 41)[-1], "the first and third share one more"
    for tree, prompt in zip(trees, (FIRST, SECOND, THIRD), strict=True):
        assert lab.memory.used_by(tree) == len(prompt), "a tree's account is as if it were alone"
    for tree in trees:
        is_as_alone(lab, tree)


def test_a_prompt_that_is_there_already_costs_one_row_for_its_logits() -> None:
    lab = Lab(build("llama"), debug=True)
    first, second = opened(lab, FIRST, FIRST)
    extended(lab, first, second)

    assert lab.rows() == len(FIRST) + 1
    is_as_alone(lab, second)


def test_a_tree_that_goes_leaves_what_others_use() -> None:
    lab = Lab(build("llama"), debug=True)
    first, second = opened(lab, FIRST, SECOND)
    extended(lab, first, second)
    held = slots(second)
    lab.close(first)

    assert slots(second) == held
    table = lab.memory.table
    assert (table.owner[held] == second.root.row).all()
    assert (table.tree[held] == second.number).all()
    is_as_alone(lab, second)


def test_the_prompt_of_a_finished_problem_serves_later_ones() -> None:
    lab = Lab(build("llama"), debug=True)
    (first,) = opened(lab, FIRST)
    is_as_alone(lab, first)
    lab.close(first)
    assert lab.memory.used == len(FIRST) and lab.memory.free == 400 - len(FIRST)
    assert lab.memory.available == 400
    lab.events.clear()

    (second,) = opened(lab, SECOND)
    extended(lab, second)

    assert lab.rows() == len(SECOND) - len(EXAMPLES)
    shared = [event for event in lab.events if isinstance(event, Shared)]
    assert [event.nodes for event in shared] == [((0, len(EXAMPLES)),)]
    is_as_alone(lab, second)


@pytest.mark.parametrize("children", [1, 2])
def test_an_only_continuation_serves_the_next_turn(children: int) -> None:
    lab = Lab(build("llama"), debug=True)
    (first,) = opened(lab, FIRST)
    child = lab.grow([(first.root, children)], growth())[0]
    turn = (*FIRST, *child.tokens, 60, 2, 71)
    lab.close(first)
    lab.events.clear()

    (second,) = opened(lab, turn)
    extended(lab, second)

    known = len(FIRST) + (len(child.tokens) if children == 1 else 0)
    assert lab.rows() == len(turn) - known
    assert [each.nodes for each in lab.events if isinstance(each, Shared)] == [((0, known),)]
    is_as_alone(lab, second)
    lab.close(second)
    assert lab.memory.available == 400


def test_kept_prompts_leave_before_any_block_does() -> None:
    lab = Lab(build("llama"), debug=True, policy="full")
    pool = 2 * len(FIRST)
    (first,) = opened(lab, FIRST, pool=pool)
    extended(lab, first)
    lab.close(first)
    other = tuple(reversed(FIRST))
    (second,) = opened(lab, other, pool=pool)
    extended(lab, second)
    assert lab.memory.used == 2 * len(FIRST)

    answers = lab.ask([second.root], [(7, 8, 9)])

    fresh = Lab(build("llama"))
    tree = fresh.plant(prompt=other)
    assert relative_error(answers, fresh.ask([tree.root], [(7, 8, 9)])) < 1e-5
    assert lab.memory.used == len(FIRST) and not lab.memory.prefixes
    assert not any(isinstance(event, Evicted) for event in lab.events)


def test_a_prompt_that_comes_again_pushes_out_no_other() -> None:
    lab = Lab(build("llama"), debug=True, policy="full")
    for prompt in (FIRST, *[SECOND] * (MOST_PREFIXES + 1)):
        (tree,) = opened(lab, prompt)
        extended(lab, tree)
        lab.close(tree)

    assert len(lab.memory.prefixes) == 2
    assert lab.memory.used == len(FIRST) + len(SECOND) - len(EXAMPLES)
    (tree,) = opened(lab, FIRST)
    lab.events.clear()
    extended(lab, tree)
    assert [each.nodes for each in lab.events if isinstance(each, Shared)] == [((0, len(FIRST)),)]


def test_shared_tokens_leave_last_and_come_back_once() -> None:
    """A path without common tokens that takes nearly all of the pool drives out the shared ones."""
    pool = 70
    lab = Lab(build("llama"), debug=True)
    first, second, other = opened(lab, FIRST, SECOND, tuple(range(9, 9 + 60)), pool=pool)
    extended(lab, first, second)
    lab.events.clear()
    extended(lab, other)

    gone = [count for e in lab.events if isinstance(e, Evicted) for _, count in e.nodes]
    assert sum(gone) > len(EXAMPLES), "both trees report what they lost"
    assert lab.memory.used <= pool
    lab.events.clear()
    extended(lab, first, second)
    assert slots(first) == slots(second)
    is_as_alone(lab, first)
    is_as_alone(lab, second)
    is_as_alone(lab, other)


COSTS = "host=%s+%s;key=0.1;forward=1:10.0,8:30.0,64:400.0"
CHEAP, DEAR = (FetchCosts.parse(COSTS % cost) for cost in (("0.1", "0.01"), ("4000.0", "1.0")))
LAST = len(FIRST) - 1


@pytest.mark.parametrize("gone", [(20, 21), (LAST - 1, LAST)], ids=["inside", "last"])
@pytest.mark.parametrize("prompt", [FIRST, (*FIRST, 5), SECOND], ids=["same", "longer", "other"])
@pytest.mark.parametrize("costs", every(3, [None, CHEAP, DEAR]), ids=["no costs", "cheap", "dear"])
def test_two_prompts_want_what_only_one_has_stored(
    costs: FetchCosts | None, prompt: tuple[int, ...], gone: tuple[int, ...]
) -> None:
    """Where a copy costs more than it saves, the one computes the tokens and the other follows."""
    lab = Lab(build("llama"), debug=True, lower=LowerRoom(60), costs=costs)
    (first,) = opened(lab, FIRST)
    extended(lab, first)
    lab.memory.evict(first.root, np.array(gone))
    lab.memory.lower.take_moves()
    (second,) = opened(lab, prompt)
    lab.events.clear()
    extended(lab, first, second)

    # both compute their last tokens, for logits
    common = next((i for i in range(LAST) if prompt[i] != FIRST[i]), LAST)
    assert slots(first, common) == slots(second, common)
    fetches = [e for e in lab.events if isinstance(e, Rehydrated) and e.mode == "fetch"]
    assert bool(fetches) == (costs is not DEAR)
    is_as_alone(lab, first)
    is_as_alone(lab, second)


def test_shared_tokens_stay_while_the_path_of_one_tree_runs() -> None:
    lab = Lab(build("llama"), debug=True)
    first, second = opened(lab, FIRST, SECOND, pool=len(FIRST) + 8)
    extended(lab, first)
    held = slots(first)
    growing = lab.begin_grow([(first.root, 1)], growth())
    lab.step()
    visit = lab.begin_extend(second.root)
    while not growing.done:
        lab.step()
        assert slots(first) == held
    run(lab)

    visit.result()
    is_as_alone(lab, second)


@pytest.mark.parametrize(("spare", "steps"), [(0, 1), (-1, 2)])
def test_prompts_join_together_that_fit_thanks_to_what_they_share(spare: int, steps: int) -> None:
    pool = len(FIRST) + len(SECOND) - len(EXAMPLES) + spare
    lab = Lab(build("llama"), debug=True)
    first, second, other = opened(lab, FIRST, SECOND, FIRST[::-1], pool=pool)
    pairs = [(first, second), (first, other), (second, first), (other, second)]
    for pair, most in zip(pairs, (steps, 2, steps, 2), strict=True):
        for tree in pair:
            lab.begin_extend(tree.root)
        for _ in range(most):
            assert lab.busy
            lab.step()
        assert not lab.busy


def test_prompts_keep_what_the_running_tree_uses_and_report_once_what_they_lose() -> None:
    others = tuple(8 + (5 * i * i + i) % 80 for i in range(1, 41))
    pool = 100
    lab = Lab(build("llama"), debug=True)
    prompts = (FIRST, SECOND, (*others, 7, 8), (*others, 9, 10, 11))
    heard: dict[ThoughtTree, list[Event]] = {ThoughtTree(prompt): [] for prompt in prompts}
    for tree, events in heard.items():
        lab.open(tree, pool, alone=False, pool=pool, emit=events.append)
    first, second, third, fourth = heard
    extended(lab, first, second, third, fourth)

    growing = lab.begin_grow([(first.root, 1)], growth(length=20))  # needs what the last two share
    run(lab)

    assert len(growing.result()[0].tokens) == 20
    lost = {
        tree: sum(count for e in events if isinstance(e, Evicted) for _, count in e.nodes)
        for tree, events in heard.items()
    }
    assert lost == {first: 0, second: 3, third: len(others) + 2, fourth: len(others) + 3}
    assert slots(second) == slots(first)
    assert not third.root.span.resident.any() and not fourth.root.span.resident.any()


def test_a_failed_prefill_takes_back_what_was_to_be_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    trees = opened(lab, FIRST, SECOND)
    right = lab.runner.forward

    def fail(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(lab.runner, "forward", right)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(lab.runner, "forward", fail)
    visits = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)

    for visit in visits:
        with pytest.raises(RuntimeError, match="the device is gone"):
            visit.result()
    assert lab.memory.used == 0
    shared = sum(n for e in lab.events if isinstance(e, Shared) for _, n in e.nodes)
    gone = sum(n for e in lab.events if isinstance(e, Evicted) for _, n in e.nodes)
    assert shared == gone == len(EXAMPLES)
    extended(lab, *trees)
    for tree in trees:
        is_as_alone(lab, tree)
