"""What is left behind when a forward fails, a search is interrupted, or the budget runs out in its middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import build
from trees import Lab

from arbor import Solver
from arbor.engine.runner import ModelRunner
from arbor.errors import BudgetInfeasible
from arbor.events import Answered, Boundary, Evicted
from arbor.trace import read_trace
from arbor.trace.replay import Replay
from arbor.tree import NodeState


class Failure(RuntimeError):
    """Stands for an out-of-memory error in the middle of a forward."""


def fail_after(monkeypatch: pytest.MonkeyPatch, forwards: int) -> None:
    """Let so many forwards through, then fail one, then work again."""
    right = ModelRunner.forward
    count = 0

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == forwards + 1:
            raise Failure
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


def test_a_failed_rehydration_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    right = lab.ask([tree.root], [(7, 8)])
    lab.memory.release([tree.root])
    fail_after(monkeypatch, 0)

    with pytest.raises(Failure):
        lab.ask([tree.root], [(7, 8)])

    assert lab.memory.used == 0
    again = lab.ask([tree.root], [(7, 8)])
    assert float((again - right).abs().max()) < 1e-5


def test_an_interruption_gives_up_blocks_in_progress_and_waves_not_begun() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots=24)
    steps = 0

    def interrupted() -> bool:
        nonlocal steps
        steps += 1
        return steps > 3

    lab.open(tree, 24, interrupted)
    lab.extend(tree.root)
    children = lab.sprout([(tree.root, 4)])

    assert [child.state for child in children] == [NodeState.PRUNED] * 4
    assert [len(child.tokens) for child in children][2:] == [0, 0]
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
    told = [event for event in lab.events if isinstance(event, Boundary)][2:]
    for child, event in zip(first.children, told, strict=True):
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


def test_a_prompt_that_a_policy_cannot_squeeze_in_leaves_nothing_behind() -> None:
    lab = Lab(build("llama"), policy="full", mode="lossy", rehydrate="off", debug=True)
    with pytest.raises(BudgetInfeasible, match="policy 'full'"):
        lab.plant(14, tuple(range(3, 33)))

    assert lab.memory.used == 0


def test_a_search_whose_budget_runs_out_tells_the_best_answer_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    search = {"name": "tot", "strategy": "dfs", "width": 4, "max_visited": 12, "stop_value": None}
    with Solver(controller=search, policy="full", budget="188tok") as solver:
        monkeypatch.setattr(
            type(solver.task), "answer", lambda self, problem, thoughts: thoughts[-1]
        )
        with pytest.raises(BudgetInfeasible) as caught:
            solver.solve("4 5 6 10", trace=path)

    trace = read_trace(path)
    replay = Replay.of(trace)
    answered = next(event for event in trace.events if isinstance(event, Answered))
    assert replay.problems == []
    assert replay.ended is not None and replay.ended.status == "error"
    assert NodeState.OPEN not in {block.state for block in replay.blocks.values()}
    assert answered.node is not None and answered.text == replay.blocks[answered.node].text
    assert caught.value.data == {
        "budget": 188,
        "needed": caught.value.needed,
        "answer": answered.text,
    }
