"""Searches judged by a model of the verifier's own, in a second engine that ends with the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.run_cli import in_process
from torch import get_num_threads, set_num_threads

from arbor import Solution, Solver, StopSearch
from arbor.cli.solve import numbers_line
from arbor.errors import BudgetInfeasible, InputError, ModelError
from arbor.events import Boundary, Event, Pruned, Scored, Selected, Verified
from arbor.measure.replay import replay
from arbor.metrics import Metrics, MetricsFold
from arbor.model.model_info import ModelInfo
from arbor.trace.fold import Replay
from arbor.trace.read import read_trace
from arbor.tree import NodeState
from arbor.verifiers.base import Placement
from arbor.verifiers.combined import Combined
from arbor.verifiers.reward.engine import RewardEngine
from arbor.verifiers.reward_model import OutcomeRewardModel, ProcessRewardModel

pytestmark = pytest.mark.usefixtures("loaded_once")

PROBLEMS = ("4 5 6 10", "1 1 4 6", "3 3 8 8")
SMALL: Mapping[str, Any] = {"controller": "tot,width=4,beam=2", "deterministic": True}
# a second copy of the built-in model, which is asked the question that the verifier self asks
OWN = OutcomeRewardModel(
    "builtin:sapling",
    family="text",
    head="tags",
    prompt="{prompt}",
    end="Reachable?",
    good=" yes",
    bad=" no",
)
STEPS = ProcessRewardModel(
    "builtin:sapling",
    family="trl",
    head="tags",
    prompt="{prompt}",
    separator="\nReachable?",
    good=" yes",
    bad=" no",
    steps="min",
)
TOLERANCE = 1e-4  # the two engines divide the work into other batches


def texts(solution: Solution) -> list[str]:
    """The texts of the blocks of a search."""
    return [data["text"] for _, data in sorted(solution.to_networkx().nodes(data=True))]


def values(solution: Solution) -> list[float]:
    """The values of the blocks of a search."""
    return [data["value"] for _, data in sorted(solution.to_networkx().nodes(data=True))]


def engine_of(solver: Solver) -> RewardEngine:
    [model] = solver.setup.verifier_models.values()
    assert isinstance(model, RewardEngine)
    return model


@pytest.fixture(scope="module")
def asked() -> Iterator[list[Solution]]:
    """The searches with the verifier `self`."""
    with Solver(**SMALL) as solver:
        yield solver.solve_batch(PROBLEMS, concurrency=1)


@pytest.mark.parametrize("concurrency", [1, 8])
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


def test_a_continuous_search_is_the_same_one_and_many_at_a_time() -> None:
    settings = SMALL | {"controller": "dpts,width=3,max_visited=6"}
    with Solver(verifier=OWN, **settings) as solver:
        alone = solver.solve_batch(PROBLEMS, concurrency=1)
        together = solver.solve_batch(PROBLEMS, concurrency=8)

    assert [texts(each) for each in together] == [texts(each) for each in alone]


def test_what_the_search_prunes_leaves_the_reward_model() -> None:
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if isinstance(event, Selected) and len(engine.load().state.trees) == 1:
            [tree] = engine.load().state.trees
            alive = [node for node in tree if node.state is not NodeState.PRUNED]
            used = engine.load().memory.used_by(tree)
            freed.append(len(tree) - len(alive))
            assert used <= sum(len(node.tokens) for node in alive)

    freed: list[int] = []
    with Solver(verifier=OWN, listeners=[watch]) as solver:
        engine = engine_of(solver)
        solver.solve(PROBLEMS[0])

    assert any(isinstance(event, Pruned) for event in events)
    assert freed[0] == 0 < freed[-1]


def test_the_trace_holds_what_the_reward_model_did(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Solver(verifier=STEPS) as solver:
        solution = solver.solve(PROBLEMS[0], trace=path)
        config = solver.config
        with Solver.from_config(json.loads(json.dumps(config))) as again:
            assert again.verifier == STEPS

    trace = read_trace(path)
    kinds = [event.name for event in trace.events if isinstance(event, Scored | Verified)]
    assert kinds == ["score", "verify"] * (len(kinds) // 2)
    scored = [event for event in trace.events if isinstance(event, Scored)]
    metrics = solution.metrics
    assert metrics.reward_tokens == sum(event.computed for event in scored)
    assert metrics.reward_path_tokens == sum(event.path_tokens for event in scored)
    assert metrics.reward_peak_tokens == max(event.peak for event in scored)
    assert 0 < metrics.reward_s < metrics.wall_s
    assert metrics.reward_reused > 0.3
    fold = MetricsFold()
    state = Replay()
    for event in trace.events:
        fold(event)
        state(event)
    assert state.problems == []
    assert replace(fold.metrics(), wall_s=0) == replace(metrics, wall_s=0)
    line = numbers_line("solved", metrics)
    assert f"reward model computed {metrics.reward_tokens:,} tokens" in line


def test_runs_without_a_reward_model_say_nothing_of_one(asked: list[Solution]) -> None:
    assert not [name for name in asked[0].metrics.to_dict() if name.startswith("reward")]
    assert "reward" not in numbers_line("solved", asked[0].metrics)
    whole = Metrics(reward_tokens=3, reward_path_tokens=4)
    assert whole.reward_reused == 0.25
    assert Metrics.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize("steps", ["last", "mean"])
def test_the_scores_of_the_steps_are_what_an_aggregate_reads(steps: str) -> None:
    events: list[Event] = []
    with Solver(
        verifier=STEPS, aggregate=f"argmax,steps={steps}", listeners=[events.append]
    ) as solver:
        solution = solver.solve(PROBLEMS[0])
    verified = [event for event in events if isinstance(event, Verified)]
    score = {n: s for e in verified for n, s in zip(e.nodes, e.scores, strict=True)}
    value = {n: v for e in verified for n, v in zip(e.nodes, e.values, strict=True)}
    parent = {child: up for up, child in solution.to_networkx().edges}

    [best] = solution.votes[:1]
    path = [best.paths[0]]
    while parent[path[-1]]:
        path.append(parent[path[-1]])

    assert value[path[0]] == pytest.approx(min(score[node] for node in path))
    own = [score[node] for node in path]
    assert best.score == pytest.approx(own[0] if steps == "last" else sum(own) / len(own))


def test_parts_of_a_combination_run_in_their_own_engines(asked: list[Solution]) -> None:
    both = Combined(("self", OWN), rule="product")
    with Solver(verifier=both, **SMALL) as solver:
        solution = solver.solve(PROBLEMS[0])
        assert list(solver.setup.verifier_models) == [OWN]
        again = Solver.from_config(json.loads(json.dumps(solver.config)))
        assert again.verifier == both

    known = dict(zip(texts(asked[0]), values(asked[0]), strict=True))
    found = dict(zip(texts(solution), values(solution), strict=True))
    first = [text for text in known if text in found and "left: " in text][:8]
    assert first
    assert [found[text] for text in first] == pytest.approx(
        [known[text] ** 2 for text in first], abs=TOLERANCE
    )
    assert solution.metrics.asked > 0 < solution.metrics.reward_tokens


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


def test_problems_that_cannot_be_read_leave_room_for_the_others() -> None:
    with Solver(verifier=OWN, **SMALL) as solver:
        jobs = [("none", {}), ("neither", {}), (PROBLEMS[0], {})]
        found = dict(solver.as_completed(jobs, concurrency=2))

    assert isinstance(found[0], InputError) and isinstance(found[1], InputError)
    assert isinstance(found[2], Solution) and found[2].metrics.reward_tokens


def test_streams_are_judged_together(asked: list[Solution]) -> None:
    with Solver(verifier=OWN, **SMALL) as solver:
        streams = [solver.stream(problem) for problem in PROBLEMS]
        answers = [stream.solution.answer for stream in streams]

    assert answers == [each.answer for each in asked]


def test_a_closed_solver_ends_a_search_that_waits_for_the_reward_model() -> None:
    begun, go = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, Boundary):  # the next thing is a verdict
            begun.set()
            go.wait()

    with Solver(verifier=OWN, listeners=[watch]) as solver:
        stream = solver.stream(PROBLEMS[0])
        assert begun.wait(60)
        solver.close()
        go.set()

        assert stream.solution.finish_reason == "interrupted"


def test_the_larger_model_decides_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(RewardEngine):
        def describe(self) -> ModelInfo:
            return replace(super().describe(), parameters=10**9)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = get_num_threads()
    with Solver(verifier=OWN) as solver:
        set_num_threads(2)
        try:
            with solver._computing():
                assert get_num_threads() == 1
            solver.setup.verifier_models[OWN] = Large(OWN, Placement())
            with solver._computing():
                assert get_num_threads() == 2
        finally:
            set_num_threads(given)


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


def test_a_model_that_is_not_there_is_refused_before_anything_loads(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        Solver(verifier=f"prm,model={tmp_path}/none")


def test_the_command_line_names_the_model_and_its_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verifier = (
        "orm,model=builtin:sapling,family=text,head=tags,prompt={prompt},end=Reachable?,"
        r"good=\syes,bad=\sno,budget=0.5"
    )

    done = in_process(capsys)("-v", "solve", PROBLEMS[0], "--verifier", verifier)

    assert done.code == 0, done.err
    assert "% of its paths reused" in done.err
