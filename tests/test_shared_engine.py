"""Searches with settings of their own in one engine, as they arrive."""

from __future__ import annotations

import pytest
from test_batch import PROBLEMS, approximately, solver_of
from test_worker import until

from arbor import Solver
from arbor.aggregate.best import Best
from arbor.controllers.chain import Chain
from arbor.errors import BudgetInfeasible, InputError, UsageError
from arbor.events import Boundary, Ended, Event, Header, Opened, Sampled
from arbor.model.checkpoint import Checkpoint
from arbor.run.job import SearchJob
from arbor.tasks.base import BlockLimits
from arbor.tasks.plain_text import PlainText, plain_problem
from arbor.verifiers.exact import Exact


@pytest.fixture
def solver(checkpoint: Checkpoint) -> Solver:
    return solver_of(checkpoint)


def events_of(job: SearchJob) -> list[Event]:
    return list(iter(job.events.get, None))


def test_searches_with_settings_of_their_own_are_those_of_solvers(
    solver: Solver, checkpoint: Checkpoint
) -> None:
    shared = solver.shared(at_once=3, tokens=2048)
    widths = (1, 2, 3, 2, 1)
    runs = [
        shared.prepare(problem, {"seed": width}, controller=Chain(width))
        for problem, width in zip(PROBLEMS, widths, strict=True)
    ]
    jobs = [shared.begin(run) for run in runs]

    together = [approximately(job.solution()) for job in jobs]

    alone = [
        approximately(solver_of(checkpoint, controller=Chain(width)).solve(problem, seed=width))
        for problem, width in zip(PROBLEMS, widths, strict=True)
    ]
    assert together == alone


def test_no_more_are_searched_at_a_time_than_there_are_places(solver: Solver) -> None:
    shared = solver.shared(at_once=2, tokens=2048)
    order: list[str] = []
    most = 0

    def watch(event: Event) -> None:
        nonlocal most
        if isinstance(event, Header | Ended):
            order.append(event.name)
            most = max(most, order.count("header") - order.count("end"))

    jobs = [shared.begin(shared.prepare(problem, listeners=(watch,))) for problem in PROBLEMS]

    assert all(job.solution().error is None for job in jobs)
    assert most == 2
    until(lambda: not shared.running and not shared.waiting)


def test_the_budget_is_fixed_and_a_search_has_all_of_it(solver: Solver) -> None:
    shared = solver.shared(at_once=4, tokens=140)
    job = shared.begin(shared.prepare(PROBLEMS[0]))
    (header,) = [each for each in events_of(job) if isinstance(each, Header)]

    assert header.kv["budget_tokens"] == min(140, header.kv["full_tokens"])
    assert header.kv["pool_tokens"] == 140
    assert solver.engine.memory.slots == 140
    large = shared.prepare(PROBLEMS[1], {"budget": "5GiB"}, controller=Chain(16))
    assert large.plan.budget_tokens == 140 < large.plan.full_tokens
    assert shared.begin(large).solution().error is None


def test_what_never_fits_is_refused_before_it_waits(solver: Solver) -> None:
    shared = solver.shared(at_once=4, tokens=12)

    with pytest.raises(BudgetInfeasible, match="the budget is 12 tokens"):
        shared.prepare(PROBLEMS[0])
    with pytest.raises(InputError):
        shared.prepare("")
    assert not shared.waiting


def test_an_abandoned_search_gives_its_kv_back_at_once(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, debug=True)
    shared = solver.shared(at_once=2, tokens=4096)
    growing: list[SearchJob] = []
    held: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Opened) and event.parent == 0:
            growing[0].abandon()  # in the middle of its own step
            held.append(solver.engine.held_tokens)

    def stay(event: Event) -> None:
        held.append(solver.engine.held_tokens)

    with solver._busy:
        growing.append(shared.begin(shared.prepare(PROBLEMS[0], listeners=(watch,))))
        staying = shared.begin(shared.prepare(PROBLEMS[1], listeners=(stay,)))

    assert growing[0].solution().finish_reason == "interrupted"
    assert growing[0].solution().metrics.nodes == 0
    assert staying.solution().finish_reason != "interrupted"
    until(lambda: not solver._busy.locked())
    engine = solver.engine
    assert not engine.state.trees
    assert engine.memory.available == engine.memory.slots
    engine.memory.check()


def test_a_search_abandoned_before_its_turn_never_begins(solver: Solver) -> None:
    shared = solver.shared(at_once=1, tokens=4096)
    with solver._busy:
        first = shared.begin(shared.prepare(PROBLEMS[0]))
        second = shared.begin(shared.prepare(PROBLEMS[1]))
        assert shared.waiting == 2
        second.abandon()
        assert shared.waiting == 1 and second.ended
    assert first.solution().finish_reason != "interrupted"
    assert events_of(second) == []


def test_searches_abandoned_in_the_queue_are_not_kept(solver: Solver) -> None:
    shared = solver.shared(at_once=1, tokens=4096)
    kept: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Boundary):
            kept.append(len(shared._worker._waiting))

    with solver._busy:
        first = shared.begin(shared.prepare(PROBLEMS[0], listeners=(watch,)))
        others = [shared.begin(shared.prepare(PROBLEMS[1])) for _ in range(5)]
        for each in others[:4]:
            each.abandon()

    assert first.solution().finish_reason != "interrupted"
    assert set(kept) == {1}
    assert others[4].solution().finish_reason != "interrupted"


def test_an_abandoned_search_leaves_the_trees_of_others_as_they_are(solver: Solver) -> None:
    alone = [approximately(solver.solve(problem)) for problem in PROBLEMS[1:3]]
    shared = solver.shared(at_once=3, tokens=4096)
    jobs: list[SearchJob] = []

    def watch(event: Event) -> None:
        if isinstance(event, Boundary):
            jobs[0].abandon()

    with solver._busy:
        jobs.append(shared.begin(shared.prepare(PROBLEMS[0], listeners=(watch,))))
        jobs += [shared.begin(shared.prepare(problem)) for problem in PROBLEMS[1:3]]

    assert [approximately(job.solution()) for job in jobs[1:]] == alone


def test_the_solvers_own_searches_take_turns_with_it(solver: Solver) -> None:
    shared = solver.shared(at_once=2, tokens=4096)
    job = shared.begin(shared.prepare(PROBLEMS[0]))

    own = solver.solve(PROBLEMS[0])

    assert approximately(job.solution()) == approximately(own)
    assert solver.engine.tree is not None  # a solver's own tree stays


def test_a_prompt_may_be_token_ids(solver: Solver) -> None:
    shared = solver.shared(at_once=2, tokens=4096)
    ids = [1, 22, 295, 291]
    run = shared.prepare(
        plain_problem(ids, "4 5 6"),
        {"trace_level": "tokens"},
        task=PlainText(),
        controller=Chain(2),
        verifier=Exact(),
        aggregate=Best(),
        boundary=BlockLimits((), 5, 1),
    )

    assert run.prompt == ids and run.plan.full_tokens == 4 + 2 * 5
    events = events_of(shared.begin(run))

    assert next(each.text for each in events if isinstance(each, Opened)) == "4 5 6"
    sampled = [each for each in events if isinstance(each, Sampled)]
    closed = [each for each in events if isinstance(each, Boundary)]
    for block in closed:
        own = [
            token
            for each in sampled
            for node, token in zip(each.nodes, each.ids, strict=True)
            if node == block.node
        ]
        assert tuple(own) == block.ids


@pytest.mark.parametrize(("tokens", "most"), [(512, 3), (150, 2), (80, 1)])
def test_lossy_searches_begin_while_their_budgets_are_free(
    checkpoint: Checkpoint, tokens: int, most: int
) -> None:
    solver = solver_of(checkpoint, mode="lossy")
    running: list[int] = []
    shared = solver.shared(at_once=4, tokens=tokens)
    runs = [
        shared.prepare(
            problem, {"budget": "70tok"}, listeners=(lambda _: running.append(shared.running),)
        )
        for problem in PROBLEMS[:3]
    ]
    assert {run.plan.budget_tokens for run in runs} == {70}
    jobs = [shared.begin(run) for run in runs]

    assert all(job.solution().metrics.peak_tokens <= 70 for job in jobs)
    assert max(running) == most


def test_a_ratio_of_kv_that_is_fixed_is_refused_by_name(solver: Solver) -> None:
    shared = solver.shared(at_once=2, tokens=512)

    with pytest.raises(UsageError, match=r"share 512 tokens of KV here") as refused:
        shared.prepare(PROBLEMS[0], {"budget": 0.25})

    assert refused.value.code == "budget-shared"
    amount = refused.value.hint.split("as in ")[1].split(",")[0]
    assert shared.begin(shared.prepare(PROBLEMS[0], {"budget": amount})).solution().error is None


def test_lossy_searches_next_to_each_other_keep_what_each_was_given(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, mode="lossy")
    budgets = ("full", "60tok", "90tok")
    alone = [
        approximately(solver.solve(problem, budget=budget))
        for problem, budget in zip(PROBLEMS, budgets, strict=False)
    ]
    shared = solver.shared(at_once=3, tokens=4096)

    jobs = [
        shared.begin(shared.prepare(problem, {"budget": budget}))
        for problem, budget in zip(PROBLEMS, budgets, strict=False)
    ]

    assert [approximately(job.solution()) for job in jobs] == alone
    assert [job.solution().metrics.peak_tokens <= 60 for job in jobs] == [False, True, False]


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
def test_without_a_fixed_size_a_ratio_is_that_of_the_solver(
    checkpoint: Checkpoint, mode: str
) -> None:
    solver = solver_of(checkpoint, mode=mode)
    alone = solver.solve(PROBLEMS[0], budget=0.3)
    shared = solver.shared(at_once=2)

    found = shared.begin(shared.prepare(PROBLEMS[0], {"budget": 0.3})).solution()
    other = shared.begin(shared.prepare(PROBLEMS[1], {"budget": "400tok"})).solution()

    assert approximately(found) == approximately(alone)
    assert found.metrics.peak_tokens == alone.metrics.peak_tokens
    assert found.metrics.peak_tokens < solver.solve(PROBLEMS[0]).metrics.peak_tokens
    assert other.error is None
