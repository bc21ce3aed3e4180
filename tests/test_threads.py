"""torch's threads: their default, their number while a search runs, and afterwards."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arbor import Solver, StopSearch, UsageError, read_trace
from arbor.cli.build import build_solver
from arbor.cli.record_options import read_options
from arbor.cli.solve import SolveOptions, solve
from arbor.controllers.tot import ToT
from arbor.events import Event, Selected
from arbor.model.model_info import SMALL_MODEL, ModelInfo
from arbor.model.threads import keep_threads, thread_count, torch_threads

PUZZLE = "4 5 6 10"
SMALL: dict[str, Any] = {"controller": ToT(beam=2, width=3), "verifier": "exact"}
OUTSIDE = 3  # torch's number before every search here


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    """This thread and new ones begin with `OUTSIDE` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(OUTSIDE)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return Solver().describe()


@pytest.fixture(scope="module")
def two() -> Iterator[Solver]:
    """A solver of two threads."""
    with Solver(threads=2, **SMALL) as solver:
        solver.load()
        yield solver


@pytest.fixture
def solver(two: Solver) -> Iterator[Solver]:
    """The same; its listeners are forgotten afterwards."""
    yield two
    two.listeners = ()


def in_a_thread(function: Callable[[], Any]) -> Any:
    """The result of a function in a thread that has computed nothing."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def numbers() -> tuple[int, int]:
    """torch's number in this thread and in a new one."""
    return torch.get_num_threads(), in_a_thread(torch.get_num_threads)


# The default


def test_a_small_model_has_one_thread(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(info, parameters=SMALL_MODEL)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    assert info.parameters < SMALL_MODEL
    assert thread_count(None, info) == 1
    assert thread_count(None, large) is None
    assert thread_count(4, info) == thread_count(4, large) == 4


def test_the_environment_has_precedence_over_the_default(
    info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")

    assert thread_count(None, info) is None
    assert thread_count(4, info) == 4


@pytest.mark.parametrize("threads", [0, -1, 2.5, True, "2"])
def test_the_setting_is_a_whole_number(threads: Any) -> None:
    with pytest.raises(UsageError, match="threads is"):
        Solver(threads=threads)


@pytest.mark.slow
def test_importing_arbor_after_torch_changes_nothing() -> None:
    code = (
        "import os, torch; torch.set_num_threads(2); before = dict(os.environ); "
        "import arbor; arbor.Solver().describe(); "
        "assert torch.get_num_threads() == 2 and dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# While a search runs, and after it


@pytest.mark.parametrize(
    ("given", "imports", "policy"),
    [
        ({}, "arbor", "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "arbor", "ACTIVE"),
        ({}, "torch, arbor", "None"),  # too late: OpenMP has read it
    ],
)
def test_threads_of_torch_wait_without_spinning(
    given: dict[str, str], imports: str, policy: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    shown = subprocess.run(
        [sys.executable, "-c", f"import os, {imports}; print(os.environ.get('OMP_WAIT_POLICY'))"],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )

    assert shown.stdout.strip() == policy


def test_a_search_has_its_threads_and_torch_has_its_own_again(
    solver: Solver, tmp_path: Path
) -> None:
    seen: list[int] = []
    solver.listeners = (lambda event: seen.append(torch.get_num_threads()),)
    solution = solver.solve(PUZZLE, trace=tmp_path / "run.arbor.jsonl")

    assert set(seen) == {2}
    assert numbers() == (OUTSIDE, OUTSIDE)
    header = read_trace(tmp_path / "run.arbor.jsonl").header
    assert header is not None and header.device["threads"] == 2
    assert "threads" not in solution.config, "a property of the machine, as the device is"


def test_loading_has_the_solvers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from arbor.model import weights

    seen: list[int] = []
    load = weights.load_model

    def watched(*given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return load(*given)

    monkeypatch.setattr(weights, "load_model", watched)
    with Solver(threads=2, **SMALL) as solver:
        solver.load()
        assert numbers() == (OUTSIDE, OUTSIDE)
    assert seen == [2]
    assert numbers() == (OUTSIDE, OUTSIDE)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StopSearch])
def test_torch_has_its_own_number_however_a_search_ends(
    solver: Solver, error: type[BaseException]
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Selected):
            assert torch.get_num_threads() == 2
            raise error

    solver.listeners = (fail,)
    if error is StopSearch:
        assert solver.solve(PUZZLE).finish_reason == "interrupted"
    else:
        with pytest.raises(error):
            solver.solve(PUZZLE)

    assert numbers() == (OUTSIDE, OUTSIDE)


def test_an_abandoned_loop_leaves_nothing_behind(solver: Solver) -> None:
    stream = solver.stream(PUZZLE)
    for _ in stream:
        break
    stream.stop()
    assert stream.solution.finish_reason == "interrupted"
    assert numbers() == (OUTSIDE, OUTSIDE)

    async def one_event() -> None:
        events = solver.astream(PUZZLE)
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(one_event())
    with solver._busy:
        pass  # the search holds it until its end
    assert numbers() == (OUTSIDE, OUTSIDE)

    several = solver.imap([PUZZLE, PUZZLE], max_tokens=1)
    next(several)
    several.close()
    assert numbers() == (OUTSIDE, OUTSIDE)


def test_the_thread_that_asks_for_a_stream_keeps_its_number(solver: Solver) -> None:
    """A thread that computes for the first time takes over the number of the last one to set it."""
    begun, go = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            go.wait()

    def ask() -> int:
        stream = solver.stream(PUZZLE)
        begun.wait()
        during = torch.get_num_threads()
        go.set()
        list(stream)
        return during

    solver.listeners = (wait,)
    assert in_a_thread(ask) == OUTSIDE
    keep_threads()
    assert numbers() == (OUTSIDE, OUTSIDE)


# Several at once


def test_a_search_within_a_search_gives_the_outer_one_its_number_back(solver: Solver) -> None:
    seen: list[int] = []
    with Solver(threads=1, **SMALL) as inner:
        inner.load()
        inner.listeners = (lambda event: seen.append(torch.get_num_threads()),)

        def search(event: Event) -> None:
            if isinstance(event, Selected):
                inner.solve(PUZZLE, max_tokens=1)
                seen.append(torch.get_num_threads())

        solver.listeners = (search,)
        solver.solve(PUZZLE, max_tokens=1)

    assert set(seen[:-1]) == {1} and seen[-1] == 2
    assert numbers() == (OUTSIDE, OUTSIDE)


@pytest.mark.parametrize("last", ["first", "second"])
def test_searches_at_once_have_their_own_numbers(last: str) -> None:
    """The second begins in the middle of the first; either may end last."""
    events = {name: threading.Event() for name in ("first", "second", "end first", "end second")}
    found: dict[str, int] = {}

    def search(name: str, count: int | None) -> None:
        with torch_threads(count):
            events[name].set()
            events[f"end {name}"].wait()
            found[name] = torch.get_num_threads()

    threads = {
        name: threading.Thread(target=search, args=(name, count))
        for name, count in (("first", 1), ("second", None))
    }
    for name, thread in threads.items():
        thread.start()
        events[name].wait()
    for name in ("second", "first") if last == "first" else ("first", "second"):
        events[f"end {name}"].set()
        threads[name].join()

    assert found == {"first": 1, "second": OUTSIDE}
    assert numbers() == (OUTSIDE, OUTSIDE)


def test_two_solvers_search_at_once(solver: Solver) -> None:
    met = threading.Barrier(2)
    seen: dict[str, set[int]] = {"two": set(), "one": set()}

    def watch(name: str) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if isinstance(event, Selected) and not seen[name]:
                met.wait(60)
            seen[name].add(torch.get_num_threads())

        return listen

    with Solver(threads=1, **SMALL) as other:
        other.load()
        solver.listeners, other.listeners = (watch("two"),), (watch("one"),)
        streams = [each.stream(PUZZLE, max_tokens=40) for each in (solver, other)]
        for stream in streams:
            list(stream)

    assert seen == {"two": {2}, "one": {1}}
    assert numbers() == (OUTSIDE, OUTSIDE)


# The command


def test_the_command_leaves_threads_to_the_solver() -> None:
    for arguments, threads in ((["--set", "threads=2"], 2), ([], None)):
        context = solve.make_context("solve", [PUZZLE, *arguments])
        options = read_options(SolveOptions, context.params)

        assert build_solver(options.solver).setup.threads == threads
