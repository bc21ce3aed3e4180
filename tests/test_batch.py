"""Many problems at a time in one engine: the solutions and traces of one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.slow_cases import every

from arbor import Solver
from arbor.errors import BudgetInfeasible, InputError, UsageError
from arbor.events import KV, Ended, Event, Header, Sampled
from arbor.model.checkpoint import Checkpoint
from arbor.run.run import Run
from arbor.run.solution import Solution
from arbor.trace import Replay, TraceWriter, read_trace

PROBLEMS = tuple(f"What is {a}+{b}?" for a, b in ((2, 3), (14, 5), (7, 7), (120, 31), (9, 18)))
SMALL: dict[str, Any] = {
    "task": "reasoning,shots=0",
    "controller": {"name": "tot", "width": 2, "beam": 2, "stop_value": None},
    "verifier": "self",
    "step_tokens": 6,
    "max_depth": 2,
    "max_expansions": 3,
    "record_bytes": 0,
}


@pytest.fixture
def solver(checkpoint: Checkpoint) -> Solver:
    return solver_of(checkpoint)


def solver_of(checkpoint: Checkpoint, **settings: Any) -> Solver:
    made = Solver(**SMALL | settings)
    made.checkpoint = checkpoint
    return made


def found(solution: Solution) -> tuple[Any, ...]:
    """What does not depend on what else the engine does."""
    counts = solution.metrics
    return (
        solution.problem,
        solution.answer,
        solution.text,
        solution.finish_reason,
        solution.candidates,
        counts.tokens_generated,
        counts.nodes,
        counts.verified,
    )


def approximately(solution: Solution) -> tuple[Any, ...]:
    """`found` without what rounding changes."""
    return (
        solution.problem,
        solution.answer,
        solution.text,
        solution.finish_reason,
        sorted((each.node, each.answer) for each in solution.candidates),
        solution.metrics.tokens_generated,
        solution.metrics.nodes,
    )


def is_idle(solver: Solver) -> bool:
    """Whether nothing is in progress or left over in the engine but one finished tree."""
    engine = solver.engine
    engine.memory.check()
    trees = engine.state.trees
    return not engine.busy and len(trees) <= 1 and all(each.finished for each in trees.values())


def smallest_of(solver: Solver) -> str:
    """The smallest budget in which each problem can be solved."""
    plans = [solver.plan(problem, budget="full") for problem in PROBLEMS]
    return f"{max(plan.enough_tokens for plan in plans)}tok"


# The same solutions


@pytest.mark.parametrize(
    ("budget", "policy"), every(3, [("full", "lru"), ("smallest", "reentry"), (0.9, "lru")])
)
def test_solutions_do_not_depend_on_how_many_are_searched_at_a_time(
    checkpoint: Checkpoint, budget: Any, policy: str
) -> None:
    solver = solver_of(checkpoint, policy=policy)
    if budget == "smallest":
        budget = smallest_of(solver)
    one = solver.solve_batch(PROBLEMS, concurrency=1, budget=budget)

    assert [each.problem for each in one] == list(PROBLEMS)
    assert approximately(one[1]) == approximately(solver.solve(PROBLEMS[1], budget="full"))
    for concurrency in (3, 8):
        several = solver.solve_batch(PROBLEMS, concurrency=concurrency, budget=budget)
        assert list(map(approximately, several)) == list(map(approximately, one))
        assert is_idle(solver)
    if isinstance(budget, str) and budget != "full":
        assert sum(each.metrics.tokens_recomputed for each in several) > 0


class Together:
    """A listener that counts the searches in progress.

    Attributes:
        most: at one instant.
        headers: of all searches.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self.headers: list[Header] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Header):
            self.headers.append(event)
            self.now += 1
            self.most = max(self.most, self.now)
        elif isinstance(event, Ended):
            self.now -= 1


def test_stop_reaches_a_search_that_begins_meanwhile(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "announce", lambda run: solver.stop())
    reasons = [each.finish_reason for each in solver.imap(PROBLEMS[:3], concurrency=2)]
    assert reasons == ["interrupted"]


@pytest.mark.parametrize("asked", ["imap", "as_completed", "rollouts"])
def test_stop_before_the_first_is_asked_for_ends_them_all(solver: Solver, asked: str) -> None:
    def ask() -> Iterator[Any]:
        if asked == "imap":
            return solver.imap(PROBLEMS[:2])
        if asked == "as_completed":
            return solver.as_completed((each, {}) for each in PROBLEMS[:2])
        return solver.rollouts(PROBLEMS[:2])

    stopped = ask()
    solver.stop()

    assert list(stopped) == []
    assert len(list(ask())) == 2


# Order and errors


def test_jobs_that_come_late_join_between_two_steps(solver: Solver) -> None:
    """A source says None while it has none; what is in progress goes on meanwhile."""
    alone = [found(each) for each in solver.imap(PROBLEMS)]
    ended: list[int] = []
    asked = 0

    def late() -> Iterator[Any]:
        nonlocal asked
        for place, problem in enumerate(PROBLEMS):
            yield problem, {}
            for _ in range(place):  # fewer than the steps of a search
                asked += 1
                assert len(ended) <= place
                yield None

    together = {}
    for place, result in solver.as_completed(late(), concurrency=len(PROBLEMS)):
        ended.append(place)
        together[place] = found(result)

    assert asked == sum(range(len(PROBLEMS)))
    assert [together[place] for place in range(len(PROBLEMS))] == alone


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_error_in_one_problem_leaves_the_others_as_they_are(
    solver: Solver, concurrency: int
) -> None:
    problems = [PROBLEMS[0], "", PROBLEMS[1], " "]
    good = solver.solve_batch(PROBLEMS[:2])

    solutions = solver.solve_batch(problems, concurrency=concurrency, on_error="return")

    assert [each.error is None for each in solutions] == [True, False, True, False]
    assert solutions[1].error is not None and solutions[1].error["code"] == "problem-empty"
    assert list(map(approximately, solutions[::2])) == list(map(approximately, good))
    assert is_idle(solver)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_jobs_return_or_raise_their_errors_as_batches_do(solver: Solver, concurrency: int) -> None:
    jobs = [(PROBLEMS[0], {"seed": 3}), ("", {}), (PROBLEMS[1], {"tokens": 3}), (PROBLEMS[1], {})]

    found = dict(solver.as_completed(jobs, concurrency=concurrency, on_error="return"))

    codes = [found[place].error and found[place].error["code"] for place in range(len(jobs))]
    assert codes == [None, "problem-empty", "unknown-setting", None]
    assert (found[1].finish_reason, found[1].correct, found[2].problem) == (
        "error",
        None,
        PROBLEMS[1],
    )
    assert approximately(found[0]) == approximately(solver.solve(PROBLEMS[0], seed=3))
    with pytest.raises(InputError, match="problem-empty"):
        list(solver.as_completed(jobs[:2], concurrency=concurrency))
    with pytest.raises(UsageError, match="on_error is 'ignore'"):
        solver.as_completed(jobs, on_error="ignore")
    assert is_idle(solver)


class Late(Exception):
    """Stands for a bug of a listener."""


@dataclass
class Trap:
    """A listener for `as_completed` that raises at an event of one job.

    Attributes:
        place: of the job.
        at: number of its event.
        error: what it raises.
    """

    place: int
    at: int
    error: type[Exception]

    def __call__(self, place: int, event: Event) -> None:
        if place == self.place:
            self.at -= 1
            if self.at == 0:
                raise self.error


@pytest.mark.parametrize("at", [1, 2, 6])
def test_an_error_of_a_listener_in_one_search_is_raised_and_frees_all(
    solver: Solver, at: int
) -> None:
    jobs = [(problem, {}) for problem in PROBLEMS]
    with pytest.raises(Late):
        list(solver.as_completed(jobs, concurrency=4, listen=Trap(1, at, Late)))

    assert is_idle(solver)
    assert len(solver.solve_batch(PROBLEMS[:2], concurrency=2)) == 2


def test_a_search_that_runs_out_of_room_leaves_the_others_as_they_are(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = solver_of(checkpoint)
    engine = solver.engine
    right = engine.begin_ask

    def begin_ask(nodes: Sequence[Any], questions: Sequence[Any], **settings: Any) -> Any:
        if "120" in nodes[0].tree.root.text:
            raise BudgetInfeasible(9999, 10, "a question")
        return right(nodes, questions, **settings)

    alone = list(map(approximately, solver.solve_batch(PROBLEMS[:5])))
    monkeypatch.setattr(engine, "begin_ask", begin_ask)
    results = dict(solver.results([(each, {}) for each in PROBLEMS[:5]], concurrency=5))

    assert isinstance(results[3], BudgetInfeasible)
    for place in (0, 1, 2, 4):
        result = results[place]
        assert isinstance(result, Solution) and approximately(result) == alone[place]
    assert is_idle(solver)


# Leaving early


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_closing_the_iterator_early_frees_everything(solver: Solver, taken: int) -> None:
    solutions = solver.imap(itertools.cycle(PROBLEMS), concurrency=4)
    for _ in range(taken):
        next(solutions)
    solutions.close()  # type: ignore[attr-defined]

    if taken:
        assert is_idle(solver)
    assert approximately(solver.solve(PROBLEMS[1]))[0] == PROBLEMS[1]


def test_an_unknown_word_for_bugs_is_refused_before_a_search(checkpoint: Checkpoint) -> None:
    bugs: Any = "xx"

    with pytest.raises(UsageError, match=r"unknown bugs 'xx'\. Known: raise, return\."):
        next(solver_of(checkpoint).results([(PROBLEMS[0], {})], bugs=bugs))


# Traces


@pytest.mark.parametrize(
    ("budget", "detail"), [("full", "events"), (0.9, "steps"), ("smallest", "tokens")]
)
def test_every_search_writes_a_trace_of_its_own(
    checkpoint: Checkpoint, tmp_path: Path, budget: Any, detail: Any
) -> None:
    solver = solver_of(checkpoint)
    if budget == "smallest":
        budget = smallest_of(solver)
    paths = [tmp_path / f"{place}.arbor.jsonl" for place in range(len(PROBLEMS))]
    jobs = [
        (problem, {"budget": budget, "trace": path, "trace_level": detail})
        for problem, path in zip(PROBLEMS, paths, strict=True)
    ]
    results = dict(solver.as_completed(jobs, concurrency=5))

    for place, path in enumerate(paths):
        trace = read_trace(path)
        replay = Replay.of(trace)
        assert replay.problems == []
        assert trace.header is not None and trace.header.problem == PROBLEMS[place]
        result = results[place]
        assert result.trace_path == str(path)
        assert replay.ended is not None and replay.ended.status == result.finish_reason
        assert any(isinstance(event, Sampled) for event in trace.events) == (detail == "tokens")
        blocks = [block for block in replay.blocks.values() if block.parent is not None]
        assert sum(block.tokens for block in blocks) == result.metrics.tokens_generated


# The pool


@pytest.mark.parametrize("given", ["path", "writer"])
def test_of_two_searches_that_run_together_one_has_a_trace(
    solver: Solver, tmp_path: Path, given: str
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    trace: Any = path if given == "path" else TraceWriter(path)
    jobs = [(problem, {"trace": trace}) for problem in PROBLEMS[:2]]

    results = dict(solver.results(jobs, concurrency=2))

    assert isinstance(results[0], Solution)
    assert isinstance(results[1], UsageError) and results[1].code == "trace-shared"
    trace_read = read_trace(path)
    assert (trace_read.bad, trace_read.gaps) == ([], [])
    headers = [each for each in trace_read.events if isinstance(each, Header)]
    assert [each.problem for each in headers] == [PROBLEMS[0]]


def test_searches_that_run_together_share_one_ratio_over_all_their_trees(
    checkpoint: Checkpoint,
) -> None:
    alone = solver_of(checkpoint, share="off").solve_batch(PROBLEMS[:3], concurrency=1)
    held: list[int] = []
    solver = solver_of(checkpoint, share="off", listeners=[lambda event: held.append(pool(event))])
    solutions = solver.solve_batch(PROBLEMS[:3], concurrency=3, budget=0.5)

    whole = sum(each.metrics.peak_tokens for each in alone)
    assert max(held) <= whole / 2 + 6 + 8  # and what a question and an estimate may add
    assert any(each.metrics.tokens_recomputed for each in solutions)
    assert [each.answer for each in solutions] == [each.answer for each in alone]


def pool(event: Event) -> int:
    """What all searches hold after an event; 0 where it does not say."""
    kv = getattr(event, "kv", None)
    return max(kv.pool, kv.device) if isinstance(kv, KV) else 0
