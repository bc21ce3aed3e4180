"""Operations on several trees of one engine: what goes wrong with one leaves the others as they
are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import Words, build
from support.trees import PROMPT, SAMPLED, Lab
from torch import Tensor

from arbor.engine import scheduler
from arbor.engine.operation import Growth, Row
from arbor.engine.rehydration import Rehydration
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import ModelSampler
from arbor.errors import ModelError, UsageError
from arbor.events import Event, Forwarded, Rehydrated
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

SHORT = (9, 3, 3, 41)


def growth(length: int = 5, seed: int = 3) -> Growth:
    return Growth(seed, SAMPLED, StopRule(Words(), BlockLimits((), length, 8), ()))


def opened(lab: Lab, *prompts: Sequence[int], pool: int = 200) -> list[ThoughtTree]:
    """Trees next to each other, their prompts not computed yet."""
    trees = [ThoughtTree(prompt) for prompt in prompts]
    for tree in trees:
        lab.open(tree, pool, alone=False, pool=pool)
    return trees


def run(lab: Lab) -> None:
    while lab.busy:
        lab.step()


class Failure(RuntimeError):
    """Stands for whatever stops a forward."""


def test_a_failed_forward_ends_what_took_part_and_not_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    first, second = opened(lab, PROMPT, PROMPT, pool=20)  # one path fits at a time
    running = lab.begin_grow([(first.root, 1)], growth())
    waiting = lab.begin_grow([(second.root, 1)], growth())
    lab.step()
    lab.step()
    right = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", lambda *args, **kwargs: raise_failure())
    lab.step()
    monkeypatch.setattr(ModelRunner, "forward", right)

    with pytest.raises(Failure):
        running.result()
    assert not waiting.done
    lab.close(first)
    run(lab)
    (child,) = waiting.result()
    assert child.tokens == alone(PROMPT, growth())


def test_where_work_cannot_join_the_youngest_ends_and_the_others_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    first, second, third = opened(lab, PROMPT, SHORT, SHORT[::-1])
    lab.extend(second.root)
    visit = lab.begin_extend(first.root)
    growing = lab.begin_grow([(second.root, 1)], growth())
    last = lab.begin_extend(third.root)
    with monkeypatch.context() as patched:
        patched.setattr(Rehydration, "place", lambda *args, **kwargs: raise_failure())
        lab.step()

    run(lab)

    with pytest.raises(Failure):
        last.result()
    visit.result()
    assert first.root.span.exact.all()
    assert [child.tokens for child in growing.result()] == [alone(SHORT, growth())]


def test_an_interruption_is_none_of_a_question_s_business() -> None:
    lab = Lab(build("llama"), debug=True)
    pool = len(PROMPT) + 7
    first, second = (ThoughtTree(prompt) for prompt in (PROMPT, SHORT))
    lab.open(first, pool, alone=False, pool=pool)
    lab.open(second, pool, alone=False, pool=pool, interrupted=lambda: True)
    growing = lab.begin_grow([(first.root, 1)], growth(7))
    asking = lab.begin_ask([second.root], [(7, 8, 9)])  # waits until the block has ended

    run(lab)

    assert growing.result()[0].state is NodeState.CLOSED
    assert second.root.state is not NodeState.PRUNED
    assert asking.result().shape[0] == 1


def raise_failure() -> None:
    raise Failure


def alone(prompt: Sequence[int], how: Growth) -> list[int]:
    """The tokens of the first child of a root that grows in an engine of its own."""
    lab = Lab(build("llama"))
    tree = lab.plant(prompt=prompt)
    (child,) = lab.grow([(tree.root, 1)], how)
    return child.tokens


def test_the_accounts_of_a_search_are_those_it_has_alone() -> None:
    def accounts(events: list[Event]) -> list[tuple[Any, ...]]:
        return [
            (e.kind, e.rows, e.steps, e.read_tokens, e.unique_read_tokens, e.held)
            for e in events
            if isinstance(e, Forwarded)
        ]

    def grow(*prompts: Sequence[int]) -> list[list[tuple[Any, ...]]]:
        lab = Lab(build("llama"), debug=True)
        heard: list[list[Event]] = [[] for _ in prompts]
        trees = [ThoughtTree(prompt) for prompt in prompts]
        for tree, events in zip(trees, heard, strict=True):
            lab.open(tree, 200, alone=False, pool=200, emit=events.append)
        for tree in trees:
            lab.begin_grow([(tree.root, 2)], growth(len(tree.root.tokens)))
        run(lab)
        for tree in trees:
            first, second = tree.root.children
            lab.begin_ask([second, first, second], [(7,), (7, 8), (9,)])
        run(lab)
        return [accounts(events) for events in heard]

    prompts = (PROMPT, SHORT, SHORT[::-1])
    assert grow(*prompts) == [grow(prompt)[0] for prompt in prompts]


def test_a_prompt_that_takes_the_place_of_a_closed_one_is_computed_for_the_first_time() -> None:
    lab = Lab(build("llama"), debug=True)
    first, stays = opened(lab, PROMPT, SHORT)
    for tree in (first, stays):
        lab.begin_grow([(tree.root, 2)], growth())
    run(lab)
    rows = [node.row for node in first]
    lab.close(first)
    lab.events.clear()

    (second,) = opened(lab, PROMPT[::-1])
    growing = lab.begin_grow([(second.root, 2)], growth())
    run(lab)

    assert sorted(node.row for node in second) == rows
    assert not any(isinstance(event, Rehydrated) for event in lab.events)
    kinds = [event.kind for event in lab.events if isinstance(event, Forwarded)]
    assert kinds == ["prefill", "decode"]
    assert growing.result()[0].tokens == alone(PROMPT[::-1], growth())


@pytest.mark.parametrize(("most", "forwards"), [(40, [36]), (24, [24, 12]), (5, [5, 5, 2] * 3)])
def test_only_so_many_tokens_join_a_forward(
    monkeypatch: pytest.MonkeyPatch, most: int, forwards: list[int]
) -> None:
    monkeypatch.setattr(scheduler, "MOST_NEW", most)
    lab = Lab(build("llama"), debug=True)
    trees = opened(lab, *((place, *PROMPT[1:]) for place in (9, 10, 11)))
    visits = [lab.begin_extend(tree.root) for tree in trees]
    rows = []
    while lab.busy:
        before = lab.rows()
        lab.step()
        rows.append(lab.rows() - before)

    assert rows == forwards
    for visit in visits:
        visit.result()


class Wrong(ModelSampler):
    """The model's own answers, one of them wrong for one tree.

    Attributes:
        tree: whose answers are wrong.
        what: which of them.
    """

    def __init__(self, what: str) -> None:
        super().__init__(Words())
        self.what = what
        self.tree: ThoughtTree | None = None

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        tokens = super().choose(rows, logits)
        here = [row.node.tree is self.tree and len(row.node.tokens) == 2 for row in rows]
        wrong = self.what == "choose"
        return [-1 if wrong and mine else t for t, mine in zip(tokens, here, strict=True)]

    def stop(self, node: Node, growth: Growth) -> Any:
        return (
            "whim" if self.what == "stop" and node.tree is self.tree else super().stop(node, growth)
        )

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        sure = super().confidence(nodes, logits)
        wrong = self.what == "confidence"
        return [
            float("nan") if wrong and node.tree is self.tree else each
            for node, each in zip(nodes, sure, strict=True)
        ]


@pytest.mark.parametrize("what", ["choose", "stop", "confidence"])
def test_a_wrong_answer_for_one_operation_ends_that_one_and_changes_no_other(what: str) -> None:
    source = Wrong(what)
    lab = Lab(build("llama"), source=source, debug=True)
    first, second, third = opened(lab, SHORT, PROMPT, SHORT)
    source.tree = second
    operations = [lab.begin_grow([(tree.root, 1)], growth()) for tree in (first, second, third)]

    run(lab)

    with pytest.raises(UsageError, match="token-answer"):
        operations[1].result()
    assert [child.state for child in second.root.children] == [NodeState.PRUNED]
    for operation in (operations[0], operations[2]):
        (child,) = operation.result()
        assert child.state is NodeState.CLOSED
        assert child.tokens == alone(SHORT, growth())
        assert child.confidence > 0


class Poisoned(ModelSampler):
    """The model's own tokens, but for one tree whose logits are no numbers after two tokens."""

    tree: ThoughtTree

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        wrong = [row.node.tree is self.tree and len(row.node.tokens) == 2 for row in rows]
        return super().choose(rows, logits.masked_fill(torch.tensor(wrong)[:, None], torch.nan))


def test_logits_of_one_operation_that_are_no_numbers_change_no_other_that_draws_otherwise() -> None:
    lab = Lab(build("llama"), debug=True)
    source = lab._source = Poisoned(Words())
    first, second = opened(lab, SHORT, PROMPT)
    source.tree = second
    cool = dataclasses.replace(growth(), sampling=Sampling(temperature=0.5))
    operations = [
        lab.begin_grow([(first.root, 1)], growth()),
        lab.begin_grow([(second.root, 1)], cool),
    ]

    run(lab)

    with pytest.raises(ModelError):
        operations[1].result()
    assert [child.tokens for child in operations[0].result()] == [alone(SHORT, growth())]


class Failing(ModelSampler):
    """A token source that fails wherever it decides about an end.

    Attributes:
        asked: blocks it was asked about.
    """

    def __init__(self) -> None:
        super().__init__(Words())
        self.asked: list[int] = []

    def stop(self, node: Node, growth: Growth) -> Any:
        self.asked.append(node.id)
        raise Failure(node.id)


def test_an_operation_fails_with_the_first_failure_of_its_token_source() -> None:
    source = Failing()
    lab = Lab(build("llama"), source=source, debug=True)
    first, second = opened(lab, SHORT, PROMPT)
    operations = [lab.begin_grow([(tree.root, 3)], growth()) for tree in (first, second)]

    run(lab)

    for operation, tree in zip(operations, (first, second), strict=True):
        with pytest.raises(Failure, match=f"^{tree.nodes[1].id}$"):
            operation.result()
    assert len(source.asked) == 2  # nothing more is asked about a growth that has failed


def test_an_operation_is_over_in_the_step_in_which_a_listener_ends_another_one_of_its_tree() -> (
    None
):
    lab = Lab(build("llama"), debug=True)
    (tree,) = opened(lab, PROMPT)
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        raise Failure

    lab.open(other := ThoughtTree(SHORT), 200, alone=False, pool=200, emit=listen)
    visits = [lab.begin_extend(other.root) for _ in range(2)]
    well = lab.begin_extend(tree.root)

    lab.step()

    assert not lab.busy and len(heard) == 1
    well.result()
    with pytest.raises(Failure):
        visits[0].result()
    visits[1].result()


def test_an_interrupted_step_leaves_nothing_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    first, _ = opened(lab, PROMPT, SHORT)
    visit = lab.begin_extend(first.root)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lab.step()
    with pytest.raises(KeyboardInterrupt):
        visit.result()
    assert not lab.busy and not lab.held_tokens
    for way in (lab.finish, lab.close, lambda tree: lab.give_up(tree, Failure())):
        way(first)  # as the end of its search does
    second = ThoughtTree(SHORT)
    lab.open(second, 200, alone=False, pool=200, interrupted=lambda: True)
    forwards = 0
    right = ModelRunner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return right(*args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    growing = lab.begin_grow([(second.root, 1)], growth())  # which has nothing to do
    run(lab)

    assert [child.state for child in growing.result()] == [NodeState.PRUNED]
    assert forwards == 0
    assert lab.memory.used == 0
