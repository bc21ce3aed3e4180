"""torch's threads: their default, their number while a search runs, and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.slow_cases import every

from arbor import Solver, StopSearch
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.events import Event, Selected
from arbor.model import weights
from arbor.model.fuse.parts import fuse
from arbor.model.model_info import SMALL_MODEL, ModelInfo
from arbor.model.threads import thread_count

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


@pytest.mark.parametrize("count", [0, 1025, 100_000])
def test_more_threads_than_a_system_begins_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {count}.* and at most 1024"):
        Solver(threads=count)


@pytest.mark.slow
def test_importing_arbor_after_torch_changes_nothing() -> None:
    code = (
        "import os, torch; torch.set_num_threads(2); before = dict(os.environ); "
        "import arbor; arbor.Solver().describe(); "
        "assert torch.get_num_threads() == 2 and dict(os.environ) == before"
    )
    # which torch sets itself as parts of it are imported
    settings = os.environ | {"TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}
    subprocess.run([sys.executable, "-c", code], check=True, env=settings)


# While a search runs, and after it


@pytest.mark.parametrize(
    ("given", "imports", "policy"),
    every(
        3,
        [
            ({}, "arbor", "PASSIVE"),
            ({"OMP_WAIT_POLICY": "ACTIVE"}, "arbor", "ACTIVE"),
            ({}, "torch, arbor", "None"),  # too late: OpenMP has read it
        ],
    ),
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


# Several at once


@pytest.mark.parametrize("ahead", [0, 1])
def test_loops_that_end_in_any_order_leave_torch_as_it_was(two: Solver, ahead: int) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, Selected):
            seen.add(torch.get_num_threads())

    seen: set[int] = set()
    with Solver(threads=1, **SMALL, listeners=[listen]) as one:
        loops = [each.imap([PUZZLE, PUZZLE]) for each in (two, one)]
        for each in loops:
            next(each)
            assert torch.get_num_threads() == OUTSIDE
        for each in loops[ahead], loops[1 - ahead]:
            assert len(list(each)) == 1

    assert seen == {1}
    assert numbers() == (OUTSIDE, OUTSIDE)


def test_every_thread_that_goes_on_with_a_loop_computes_with_its_threads(solver: Solver) -> None:
    seen: list[tuple[int, int]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Selected):
            seen.append((threading.get_ident(), torch.get_num_threads()))

    solver.listeners = (listen,)
    loop = solver.imap([PUZZLE, PUZZLE])
    next(loop)
    after = in_a_thread(lambda: (next(loop), torch.get_num_threads()))[1]

    assert len({thread for thread, _ in seen}) == 2
    assert {number for _, number in seen} == {2}
    assert after == OUTSIDE
    assert numbers() == (OUTSIDE, OUTSIDE)


def test_parts_are_compared_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other programs run, torch waits longer for a second thread than its part takes."""
    seen: list[int] = []

    def counted(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return fuse(*args)

    monkeypatch.setattr(weights, "fuse", counted)
    with Solver(threads=2, **SMALL) as solver:
        solver.load()

    assert seen == [1]
    assert torch.get_num_threads() == OUTSIDE
