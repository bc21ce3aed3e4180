"""Streams of one solver, searched together by one background thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from test_batch import PROBLEMS, SMALL, Together, approximately, found, is_idle, solver_of

from arbor import Solver
from arbor.errors import BudgetInfeasible, InputError, ModelError, UsageError
from arbor.events import Boundary, Ended, Event, Header, Selected
from arbor.model.checkpoint import Checkpoint
from arbor.run.job import SearchJob
from arbor.run.solution import Solution
from arbor.run.stream import SearchStream
from arbor.run.worker import Worker
from arbor.trace import Replay, read_trace

LARGE = "What is " + "+".join(["7"] * 150) + "?"


@pytest.fixture
def solver(checkpoint: Checkpoint) -> Solver:
    return solver_of(checkpoint)


def gather(solver: Solver, *problems: str, **options: Any) -> list[Solution | BaseException]:
    """What `asolve` gives for each problem, all awaited together."""

    async def solve_all() -> list[Solution | BaseException]:
        return await asyncio.gather(
            *(solver.asolve(problem, **options) for problem in problems), return_exceptions=True
        )

    return asyncio.run(solve_all())


def opened_together(solver: Solver, *problems: str, **options: Any) -> list[SearchStream]:
    """A stream for each problem, all of them open before the engine is free."""
    with solver._busy:
        return [solver.stream(problem, **options) for problem in problems]


def until(condition: Callable[[], Any]) -> None:
    """Wait for another thread; the test's own limit ends it."""
    while not condition():
        time.sleep(0.001)


def solutions(results: list[Any]) -> list[Solution]:
    assert all(isinstance(each, Solution) for each in results), results
    return results


class Threads:
    """A listener that records the threads it is called in."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.most = 0

    def __call__(self, event: Event) -> None:
        self.seen.add(threading.current_thread().name)
        running = [each for each in threading.enumerate() if each.name == "arbor-search"]
        self.most = max(self.most, len(running))


# Together


def test_searches_that_are_awaited_together_are_searched_together(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    alone = [solver.solve(problem, budget=0.9) for problem in PROBLEMS]
    batch = Together()
    solver.listeners = (batch,)
    solver.solve_batch(PROBLEMS, budget=0.9)
    together, threads = Together(), Threads()
    solver.listeners = (together, threads)

    results = solutions(gather(solver, *PROBLEMS, budget=0.9))

    assert list(map(approximately, results)) == list(map(approximately, alone))
    assert together.most == len(PROBLEMS)
    assert (threads.seen, threads.most) == ({"arbor-search"}, 1)
    assert [each.kv for each in together.headers] == [each.kv for each in batch.headers]
    assert is_idle(solver)


def test_deterministic_values_are_those_of_one_by_one_to_the_last_bit() -> None:
    with Solver(**SMALL, deterministic=True) as solver:
        together = solutions(gather(solver, *PROBLEMS[:3], budget=0.9))
        alone = [solver.solve(problem, budget="full") for problem in PROBLEMS[:3]]

    assert list(map(found, together)) == list(map(found, alone))
    assert [each.score for each in together] == [each.score for each in alone]


def test_streams_that_are_open_together_interleave(solver: Solver, tmp_path: Path) -> None:
    alone = [solver.solve(problem) for problem in PROBLEMS[:3]]
    together = Together()
    solver.listeners = (together,)
    with solver._busy:
        streams = [
            solver.stream(problem, trace=tmp_path / f"{place}.arbor.jsonl")
            for place, problem in enumerate(PROBLEMS[:3])
        ]
    events: list[list[Event]] = [[], [], []]
    for row in zip_longest(*streams):
        for own, event in zip(events, row, strict=True):
            own += [] if event is None else [event]

    for place, own in enumerate(events):
        assert isinstance(own[0], Header) and own[0].problem == PROBLEMS[place]
        assert [type(each) for each in own].count(Header) == 1
        assert isinstance(own[-1], Ended)
        trace = read_trace(tmp_path / f"{place}.arbor.jsonl")
        assert Replay.of(trace).problems == []
        assert len(trace.events) == len(own)
    assert [approximately(stream.solution) for stream in streams] == list(map(approximately, alone))
    assert together.most == 3
    assert list(streams[0]) == []
    assert is_idle(solver)


def test_events_of_several_searches_can_be_awaited(solver: Solver) -> None:
    async def events_of(problem: str) -> list[Event]:
        return [event async for event in solver.astream(problem)]

    async def listen() -> list[list[Event]]:
        return await asyncio.gather(*map(events_of, PROBLEMS))

    together = Together()
    solver.listeners = (together,)
    every = asyncio.run(listen())

    assert [own[0].problem for own in every if isinstance(own[0], Header)] == list(PROBLEMS)
    assert all(isinstance(own[-1], Ended) for own in every)
    assert together.most == len(PROBLEMS)


def test_a_stream_joins_what_is_in_progress(solver: Solver) -> None:
    """The second is opened in the middle of the first, which has not ended when it begins."""
    order: list[str] = []
    second: list[SearchStream] = []

    def watch(event: Event) -> None:
        if isinstance(event, Selected) and not second:
            second.append(solver.stream(PROBLEMS[1]))
        if isinstance(event, Header):
            order.append(f"begin {event.problem}")
        elif isinstance(event, Ended):
            order.append("end")

    alone = [solver.solve(problem) for problem in PROBLEMS[:2]]
    solver.listeners = (watch,)
    first = solver.stream(PROBLEMS[0])

    assert approximately(first.solution) == approximately(alone[0])
    assert approximately(second[0].solution) == approximately(alone[1])
    assert order == [f"begin {PROBLEMS[0]}", f"begin {PROBLEMS[1]}", "end", "end"]
    assert is_idle(solver)


def test_no_more_than_eight_are_searched_at_a_time(solver: Solver) -> None:
    together = Together()
    solver.listeners = (together,)
    results = solutions(gather(solver, *PROBLEMS, *PROBLEMS, max_tokens=8))

    assert [each.problem for each in results] == [*PROBLEMS, *PROBLEMS]
    assert together.most == 8


def test_lossy_searches_go_together_and_find_what_they_find_alone(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, mode="lossy")
    alone = [solver.solve(problem, budget=0.9) for problem in PROBLEMS[:3]]
    together = Together()
    solver.listeners = (together,)

    results = solutions(gather(solver, *PROBLEMS[:3], budget=0.9))

    assert together.most == 3
    assert list(map(approximately, results)) == list(map(approximately, alone))


# The budget


def test_a_search_that_needs_more_waits_until_the_engine_is_idle(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, debug=True, budget="440tok")
    opened: list[SearchStream] = []

    def watch(event: Event) -> None:
        together(event)
        if isinstance(event, Selected) and not opened:
            opened.extend([solver.stream(LARGE), solver.stream(PROBLEMS[1])])

    together = Together()
    solver.listeners = (watch,)
    first = solver.stream(PROBLEMS[0]).solution
    large, last = (each.solution for each in opened)

    headers = together.headers
    assert [each.problem for each in headers] == [PROBLEMS[0], LARGE, PROBLEMS[1]]
    assert headers[1].kv["pool_tokens"] >= solver.plan(LARGE).smallest_tokens
    assert together.most == 2  # the last two together
    solver.listeners = ()
    for solution in (first, large, last):
        assert approximately(solution) == approximately(solver.solve(solution.problem))
    assert is_idle(solver)


def test_searches_with_budgets_of_their_own_do_not_share_one(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint)
    small = f"{solver.plan(PROBLEMS[0]).enough_tokens + 20}tok"
    together = Together()
    solver.listeners = (together,)

    async def solve_all() -> list[Solution]:
        budgets = ("full", small, small, "full")
        asked = zip(PROBLEMS, budgets, strict=False)
        return await asyncio.gather(*(solver.asolve(each, budget=of) for each, of in asked))

    found = asyncio.run(solve_all())

    assert together.most == 2  # the two small ones
    for solution in found:
        assert solution.metrics.peak_tokens <= solution.metrics.budget_tokens
    small_ones = [each.metrics for each in found[1:3]]
    assert all(each.budget_tokens == int(small[:-3]) for each in small_ones)


def test_an_awaited_search_keeps_no_events(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[SearchJob] = []
    add = Worker.add
    monkeypatch.setattr(Worker, "add", lambda self, job: (jobs.append(job), add(self, job))[1])

    solutions(gather(solver, *PROBLEMS[:2]))

    assert len(jobs) == 2 and all(job.events.qsize() == 1 for job in jobs)  # the end alone


def test_where_nothing_is_evicted_a_search_joins_another_one(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, policy="full", budget="full")
    opened: list[SearchStream] = []

    def watch(event: Event) -> None:
        together(event)
        if isinstance(event, Selected) and not opened:
            opened.append(solver.stream(PROBLEMS[1]))

    together = Together()
    solver.listeners = (watch,)
    first = solver.stream(PROBLEMS[0])

    assert first.solution.error is None and opened[0].solution.error is None
    assert together.most == 2
    gather(solver, *PROBLEMS[:3])
    assert together.most == 3


# Leaving early


def test_a_cancelled_task_ends_its_own_search_and_frees_its_kv(solver: Solver) -> None:
    alone = list(map(approximately, map(solver.solve, PROBLEMS[:3])))
    begun, cancelled = threading.Event(), threading.Event()
    headers: list[str] = []
    statuses: list[str] = []
    trees: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Header):
            headers.append(event.problem)
        if isinstance(event, Boundary) and not begun.is_set():
            begun.set()
            cancelled.wait()
        if isinstance(event, Ended):
            statuses.append(event.status)
        elif statuses == ["interrupted"]:
            trees.append(len(solver.engine.state.trees))

    solver.listeners = (watch,)

    async def cancel_one() -> list[Any]:
        tasks = [asyncio.create_task(solver.asolve(problem)) for problem in PROBLEMS[:3]]
        await asyncio.to_thread(begun.wait)
        tasks[1].cancel()
        await asyncio.sleep(0)  # the cancellation arrives
        cancelled.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, gone, last = asyncio.run(cancel_one())

    assert isinstance(gone, asyncio.CancelledError)
    assert [approximately(first), approximately(last)] == [alone[0], alone[2]]
    assert headers == list(PROBLEMS[:3])
    assert statuses[0] == "interrupted" and "interrupted" not in statuses[1:]
    assert trees and trees[0] == 2
    assert is_idle(solver)


def test_a_task_that_is_cancelled_while_it_waits_never_begins(solver: Solver) -> None:
    together = Together()
    solver.listeners = (together,)

    async def cancel_all() -> list[Any]:
        with solver._busy:
            tasks = [asyncio.create_task(solver.asolve(each)) for each in PROBLEMS[:3]]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in tasks[:2]:
                task.cancel()
            await asyncio.wait(tasks[:2])
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(cancel_all())

    assert [type(each) for each in results[:2]] == [asyncio.CancelledError] * 2
    assert isinstance(results[2], Solution)
    assert [header.problem for header in together.headers] == [PROBLEMS[2]]


def test_a_closed_iterator_ends_its_own_search(solver: Solver) -> None:
    alone = approximately(solver.solve(PROBLEMS[1]))
    begun, closed = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, Selected) and not begun.is_set():
            begun.set()
            closed.wait()

    solver.listeners = (watch,)
    first, second = opened_together(solver, *PROBLEMS[:2])
    with first:
        assert isinstance(next(first), Header)
        begun.wait()
    closed.set()

    assert first.solution.finish_reason == "interrupted"
    assert isinstance(list(first)[-1], Ended), "the remaining events still come"
    assert approximately(second.solution) == alone
    assert is_idle(solver)


def test_an_asynchronous_loop_that_is_left_ends_its_own_search(solver: Solver) -> None:
    alone = approximately(solver.solve(PROBLEMS[1]))
    left, statuses = threading.Event(), []

    def watch(event: Event) -> None:
        if isinstance(event, Selected):
            left.wait()
        if isinstance(event, Ended):
            statuses.append(event.status)

    solver.listeners = (watch,)

    async def leave() -> Solution:
        events = solver.astream(PROBLEMS[0])
        task = asyncio.create_task(solver.asolve(PROBLEMS[1]))
        assert isinstance(await anext(events), Header)
        await events.aclose()  # type: ignore[attr-defined]
        left.set()
        return await task

    assert approximately(asyncio.run(leave())) == alone
    assert statuses.count("interrupted") == 1 and len(statuses) == 2
    assert is_idle(solver)


def test_stop_ends_all_and_those_that_wait_never_begin(solver: Solver) -> None:
    stopped = threading.Event()
    together = Together()

    def watch(event: Event) -> None:
        together(event)
        if isinstance(event, Boundary) and not stopped.is_set():
            solver.stop()
            stopped.set()

    solver.listeners = (watch,)
    streams = opened_together(solver, *PROBLEMS, *PROBLEMS)
    reasons = [stream.solution.finish_reason for stream in streams]

    assert reasons == ["interrupted"] * 10
    assert len(together.headers) == 8
    assert streams[9].solution.id and list(streams[9]) == []
    assert is_idle(solver)
    assert solver.stream(PROBLEMS[0]).solution.finish_reason != "interrupted"


# Errors


def test_an_error_in_one_search_leaves_the_others(solver: Solver) -> None:
    alone = list(map(approximately, map(solver.solve, PROBLEMS[:2])))

    def fail(event: Event) -> None:
        if isinstance(event, Header) and event.problem == PROBLEMS[2]:
            raise ZeroDivisionError

    solver.listeners = (fail,)

    async def solve_all() -> list[Any]:
        return await asyncio.gather(
            solver.asolve(PROBLEMS[0]),
            solver.asolve(PROBLEMS[2]),
            solver.asolve(PROBLEMS[3], budget="3tok"),
            solver.asolve(" "),
            solver.asolve(PROBLEMS[1]),
            return_exceptions=True,
        )

    first, *failed, last = asyncio.run(solve_all())

    assert [type(each) for each in failed] == [ZeroDivisionError, BudgetInfeasible, InputError]
    assert [approximately(first), approximately(last)] == alone
    assert is_idle(solver)


@pytest.mark.parametrize("at", [Header, Boundary])
def test_what_ends_a_thread_ends_the_searches_and_nothing_hangs(
    solver: Solver, at: type[Event]
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, at):
            raise SystemExit(3)

    solver.listeners = (fail,)
    for stream in opened_together(solver, *PROBLEMS[:3]):
        with pytest.raises(SystemExit):
            _ = stream.solution
    solver.listeners = ()

    assert len(solutions(gather(solver, *PROBLEMS[:2]))) == 2
    assert is_idle(solver)


def test_a_model_that_cannot_be_loaded_ends_every_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> Any:
        raise ModelError("model-damaged", "no weights.")

    monkeypatch.setattr("arbor.model.weights.load_model", load)
    with Solver(**SMALL) as solver:
        results = gather(solver, *PROBLEMS[:3])

    assert [type(each) for each in results] == [ModelError] * 3


def test_a_thread_that_cannot_be_started_is_an_error(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        stream = solver.stream(PROBLEMS[0])
    with pytest.raises(RuntimeError, match="new thread"):
        list(stream)

    assert solver.stream(PROBLEMS[0]).solution.problem == PROBLEMS[0]


def test_a_bug_in_the_budget_ends_the_search_that_begins(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pool_of(runs: Any) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("arbor.run.batch.pool_of", pool_of)
        for stream in opened_together(solver, *PROBLEMS[:3]):
            with pytest.raises(ZeroDivisionError):
                _ = stream.solution

    assert solver.stream(PROBLEMS[0]).solution.problem == PROBLEMS[0]


def test_a_closed_solver_ends_its_streams() -> None:
    begun, go = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            go.wait()

    with Solver(**SMALL, listeners=[watch]) as solver:
        stream, late = solver.stream(PROBLEMS[0]), None
        begun.wait()
        with solver._next:  # as if another thread waited: nothing begins
            late = solver.stream(PROBLEMS[1])
            solver.close()
            go.set()
            assert late.solution.finish_reason == "interrupted"
            assert stream.solution.finish_reason == "interrupted"

    assert list(late) == []


def test_a_loop_that_is_given_up_leaves_no_search_behind(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coroutine that is closed in the middle, not cancelled."""
    jobs: list[SearchJob] = []
    add = Worker.add

    def added(worker: Worker, job: SearchJob) -> None:
        jobs.append(job)
        add(worker, job)

    monkeypatch.setattr(Worker, "add", added)
    with solver._busy:
        waiting = solver.asolve(PROBLEMS[0])
        loop = asyncio.new_event_loop()
        loop.call_soon(lambda: None)

        async def begin() -> None:
            waiting.send(None)

        loop.run_until_complete(begin())
        waiting.close()
        loop.close()
        (job,) = jobs
        assert job.taken and job.ended


# Next to solve and batches


def test_a_solve_waits_for_the_streams_before_it_and_not_for_later_ones(solver: Solver) -> None:
    begun, go = threading.Event(), threading.Event()
    together = Together()

    def watch(event: Event) -> None:
        together(event)
        if isinstance(event, Selected) and not begun.is_set():
            begun.set()
            go.wait()

    solver.listeners = (watch,)
    first = solver.stream(PROBLEMS[0])
    begun.wait()
    solving = threading.Thread(target=solver.solve, args=(PROBLEMS[1],))
    solving.start()
    until(solver._next.locked)
    last = solver.stream(PROBLEMS[2])
    go.set()
    solving.join()

    assert first.solution.error is None and last.solution.error is None
    assert [each.problem for each in together.headers] == list(PROBLEMS[:3])
    assert together.most == 1


def test_streams_of_several_threads_are_searched_together(solver: Solver) -> None:
    met = threading.Barrier(3)
    results: dict[int, Solution] = {}
    together = Together()
    solver.listeners = (together,)

    def read(place: int) -> None:
        stream = solver.stream(PROBLEMS[place])
        met.wait()
        assert isinstance(list(stream)[-1], Ended)
        results[place] = stream.solution

    threads = [threading.Thread(target=read, args=(place,)) for place in range(3)]
    with solver._busy:  # until all are open
        for thread in threads:
            thread.start()
        until(lambda: met.n_waiting == 0 and len(solver._worker._waiting) == 3)
    for thread in threads:
        thread.join()

    assert [results[place].problem for place in range(3)] == list(PROBLEMS[:3])
    assert together.most == 3


def test_a_thread_never_waits_for_itself(solver: Solver) -> None:
    batch = solver.imap(PROBLEMS[:3], concurrency=2)
    next(batch)
    stream = solver.stream(PROBLEMS[3])
    with pytest.raises(UsageError, match="solver-busy"):
        next(stream)
    with pytest.raises(UsageError, match="solver-busy"):
        _ = stream.solution
    assert len(list(batch)) == 2
    assert stream.solution.problem == PROBLEMS[3]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_listener_never_waits_for_its_own_engine(solver: Solver, streamed: bool) -> None:
    errors: list[BaseException] = []

    def again(event: Event) -> None:
        if isinstance(event, Selected) and not errors:
            try:
                asyncio.run(solver.asolve(PROBLEMS[1]))
            except UsageError as error:
                errors.append(error)

    solver.listeners = (again,)
    solution = solver.stream(PROBLEMS[0]).solution if streamed else solver.solve(PROBLEMS[0])

    assert solution.problem == PROBLEMS[0]
    assert [getattr(error, "code", None) for error in errors] == ["solver-busy"]


# The thread


def test_the_thread_ends_when_there_is_nothing_left(solver: Solver) -> None:
    worker = solver._worker
    for _ in range(3):
        gather(solver, *PROBLEMS[:2], max_tokens=1)
        until(lambda: worker._thread is None)
        assert worker.running == [] and not worker._waiting


@pytest.mark.slow
def test_the_end_of_the_process_does_not_wait_for_its_streams() -> None:
    code = (
        "import threading\n"
        "from arbor import Solver\n"
        "from arbor.events import Selected\n"
        "begun = threading.Event()\n"
        "solver = Solver(listeners=[lambda event: begun.set()], record_bytes=0)\n"
        "streams = [solver.stream('4 5 6 10'), solver.stream('1 2 3 4')]\n"
        "begun.wait()\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "Fatal" not in done.stderr


def test_at_exit_what_is_in_progress_ends(solver: Solver) -> None:
    begun, go = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            go.wait()

    solver.listeners = (watch,)
    stream = solver.stream(PROBLEMS[0])
    begun.wait()
    worker: Worker = solver._worker
    exiting = threading.Thread(target=worker._exit)
    exiting.start()
    until(lambda: stream._job.run._stopped)
    go.set()
    exiting.join()

    assert stream.solution.finish_reason == "interrupted"
