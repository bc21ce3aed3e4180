"""Searches judged by a model of the verifier's own, in a second engine that ends with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reward_models import OWN
from support.slow_cases import every

from arbor import Solution, Solver, StopSearch
from arbor.errors import BudgetInfeasible
from arbor.events import Event, Scored
from arbor.measure.replay import replay
from arbor.trace.read import read_trace
from arbor.verifiers.combined import Combined
from arbor.verifiers.reward.engine import RewardEngine

pytestmark = pytest.mark.usefixtures("loaded_once")

PROBLEMS = ("4 5 6 10", "1 1 4 6", "3 3 8 8")
SMALL: Mapping[str, Any] = {"controller": "tot,width=4,beam=2", "deterministic": True}
TOLERANCE = 1e-4  # the two engines divide the work into other batches


def texts(solution: Solution) -> list[str]:
    """The texts of the blocks of a search."""
    return [data["text"] for _, data in sorted(solution.to_networkx().nodes(data=True))]


def values(solution: Solution) -> list[float]:
    """The values of the blocks of a search but the root, which has none."""
    return [data["value"] for node, data in sorted(solution.to_networkx().nodes(data=True)) if node]


def engine_of(solver: Solver) -> RewardEngine:
    [model] = solver.setup.verifier_models.values()
    assert isinstance(model, RewardEngine)
    return model


@pytest.fixture(scope="module")
def asked() -> Iterator[list[Solution]]:
    """The searches with the verifier `self`."""
    with Solver(**SMALL) as solver:
        yield solver.solve_batch(PROBLEMS, concurrency=1)


@pytest.mark.parametrize("concurrency", every(2, [1, 8]))
@pytest.mark.parametrize("budget", [pytest.param("full", marks=pytest.mark.slow), "0.2"])
def test_a_copy_of_the_model_gives_the_values_that_the_model_gives(
    concurrency: int, budget: str, asked: list[Solution]
) -> None:
    with Solver(verifier=replace(OWN, budget=budget), **SMALL, debug=True) as solver:
        solutions = solver.solve_batch(PROBLEMS, concurrency=concurrency)

        for solution, own in zip(solutions, asked, strict=True):
            assert texts(solution) == texts(own)
            assert values(solution) == pytest.approx(values(own), abs=TOLERANCE)
            assert solution.answer == own.answer
            assert solution.metrics.asked == 0 < solution.metrics.reward_tokens
        memory = engine_of(solver).load().memory
        assert max(each.metrics.reward_peak_tokens for each in solutions) <= memory.slots
        assert not engine_of(solver).load().state.trees, "closed with the runs"


def test_the_smallest_budget_costs_time_and_no_score(asked: list[Solution]) -> None:
    with (
        Solver(verifier=replace(OWN, budget="1tok"), **SMALL) as solver,
        pytest.raises(BudgetInfeasible, match="one path in the reward model") as caught,
    ):
        solver.plan(PROBLEMS[0])
    least = replace(OWN, budget=f"{caught.value.needed}tok")
    with Solver(verifier=least, **SMALL, debug=True) as solver:
        solution = solver.solve(PROBLEMS[0])

    assert texts(solution) == texts(asked[0])
    assert values(solution) == pytest.approx(values(asked[0]), abs=TOLERANCE)
    metrics = solution.metrics
    assert metrics.reward_peak_tokens <= caught.value.needed < metrics.reward_tokens


def test_a_stopped_search_leaves_nothing_in_the_reward_model() -> None:
    class Stop:
        def __call__(self, event: Event) -> None:
            if isinstance(event, Scored):
                raise self.error

        error: Exception = StopSearch()

    listener = Stop()
    with Solver(verifier=OWN, listeners=[listener]) as solver:
        assert solver.solve(PROBLEMS[0]).finish_reason == "interrupted"
        assert not engine_of(solver).load().state.trees
        listener.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            solver.solve(PROBLEMS[0])
        assert not engine_of(solver).load().state.trees
        steps = solver.as_completed([(problem, {}) for problem in PROBLEMS])
        with pytest.raises(ZeroDivisionError):
            next(steps)
        assert not engine_of(solver).load().state.trees


@pytest.mark.slow
def test_a_replay_needs_no_reward_model(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Solver(verifier=Combined((OWN, "self"))) as solver:
        plan = solver.plan(PROBLEMS[0])
        solution = solver.solve(PROBLEMS[0], trace=path)
        text = path.read_text("utf-8").replace('"model":"builtin:sapling","family"', '"family"')
        path.write_text(text, "utf-8")

        cost = replay(read_trace(path), solver.tokenizer, policy="belady", slots=plan.enough_tokens)

    assert cost.tokens_generated == solution.metrics.tokens_generated
    assert cost.asked == solution.metrics.asked > 0
