"""A task whose questions grow with the thoughts keeps the promise of the plan, or is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.slow_cases import only

from arbor import Solver, read_trace
from arbor.errors import BudgetInfeasible
from arbor.events import Answered
from arbor.tasks.base import BlockLimits, Problem, Question
from arbor.tasks.game24 import Game24
from arbor.verifiers.base import Verdict

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
EACH = 40  # words more in a question for each thought of its path


@dataclass(frozen=True)
class Growing(Game24):
    """The Game of 24 with questions that grow by the thought."""

    max_question_tokens: int | None = None

    @property
    def boundary(self) -> BlockLimits:
        return replace(super().boundary, max_tokens=16)

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        asked = super().question(problem, thoughts)
        return replace(asked, text=" 4" * EACH * len(thoughts) + asked.text)


SEARCHES: dict[str, dict[str, Any]] = {
    "chain": {"controller": "chain,samples=2"},
    "bfs": {"controller": {"name": "tot", "beam": 2, "width": 3}},
    "full": {"controller": {"name": "tot", "beam": 2, "width": 3}, "policy": "full"},
    "lossy": {"controller": "chain,samples=2", "mode": "lossy", "policy": "streaming"},
}
PLAIN = Solver(task=Game24())
LONGEST = len(PLAIN.tokenizer.encode(" 4" * EACH * 3 + "Reachable?", add_special_tokens=False))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_declared_bound_keeps_every_budget_that_the_plan_accepts(name: str) -> None:
    with Solver(task=Growing(max_question_tokens=LONGEST), **SEARCHES[name]) as solver:
        plan = solver.plan(PUZZLE)
        slots = plan.full_tokens if name == "full" else plan.enough_tokens
        solution = solver.solve(PUZZLE, budget=f"{slots}tok")
        with pytest.raises(BudgetInfeasible) as caught:
            solver.plan(PUZZLE, budget=f"{plan.smallest_tokens - 1}tok")

    assert plan.question_tokens == LONGEST
    assert solution.metrics.asked > 0
    assert caught.value.needed == plan.smallest_tokens


@pytest.mark.parametrize("name", only(["bfs"], ["chain", "bfs", "lossy"]))
def test_a_question_longer_than_planned_names_its_task_and_what_works(
    name: str, tmp_path: Any
) -> None:
    """Each time the number named is declared, the search gets further, and in the end it is
    done."""
    task, path = Growing(), tmp_path / "run.arbor.jsonl"
    budget, named = f"{Solver(task=task, **SEARCHES[name]).plan(PUZZLE).enough_tokens}tok", []
    while True:
        with Solver(task=task, budget=budget, debug=True, **SEARCHES[name]) as solver:
            try:
                solution = solver.solve(PUZZLE, trace=path)
                break
            except BudgetInfeasible as error:
                known = solver.plan(PUZZLE)
                asked = error.data["question_tokens"]
                assert asked > known.question_tokens and error.needed > known.budget_tokens
                assert f"question of {asked} tokens by the task 'game24'" in error.message
                assert f"max_question_tokens = {asked}" in error.hint
                assert f"{error.needed}tok works" in error.hint
                assert "answer" in error.data
                answers = [e for e in read_trace(path).events if isinstance(e, Answered)]
                assert [answer.text for answer in answers] == [error.data["answer"]]
                named.append(asked)
                task, budget = Growing(max_question_tokens=asked), f"{error.needed}tok"

    assert named == sorted(set(named)) and 1 <= len(named) <= 3
    assert solution.metrics.asked > 0
    with Solver(task=Growing(max_question_tokens=LONGEST), **SEARCHES[name]) as solver:
        assert solver.solve(PUZZLE).text == solution.text or name == "lossy"


@dataclass(frozen=True)
class LongQuestion:
    """A verifier with a question of its own, and perhaps a bound of its tokens."""

    bound: int | None = None
    needs_model = True

    def verify(self, task: Any, problem: Problem, candidates: Any, engine: Any) -> Verdict:
        engine.ask(candidates, [[5] * 80] * len(candidates))
        return Verdict((0.5,) * len(candidates), len(candidates))

    def most_question_tokens(self, *given: Any) -> int | None:
        return self.bound


def test_a_verifiers_own_question_longer_than_planned_names_the_verifier() -> None:
    controller = {"name": "tot", "beam": 1, "width": 1}
    with Solver(controller=controller, verifier=LongQuestion()) as solver:
        budget = f"{solver.plan(PUZZLE).smallest_tokens}tok"
        with pytest.raises(BudgetInfeasible) as caught:
            solver.solve(PUZZLE, budget=budget)
    with Solver(controller=controller, verifier=LongQuestion(80)) as solver:
        assert solver.solve(PUZZLE, budget=f"{caught.value.needed}tok").metrics.asked

    named = "a question of 80 tokens by the verifier 'test_questions:LongQuestion', planned for "
    assert named in caught.value.message and "task" not in caught.value.message
    assert caught.value.hint.startswith("Let the verifier's most_question_tokens(…) return 80")
