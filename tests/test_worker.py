"""Streams of one solver, searched together by one background thread."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from test_batch import PROBLEMS, SMALL, Together, approximately, is_idle, solver_of

from arbor import Solver
from arbor.errors import UsageError
from arbor.events import Boundary, Ended, Event, Header, Selected
from arbor.model.checkpoint import Checkpoint
from arbor.model.model_info import Description
from arbor.run.solution import Solution
from arbor.run.stream import SearchStream
from arbor.trace import Replay, read_trace


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


# In an event loop


def test_no_event_loop_reads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[int] = set()
    read = Checkpoint.read

    def recorded(self: Checkpoint) -> Description:
        readers.add(threading.get_ident())
        return read(self)

    monkeypatch.setattr(Checkpoint, "read", recorded)

    async def solve(solver: Solver, *, stop: bool) -> Solution:
        task = asyncio.create_task(solver.asolve(PROBLEMS[0]))
        await asyncio.sleep(0)
        if stop:
            solver.stop()
        return await task

    with Solver(**SMALL) as solver, Solver(**SMALL) as stopped:
        asyncio.run(solve(solver, stop=False))
        assert asyncio.run(solve(stopped, stop=True)).finish_reason == "interrupted"

    assert readers and threading.get_ident() not in readers


def test_no_event_loop_imports_torch_and_an_error_of_it_reaches_those_that_wait() -> None:
    code = (
        "import asyncio, sys, threading\n"
        "from arbor import Solver\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            threads.append(threading.current_thread())\n"
        "            raise ImportError('no torch here')\n"
        "async def solve():\n"
        "    both = [solver.asolve('4 5 6 10'), solver.asolve('1 2 3 4')]\n"
        "    return await asyncio.gather(*both, return_exceptions=True)\n"
        "threads, solver = [], Solver(device='cpu')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "errors = asyncio.run(solve())\n"
        "print(list(map(str, errors)), bool(threads), threading.main_thread() in threads)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert done.stdout.strip() == f"{['no torch here'] * 2} True False", done.stderr
    assert not done.stderr


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


def test_stop_reaches_a_search_that_begins_meanwhile(solver: Solver) -> None:
    class Going(list[Any]):
        """Searches in progress; the first begins as soon as they were looked at."""

        def __iter__(self) -> Iterator[Any]:
            seen = self[:]
            if threading.current_thread() is threading.main_thread():
                solver._busy.release()
                until(lambda: not worker._waiting)
            return iter(seen)

    worker = solver._worker
    solver._busy.acquire()
    stream = solver.stream(PROBLEMS[0])
    worker._going = Going()
    solver.stop()
    assert stream.solution.finish_reason == "interrupted"


# Errors


# Next to solve and batches


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


def test_a_loop_goes_on_in_another_thread(solver: Solver) -> None:
    """A thread waits for the loop unless it was the last to go on with it."""
    batch = solver.as_completed([(each, {}) for each in PROBLEMS[:3]], concurrency=1)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, closing(batch):
        for each in first, second:
            each.submit(next, batch).result()
            with pytest.raises(UsageError, match="solver-busy"):
                each.submit(solver.solve, PROBLEMS[3]).result(timeout=20)
        waits = first.submit(solver.solve, PROBLEMS[3])
        until(solver._next.locked)
        assert len(second.submit(list, batch).result()) == 1
        assert waits.result().problem == PROBLEMS[3]
    assert is_idle(solver)


def test_a_loop_that_a_thread_left_is_not_that_of_a_thread_with_its_number(solver: Solver) -> None:
    """The system gives the number of a thread that is over to another."""
    batch = solver.as_completed([(each, {}) for each in PROBLEMS[:2]], concurrency=1)
    began = threading.Thread(target=next, args=[batch])
    began.start()
    began.join()
    results: list[Solution | UsageError] = []

    def wait() -> None:
        if threading.get_ident() == began.ident:
            try:
                results.append(solver.solve(PROBLEMS[3]))
            except UsageError as error:
                results.append(error)

    for _ in range(100):
        waits = threading.Thread(target=wait)
        waits.start()
        while waits.is_alive() and not (results or solver._next.locked()):
            time.sleep(0.001)
        if results or waits.is_alive():
            break
    assert not results
    assert len(list(batch)) == 1
    waits.join()
    assert all(isinstance(each, Solution) for each in results)


@pytest.mark.parametrize("way", ["solve", "stream", "batch"])
def test_a_listener_never_waits_for_its_own_engine(solver: Solver, way: str) -> None:
    errors: list[BaseException] = []

    def again(event: Event) -> None:
        if isinstance(event, Selected) and not errors:
            try:
                asyncio.run(solver.asolve(PROBLEMS[1]))
            except UsageError as error:
                errors.append(error)
            assert not solver._worker.waiting, "what is refused is not searched either"

    solver.listeners = (again,)
    if way == "batch":
        (solution,) = solver.solve_batch(PROBLEMS[:1])
    elif way == "stream":
        solution = solver.stream(PROBLEMS[0]).solution
    else:
        solution = solver.solve(PROBLEMS[0])

    assert solution.problem == PROBLEMS[0]
    assert [getattr(error, "code", None) for error in errors] == ["solver-busy"]


# The thread


def test_an_engine_that_nobody_else_has_is_freed_before_its_last_search_ends() -> None:
    """After it the thread may still run when Python exits, and what torch frees then aborts."""
    freed: list[bool] = []
    with Solver(**SMALL) as solver:
        engine = weakref.ref(solver.engine)
        shared = solver.shared(at_once=1)
        job = shared.begin(shared.prepare(PROBLEMS[0]))
        ended = threading.Event()
        job.at_end(lambda: freed.append(engine() is None))
        job.at_end(ended.set)
        job.events.get()
        solver.close()
        job.solution()
        ended.wait(60)

    assert freed == [True]


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


# Another process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_process_is_refused_and_never_waits(solver: Solver) -> None:
    """The thread that holds the engine is not in the fork."""
    solver.load()
    uses: list[Callable[[], Any]] = [
        lambda: solver.solve(PROBLEMS[1]),
        lambda: solver.stream(PROBLEMS[1]),
        lambda: next(stream),
        lambda: stream.solution,
        lambda: asyncio.run(solver.asolve(PROBLEMS[1])),
        lambda: solver.solve_batch(PROBLEMS[:2]),
        lambda: solver.generate("2+3", max_tokens=1),
        lambda: solver.logprobs([([1], [2])]),
        lambda: solver.load(),
        lambda: solver.update_weights({}, drain=True),
    ]
    with solver._busy:  # as in a search
        stream = solver.stream(PROBLEMS[0])
        forked = os.fork()
        if forked == 0:
            signal.alarm(60)
            try:
                for use in uses:
                    with pytest.raises(UsageError, match="solver-process"):
                        use()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(forked, 0)[1] == 0
    assert stream.solution.problem == PROBLEMS[0]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_solver_is_of_one_process(copied: Callable[[Solver], Any]) -> None:
    with pytest.raises(UsageError, match=r"solver-process.*from_config"):
        copied(Solver())
