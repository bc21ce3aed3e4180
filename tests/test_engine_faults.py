"""What is left behind when a forward fails, a search is interrupted, or the budget runs out in its
middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build
from support.trees import PROMPT, Lab

from arbor import Solver
from arbor.engine.decoding import Decoding
from arbor.engine.forest_state import LastLogits
from arbor.errors import BudgetInfeasible, OutOfMemory
from arbor.events import Answered, Boundary, Evicted, Rehydrated
from arbor.memory import KVMemory
from arbor.model.runner import ModelRunner
from arbor.retention.allocators.by_block import Full
from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.policy import Policy
from arbor.run.verification import Valuation
from arbor.trace import read_trace
from arbor.trace.fold import Replay
from arbor.tree import NodeState

pytestmark = pytest.mark.usefixtures("loaded_once")


class Failure(RuntimeError):
    """Stands for an out-of-memory error in the middle of a forward."""


def fail_after(
    monkeypatch: pytest.MonkeyPatch, forwards: int, failure: type[Exception] = Failure
) -> None:
    """Let so many forwards through, then fail one, then work again."""
    right = ModelRunner.forward
    count = 0

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == forwards + 1:
            raise failure
        return right(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)


@pytest.mark.parametrize("forwards", [0, 3])
def test_a_failed_forward_leaves_no_token_that_claims_kv_it_never_got(
    monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    held = lab.memory.used
    fail_after(monkeypatch, forwards)

    with pytest.raises(Failure):
        lab.sprout([(tree.root, 3)])

    lab.memory.check()
    assert lab.memory.used == held + 3 * forwards
    for child in tree.root.children:
        assert child.span.exact.sum() == forwards


class CUDAFailure(torch.OutOfMemoryError):
    """What torch raises where a GPU has no more memory."""

    def __str__(self) -> str:
        return "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total of 24 GiB"


@pytest.mark.parametrize("forwards", [0, 3])
def test_where_a_forward_does_not_fit_into_memory_a_growth_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    held = lab.memory.used
    before = lab.ask([tree.root], [(7,)])
    fail_after(monkeypatch, forwards, CUDAFailure)

    with pytest.raises(OutOfMemory, match=r"wanted 4,096.0 GiB with .* in decode of 3 tokens"):
        lab.sprout([(tree.root, 3)])

    lab.memory.check()
    assert lab.memory.used == held
    children = tree.root.children
    assert [child.state for child in children] == [NodeState.PRUNED] * 3
    assert [len(child.tokens) for child in children] == [forwards] * 3
    for child, event in zip(
        children, [e for e in lab.events if isinstance(e, Boundary)], strict=True
    ):
        assert (event.ids, event.logprob) == (tuple(child.tokens), child.logprob)
        assert (child.logprob < 0) == (forwards > 0), "of the tokens it has, and of no other"
    again = lab.sprout([(tree.root, 3)])  # the search may go on
    assert [child.state for child in again] == [NodeState.CLOSED] * 3
    assert float((lab.ask([tree.root], [(7,)]) - before).abs().max()) < 1e-5


def test_where_a_question_does_not_fit_into_memory_the_tree_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    held = lab.memory.used
    right = lab.ask([tree.root], [(7, 8)])
    fail_after(monkeypatch, 0, CUDAFailure)

    with pytest.raises(OutOfMemory, match="in verify of 2 tokens"):
        lab.ask([tree.root], [(7, 8)])

    lab.memory.check()
    assert lab.memory.used == held
    assert float((lab.ask([tree.root], [(7, 8)]) - right).abs().max()) < 1e-5


def test_a_failed_rehydration_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    right = lab.ask([tree.root], [(7, 8)])
    lab.memory.free_blocks([tree.root])
    fail_after(monkeypatch, 0)

    with pytest.raises(Failure):
        lab.ask([tree.root], [(7, 8)])

    assert lab.memory.used == 0
    again = lab.ask([tree.root], [(7, 8)])
    assert float((again - right).abs().max()) < 1e-5


def test_an_interruption_gives_up_blocks_in_progress_and_those_that_wait() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots=24)
    steps = 0

    def interrupted() -> bool:
        nonlocal steps
        steps += 1
        return steps > 3

    lab.open(tree, 24, interrupted=interrupted)
    lab.extend(tree.root)
    children = lab.sprout([(tree.root, 4)])

    assert [child.state for child in children] == [NodeState.PRUNED] * 4
    assert [len(child.tokens) for child in children] == [3, 3, 3, 0]
    stops = [event.stop for event in lab.events if isinstance(event, Boundary)]
    assert stops == ["limit"] * 4


@pytest.mark.parametrize(
    ("slots", "length"),
    [
        (28, 5),  # one wave, cut off in the middle of its blocks
        (25, 2),  # the first wave has ended when the second does not fit
    ],
)
def test_where_a_policy_gives_up_nothing_a_failed_growth_leaves_nothing_behind(
    slots: int, length: int
) -> None:
    lab = Lab(build("llama"), policy="full", debug=True)
    tree = lab.plant(slots)
    (first,) = lab.sprout([(tree.root, 1)])
    (second,) = lab.sprout([(tree.root, 1)], length=length)
    held = lab.memory.used
    before = lab.ask([first], [(7,)])

    with pytest.raises(BudgetInfeasible, match="needs") as caught:
        lab.sprout([(first, 2)])

    assert caught.value.budget == slots
    assert slots < caught.value.needed <= held + 5 * 2
    lab.memory.check()
    assert lab.memory.used == held
    assert [child.state for child in first.children] == [NodeState.PRUNED] * 2
    ended = [event for event in lab.events if isinstance(event, Boundary)][2:]
    for child, event in zip(first.children, ended, strict=True):
        assert event.node == child.id
        assert event.ids == tuple(child.tokens)  # none that was chosen and never run
        assert len(child.span) == len(child.tokens)
    (gone,) = [event for event in lab.events if isinstance(event, Evicted)]
    assert dict(gone.nodes) == {
        child.id: len(child.tokens) for child in first.children if child.tokens
    }
    assert float((lab.ask([first], [(7,)]) - before).abs().max()) < 1e-5
    lab.forget([second])
    assert len(lab.sprout([(first, 1)])) == 1  # and the search may go on


@dataclass(frozen=True)
class Stingy:
    """An allocator of one's own that evicts nothing; no plan can know."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return Full().counts(blocks, room, scorer)


def failing_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`Valuation.steps`; the first forward after a path has ended does not fit into memory."""
    right = Valuation.steps

    def verify(self: Valuation, children: list[Any]) -> Any:
        yield from right(self, children)
        if any(child.state is NodeState.TERMINAL for child in children):
            fail_after(monkeypatch, 1, CUDAFailure)

    return verify


@pytest.mark.parametrize("lacking", ["budget", "memory"])
def test_a_search_that_runs_out_of_room_reports_the_best_answer_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    search = {"name": "tot", "strategy": "dfs", "width": 4, "max_visited": 12, "stop_value": None}
    budget = "188tok" if lacking == "budget" else "full"
    kind = BudgetInfeasible if lacking == "budget" else OutOfMemory
    policy = Policy(Stingy())
    with Solver(controller=search, policy=policy, budget=budget, debug=True) as solver:
        if lacking == "memory":
            solver.load()
            monkeypatch.setattr(Valuation, "steps", failing_after_an_answer(monkeypatch))
        monkeypatch.setattr(
            type(solver.task), "answer", lambda self, problem, thoughts: thoughts[-1]
        )
        with pytest.raises(kind) as caught:
            solver.solve("4 5 6 10", trace=path)
        solver.engine.memory.check()

    trace = read_trace(path)
    replay = Replay.of(trace)
    answered = next(event for event in trace.events if isinstance(event, Answered))
    assert replay.problems == []
    assert replay.ended is not None and replay.ended.status == "error"
    assert NodeState.OPEN not in {block.state for block in replay.blocks.values()}
    assert answered.node is not None and answered.text == replay.blocks[answered.node].text
    assert caught.value.data["answer"] == answered.text
    if isinstance(caught.value, BudgetInfeasible):
        assert caught.value.data == {
            "budget": 188,
            "needed": caught.value.needed,
            "answer": answered.text,
        }


def test_a_rehydration_that_fails_is_reported_as_evicted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    (first,) = lab.sprout([(tree.root, 1)])
    lab.memory.free_blocks([first])
    lab.state.changed([first])
    heard = len(lab.events)
    fail_after(monkeypatch, 0)
    with pytest.raises(Failure):
        lab.ask([first], [(7, 8)])

    back, gone = lab.events[heard:]
    assert isinstance(back, Rehydrated)
    assert isinstance(gone, Evicted)
    assert gone.nodes == back.nodes == ((first.id, len(first.tokens)),)


def test_a_failure_while_questions_are_laid_out_leaks_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(64)
    held = lab.memory.used
    right, count = KVMemory.borrow, 0

    def borrow(self: KVMemory, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise Failure
        return right(self, *args)

    monkeypatch.setattr(KVMemory, "borrow", borrow)
    with pytest.raises(Failure):
        lab.ask([tree.root] * 2, [(7, 8), (9,)])
    assert lab.memory.used == held

    lab.memory.table.take(3)  # as a failure within the memory itself would leave it
    assert lab.plant(64)
    assert lab.memory.used == len(PROMPT)


def fail_as_blocks_end(monkeypatch: pytest.MonkeyPatch, at: int, failure: BaseException) -> None:
    """Fail once, where the blocks of a step end: what joined it has had its results by then."""
    right = Decoding.end
    count = 0

    def end(self: Decoding, *args: Any) -> None:
        nonlocal count
        count += 1
        with monkeypatch.context() as patch:
            if count == at:
                patch.setattr(LastLogits, "remember", raising(failure))
            right(self, *args)

    monkeypatch.setattr(Decoding, "end", end)


def raising(failure: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise failure

    return fail


PROBLEMS = ("4 5 6 10", "1 2 3 4", "3 3 8 8")
NARROW = {"max_expansions": 4, "max_depth": 2, "step_tokens": 12}


@pytest.mark.parametrize(
    ("controller", "at"),
    [*(("tot,width=3", at) for at in (1, 4, 10, 13)), ("chain", 1), ("chain", 4)],
)
def test_a_failure_after_answers_were_handed_out_ends_what_it_concerns_and_no_more(
    monkeypatch: pytest.MonkeyPatch, controller: str, at: int
) -> None:
    with Solver(controller=controller, budget="70tok", **NARROW) as solver:
        right = solver.solve_batch(PROBLEMS, concurrency=3)
        fail_as_blocks_end(monkeypatch, at, CUDAFailure())
        found = solver.solve_batch(PROBLEMS, concurrency=3, on_error="return")
        again = solver.solve_batch(PROBLEMS, concurrency=3)

    ended = [one.error["code"] if one.error else one.finish_reason for one in found]
    assert "oom" in ended
    assert {*ended} <= {"oom", "cut"}
    for one, reference, later in zip(found, right, again, strict=True):
        assert later.candidates == reference.candidates
        assert one.error or one.candidates == reference.candidates


@pytest.mark.parametrize("at", [12, 13])
def test_an_interruption_as_a_block_ends_is_told_as_what_it_is(at: int) -> None:
    blocks = 0

    def interrupt(event: object) -> None:
        nonlocal blocks
        blocks += isinstance(event, Boundary)
        if blocks == at and isinstance(event, Boundary):
            raise KeyboardInterrupt

    settings = {"budget": "120tok", **NARROW}
    with Solver(listeners=(interrupt,), **settings) as solver:
        with pytest.raises(KeyboardInterrupt):
            solver.solve_batch(PROBLEMS, concurrency=3, on_error="return")
        again = solver.solve_batch(PROBLEMS, concurrency=3)
    with Solver(**settings) as solver:
        assert [one.answer for one in again] == [
            one.answer for one in solver.solve_batch(PROBLEMS, concurrency=3)
        ]
