"""Searches with settings of their own in one engine, as they arrive."""

from __future__ import annotations

import pytest
from test_batch import PROBLEMS, approximately, solver_of
from test_worker import until

from arbor import Solver
from arbor.controllers.chain import Chain
from arbor.events import Event, Opened
from arbor.model.checkpoint import Checkpoint
from arbor.run.stream import SearchJob


@pytest.fixture
def solver(checkpoint: Checkpoint) -> Solver:
    return solver_of(checkpoint)


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


def test_stop_of_the_solver_ends_those_that_wait_for_its_engine(solver: Solver) -> None:
    shared = solver.shared(at_once=2)
    with solver._busy:
        job = shared.begin(shared.prepare(PROBLEMS[0]))
        solver.stop()
        assert job.ended
    assert job.solution().finish_reason == "interrupted"
    assert shared.begin(shared.prepare(PROBLEMS[0])).solution().finish_reason != "interrupted"


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
