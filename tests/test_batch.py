"""Many problems at a time in one engine: the solutions and traces of one at a time."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.slow_cases import every

from arbor import Solver, StopSearch
from arbor.errors import BudgetInfeasible, InputError
from arbor.events import KV, Ended, Event, Header, Sampled, Verified
from arbor.forest import LEAST_UNUSED
from arbor.model.checkpoint import Checkpoint
from arbor.run.request import Request
from arbor.run.run import Run
from arbor.run.solution import Solution
from arbor.trace import Replay, read_trace

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


def test_deterministic_values_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    with Solver(**SMALL, deterministic=True) as solver:
        several = solver.solve_batch(PROBLEMS[:4], concurrency=4, budget=0.9)
        alone = [solver.solve(problem, budget="full") for problem in PROBLEMS[:4]]

    assert list(map(found, several)) == list(map(found, alone))
    assert [each.score for each in several] == [each.score for each in alone]


@pytest.mark.parametrize("mode", [("lossy", "off"), ("lossy", "selective"), ("lossless", "span")])
def test_every_mode_solves_several_at_a_time(checkpoint: Checkpoint, mode: tuple[Any, Any]) -> None:
    solver = solver_of(checkpoint, mode=mode[0], rehydrate=mode[1], policy="h2o")
    solutions = solver.solve_batch(PROBLEMS, concurrency=8, budget=smallest_of(solver))

    assert [each.problem for each in solutions] == list(PROBLEMS)
    assert all(each.finish_reason in ("solved", "exhausted", "cut", "limit") for each in solutions)
    assert is_idle(solver)


def test_a_policy_that_evicts_nothing_searches_several_at_a_time(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, policy="full", budget="full")
    at_once = Together()
    solver.listeners = (at_once,)
    several = solver.solve_batch(PROBLEMS, concurrency=3)

    assert at_once.most == 3
    assert approximately(several[4]) == approximately(solver.solve(PROBLEMS[4]))


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


# Order and errors


def test_solutions_come_in_the_problems_order_or_as_they_are_found(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    limits = [200, 1, 1, 1]  # the first takes longest
    jobs = [
        (problem, {"max_tokens": most}) for problem, most in zip(PROBLEMS, limits, strict=False)
    ]
    places = [place for place, _ in solver.as_completed(iter(jobs), concurrency=3)]
    assert sorted(places) == [0, 1, 2, 3]
    assert places[0] != 0

    ordered = list(solver.imap(PROBLEMS, concurrency=3))
    found_first = list(solver.imap(PROBLEMS, concurrency=3, ordered=False))
    assert [each.problem for each in ordered] == list(PROBLEMS)
    assert {each.problem for each in found_first} == set(PROBLEMS)
    by_problem = {each.problem: approximately(each) for each in found_first}
    assert [by_problem[each.problem] for each in ordered] == list(map(approximately, ordered))


def test_a_problem_with_a_budget_of_its_own_waits_for_the_others(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    small = solver.plan(PROBLEMS[1]).enough_tokens + 20
    budgets = ("full", f"{small}tok", "full")
    jobs = [(each, {"budget": of}) for each, of in zip(PROBLEMS, budgets, strict=False)]

    results = dict(solver.as_completed(jobs, concurrency=3))

    assert results[1].metrics.budget_tokens == small
    assert results[1].metrics.peak_tokens <= small
    alone = [solver.solve(problem, **options) for problem, options in jobs]
    assert [found(results[place]) for place in range(3)] == list(map(found, alone))


def test_lossy_problems_are_searched_together_and_found_as_alone(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, mode="lossy", budget=0.9)
    most = Together()
    solver.listeners = (most,)

    together = solver.solve_batch(PROBLEMS[:3])

    assert most.most == 3
    solver.listeners = ()
    assert list(map(approximately, together)) == list(map(approximately, solver.imap(PROBLEMS[:3])))


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
        assert isinstance(result, Solution)
        together[place] = found(result)

    assert asked == sum(range(len(PROBLEMS)))
    assert [together[place] for place in range(len(PROBLEMS))] == alone


def test_a_source_may_wait_for_what_is_in_progress(solver: Solver) -> None:
    ended: list[int] = []

    def one_after_another() -> Iterator[Any]:
        for place, problem in enumerate(PROBLEMS):
            while len(ended) < place:
                yield None
            yield problem, {}

    for place, _ in solver.as_completed(one_after_another(), concurrency=3):
        ended.append(place)

    assert ended == list(range(len(PROBLEMS)))


def test_problems_are_read_as_far_ahead_as_there_are_places(solver: Solver) -> None:
    asked: list[str] = []

    def problems() -> Iterator[str]:
        for problem in PROBLEMS:
            asked.append(problem)
            yield problem

    solutions = solver.imap(problems(), concurrency=3)
    assert asked == []
    first = next(solutions)
    assert first.problem == PROBLEMS[0]
    assert 3 <= len(asked) <= 5
    assert [each.problem for each in solutions] == list(PROBLEMS[1:])


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


def test_an_error_that_is_raised_gives_up_the_rest(solver: Solver) -> None:
    together = Together()
    solver.listeners = (together,)
    with pytest.raises(InputError, match="empty"):
        solver.solve_batch([PROBLEMS[0], PROBLEMS[1], "", PROBLEMS[2]], concurrency=3)

    assert is_idle(solver)
    assert len(together.headers) <= 3  # none has begun after it
    assert solver.solve(PROBLEMS[0]).error is None


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


@pytest.mark.parametrize("at", [3, 9])
def test_a_listener_that_stops_one_search_leaves_the_others_as_they_are(
    solver: Solver, at: int
) -> None:
    alone = list(map(approximately, solver.solve_batch(PROBLEMS[:4])))
    jobs = [(problem, {}) for problem in PROBLEMS[:4]]
    results = dict(solver.as_completed(jobs, concurrency=4, listen=Trap(2, at, StopSearch)))

    assert isinstance(results[2], Solution) and results[2].finish_reason == "interrupted"
    for place in (0, 1, 3):
        result = results[place]
        assert isinstance(result, Solution) and approximately(result) == alone[place]
    assert is_idle(solver)


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
    results = dict(solver.as_completed([(each, {}) for each in PROBLEMS[:5]], concurrency=5))

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


def test_stop_ends_all_searches_and_begins_no_other(solver: Solver) -> None:
    together = Together()
    verified = 0

    def listen(event: Event) -> None:
        nonlocal verified
        together(event)
        verified += isinstance(event, Verified)
        if verified == 2:
            solver.stop()

    solver.listeners = (listen,)
    solutions = solver.solve_batch(PROBLEMS, concurrency=3)

    assert 3 <= len(solutions) < len(PROBLEMS)
    assert len(together.headers) == len(solutions)
    assert solutions[-1].finish_reason == "interrupted"
    assert is_idle(solver)
    solver.listeners = ()
    assert [each.finish_reason for each in solver.solve_batch(PROBLEMS[:2], concurrency=2)]


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
        assert isinstance(result, Solution) and result.trace_path == str(path)
        assert replay.ended is not None and replay.ended.status == result.finish_reason
        assert any(isinstance(event, Sampled) for event in trace.events) == (detail == "tokens")
        blocks = [block for block in replay.blocks.values() if block.parent is not None]
        assert sum(block.tokens for block in blocks) == result.metrics.tokens_generated


# The pool


def pools(solver: Solver, problems: Sequence[str], concurrency: int, budget: Any) -> list[int]:
    """The budget of all searches that each search reports."""
    together = Together()
    solver.listeners = (together,)
    solver.solve_batch(problems, concurrency=concurrency, budget=budget)
    solver.listeners = ()
    return [header.kv["pool_tokens"] for header in together.headers]


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


def test_the_pool_is_the_amount_that_is_given_at_most_full_retention_of_all(solver: Solver) -> None:
    smallest = max(solver.plan(each, budget="full").enough_tokens for each in PROBLEMS)
    full = [solver.plan(each, budget="full").full_tokens for each in PROBLEMS]

    assert pools(solver, PROBLEMS[:3], 3, f"{smallest + 40}tok") == [smallest + 40] * 3
    assert pools(solver, PROBLEMS[:2], 2, "1000000tok") == [sum(full[:2])] * 2


def test_a_problem_that_is_larger_than_the_pool_waits_and_is_solved(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, debug=True)
    large = "What is " + "+".join(["7"] * 150) + "?"
    small = [PROBLEMS[0], PROBLEMS[1]]
    plans = {each: solver.plan(each, budget="full") for each in (*small, large)}
    assert plans[large].smallest_tokens > sum(plans[each].full_tokens for each in small)
    together = Together()
    solver.listeners = (together,)

    solutions = solver.solve_batch([*small, large, *small], concurrency=2, budget="440tok")

    assert [each.problem for each in solutions] == [*small, large, *small]
    headers = together.headers
    assert [header.problem for header in headers] == [*small, large, *small]  # none overtakes it
    assert headers[2].kv["pool_tokens"] >= plans[large].smallest_tokens
    assert approximately(solutions[0]) == approximately(solutions[3])
    assert is_idle(solver)


def test_a_problem_that_waits_when_all_are_stopped_does_not_begin(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    large = "What is " + "+".join(["7"] * 150) + "?"
    together = Together()

    def listen(event: Event) -> None:
        together(event)
        if isinstance(event, Verified):
            solver.stop()

    solver.listeners = (listen,)
    solutions = solver.solve_batch([PROBLEMS[0], PROBLEMS[1], large], concurrency=2)

    assert [each.problem for each in solutions] == [PROBLEMS[0], PROBLEMS[1]]
    assert len(together.headers) == 2
    assert is_idle(solver)


def test_a_search_that_is_stopped_before_it_begins_ends_at_once(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    run = Run(solver._setup, PROBLEMS[0], Request())
    run.stop()

    solution = run.solve(solver._lend)

    assert solution.finish_reason == "interrupted"
    assert solution.metrics.tokens_generated == 0


# Leaks


def sizes(solver: Solver) -> dict[str, int]:
    """What may grow with the problems an engine has solved."""
    engine = solver.engine
    state, memory = engine.state, engine.memory
    statistics, table = state.statistics, state.table
    return {
        "rows": len(memory.forest),
        "numbers": len(memory.table.used_by),
        "spans": memory.forest.spans.size,
        "trees": len(state.trees),
        "logits": len(state.logits),
        "computed": len(state.computed),
        "table": len(table),
        "statistics": statistics._end,
        "held": sum(
            value.nbytes for value in vars(table.held).values() if hasattr(value, "nbytes")
        ),
        "used": memory.used,
    }


def solve_many(solver: Solver, count: int) -> tuple[list[dict[str, int]], list[int]]:
    """Sizes, ten times on the way and never idle between, and the number of Python objects after
    half of the problems and towards the end; pytest keeps what is logged, so nothing is."""
    logging.disable(logging.CRITICAL)
    try:
        return _solve_many(solver, count)
    finally:
        logging.disable(logging.NOTSET)


def _solve_many(solver: Solver, count: int) -> tuple[list[dict[str, int]], list[int]]:
    problems = itertools.islice(itertools.cycle(solver.task.problems("train", 50)), count)
    seen, objects = [], []
    for place, solution in enumerate(solver.imap(problems, concurrency=6), 1):
        assert solution.error is None
        if place % (count // 10) == 0:
            seen.append(sizes(solver))
        if place in (count // 2, count * 9 // 10):
            gc.collect()
            objects.append(len(gc.get_objects()))
    return seen, objects


def check_no_leak(seen: list[dict[str, int]], objects: list[int]) -> None:
    half = len(seen) // 2
    for name in seen[0]:
        early = max(each[name] for each in seen[:half])
        late = max(each[name] for each in seen[half:-1])
        most = 2 * LEAST_UNUSED if name == "spans" else 1.5 * early + 64
        assert late <= most, f"{name} grew from {early} to {late}"
    half_way, end = objects
    assert end <= half_way + 1000


QUICK: dict[str, Any] = {
    "task": "game24",
    "controller": {"name": "chain", "samples": 2},
    "verifier": "exact",
    "max_depth": 1,
    "step_tokens": 3,
}


@pytest.mark.parametrize("policy", ["lru", "h2o"])
def test_many_problems_leave_nothing_behind(checkpoint: Checkpoint, policy: str) -> None:
    solver = solver_of(checkpoint, policy=policy, **QUICK)
    check_no_leak(*solve_many(solver, 100 if policy == "lru" else 50))
    assert is_idle(solver)


@pytest.mark.slow
def test_hundreds_of_problems_leave_nothing_behind(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, policy="h2o", **QUICK)
    check_no_leak(*solve_many(solver, 400))
    assert is_idle(solver)
