"""Ctrl-C at any line of the engine: the user sees it, and what is searched next is as ever."""

from __future__ import annotations

import dis
import inspect
import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.reward_models import OWN

import arbor
from arbor import Solver
from arbor.events import Event, Selected
from arbor.model.checkpoint import Checkpoint
from arbor.run.searches import completed
from arbor.run.solution import Solution
from arbor.support.read_write_lock import ReadWriteLock

pytestmark = pytest.mark.usefixtures("loaded_once")

HOME = Path(arbor.__file__).parent
PARTS = ("engine/", "memory/", "heads/", "forest.py", "tree.py")
PROBLEM = "4 5 6 10"
LATER = (PROBLEM, "2 7 8 9", PROBLEM)
CHAIN = {"controller": "chain", "max_depth": 2, "step_tokens": 4, "verifier": "exact"}
BEAM = {"controller": "tot,beam=2,width=2", "max_depth": 2, "step_tokens": 4, "verifier": "self"}

Line = tuple[CodeType, int]
Traced = Callable[[FrameType, str, Any], Any]


def is_traced(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(str(HOME)) and name[len(str(HOME)) + 1 :].startswith(PARTS)


@contextmanager
def tracing(line: Callable[[Line], None], wanted: Callable[[CodeType], bool]) -> Iterator[None]:
    """Within, called with every line of the code that is wanted, before it runs."""

    def local(frame: FrameType, event: str, argument: Any) -> Traced:
        if event == "line":
            line((frame.f_code, frame.f_lineno))
        return local

    def traced(frame: FrameType, event: str, argument: Any) -> Traced | None:
        return local if wanted(frame.f_code) else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_at(line: Line, nth: int, search: Callable[[], Any]) -> KeyboardInterrupt | None:
    """Search, interrupted as that line is reached the nth time; what is raised, with all that it
    refers to, as a notebook keeps it. None: the line was not reached so often.

    Raises:
        AssertionError: the search ended with anything else.
    """
    seen = 0

    def interrupt(here: Line) -> None:
        nonlocal seen
        seen += here == line
        if here == line and seen == nth:
            raise KeyboardInterrupt

    with tracing(interrupt, lambda code: code is line[0]):
        try:
            search()
        except KeyboardInterrupt as interruption:
            return interruption
        except BaseException as error:
            raise AssertionError(f"told as {error!r}") from error
    assert seen < nth, "the interruption was lost"
    return None


def found(solution: Solution) -> dict[str, Any]:
    """All of a solution but times, and what is asked for."""
    shown = solution.to_dict()
    counts = {name: each for name, each in shown["metrics"].items() if not name.endswith("_s")}
    return {**shown, "metrics": counts, "config": None, "trace_path": None}


def later(solver: Solver) -> list[dict[str, Any]]:
    return [found(solver.solve(problem)) for problem in LATER]


def lines_of(search: Callable[[], Any]) -> Counter[Line]:
    """How often a search reaches each line."""
    reached: Counter[Line] = Counter()
    with tracing(lambda line: reached.update([line]), is_traced):
        search()
    return reached


def shown(line: Line, nth: int) -> str:
    return f"{Path(line[0].co_filename).name}:{line[1]} in {line[0].co_name}, time {nth}"


KNOWN = (
    ("close", "del self.trees[opened.tree]"),
    ("drop", "self.trees.remove(tree)"),
    ("drop", "self._free = sorted("),
    ("open", "self._look()"),
    ("_take", "self._paths += sum"),
)


def known_lines(reached: Counter[Line]) -> list[Line]:
    lines = {
        code.co_filename: Path(code.co_filename).read_text().splitlines() for code, _ in reached
    }
    return [
        line
        for line in reached
        for name, text in KNOWN
        if line[0].co_name == name
        and lines[line[0].co_filename][line[1] - 1].strip().startswith(text)
    ]


def check_all(
    settings: dict[str, Any], search: Callable[[Solver], Any], *, known: bool, drawn: int
) -> None:
    """Interrupt a search at the known lines, and at others that are drawn."""
    with Solver(**settings) as fresh:
        wanted = later(fresh)
    with Solver(**settings) as solver:
        solver.solve(PROBLEM)
        reached = lines_of(lambda: search(solver))
        every_line = sorted(reached, key=lambda line: (line[0].co_filename, line[1]))
        lines = known_lines(reached) if known else []
        assert len(lines) >= len(KNOWN) or not known
        draw = random.Random(0)
        lines += draw.sample(every_line, min(drawn, len(every_line)))
        for line in lines:
            nth = draw.randint(1, reached[line])
            where = shown(line, nth)
            try:
                kept = interrupted_at(line, nth, lambda: search(solver))
                assert later(solver) == wanted, f"other results after {kept!r}"
            except Exception as error:
                raise AssertionError(where) from error


def alone(solver: Solver) -> Any:
    return solver.solve(PROBLEM)


def together(solver: Solver) -> Any:
    return solver.solve_batch([PROBLEM, "2 7 8 9", "1 2 3 4"], concurrency=2)


def beams(solver: Solver) -> Any:
    return solver.generate(PROBLEM, beams=2, max_tokens=4)


def test_after_an_interruption_at_any_line_a_search_is_as_ever() -> None:
    check_all({**CHAIN, "budget": 0.3}, alone, known=True, drawn=24)


TIGHT = {**BEAM, "budget": 1e-9}
LOSSY = {**BEAM, "budget": 0.5, "mode": "lossy"}
SCENARIOS: tuple[tuple[dict[str, Any], Callable[[Solver], Any]], ...] = (
    ({**CHAIN, "budget": 0.3, "debug": True}, alone),
    ({**CHAIN, "budget": "200tok"}, beams),
    (TIGHT, together),
    ({**TIGHT, "host": "40tok", "disk": "200tok"}, together),
    ({**LOSSY, "rehydrate": "selective", "host": "200tok", "host_bits": 4}, together),
    ({**BEAM, "budget": "100tok", "host": "2000tok", "staging": "50tok"}, together),
    ({**LOSSY, "policy": "h2o,granularity=head"}, together),
    ({**BEAM, "budget": "400tok", "mode": "lossy", "share": "similar"}, together),
    ({**TIGHT, "verifier": OWN}, together),
)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "search"), SCENARIOS)
def test_after_an_interruption_in_any_part_a_search_is_as_ever(
    settings: dict[str, Any], search: Callable[[Solver], Any]
) -> None:
    check_all(settings, search, known=False, drawn=150)


def test_another_thread_may_close_a_solver_at_any_moment() -> None:
    """Here the thread itself does, before it reads an attribute that this takes away."""
    checkpoint = [Checkpoint.read, Checkpoint._read, Checkpoint.load, Checkpoint.has]
    codes = [each.__code__ for each in (*checkpoint, Checkpoint.backend_name, Solver.close)]
    codes += [each.fget.__code__ for each in (Checkpoint.rounding, Checkpoint.updated)]
    codes.append(Solver.engine.fget.__code__)
    taken = {"_engine", "_weights", "_files", "_description", "_digests", "_followers"}
    reads = {
        (code, each.offset)
        for code in codes
        for each in dis.get_instructions(code)
        if each.opname == "LOAD_ATTR" and each.argval in taken
    }
    left = 0

    def step(frame: FrameType, event: str, argument: Any) -> Traced:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and (frame.f_code, frame.f_lasti) in reads:
            left -= 1
            if left == 0:
                solver.close()
        return step

    def use() -> None:
        solver.plan(PROBLEM)
        runner = solver.engine.runner
        solver.checkpoint.has(runner)
        _ = solver.checkpoint.rounding, solver.checkpoint.updated
        solver.checkpoint.backend_name(solver.describe())
        solver.close()

    with Solver() as solver:
        for nth in itertools.count(1):
            left = nth
            sys.settrace(lambda frame, *_: step if frame.f_code in codes else None)
            try:
                use()
            finally:
                sys.settrace(None)
            if left > 0:
                break
    assert nth > 10


@pytest.mark.parametrize("nth", [1, 3])
def test_an_interruption_between_two_resumptions_leaves_no_search_open(nth: int) -> None:
    code = completed.__code__
    lines = sorted({number for *_, number in code.co_lines() if number} - {code.co_firstlineno})
    with Solver(**TIGHT) as fresh:
        wanted = later(fresh)
    with Solver(**TIGHT) as solver:
        solver.load()
        reached = 0
        for number in lines:
            kept = interrupted_at((code, number), nth, lambda: alone(solver))
            assert later(solver) == wanted, f"line {number}"
            reached += kept is not None
    assert reached >= 3


def test_a_search_that_another_thread_asks_for_goes_on_when_one_that_waits_is_interrupted() -> None:
    """Only what holds the engine is ended by an interruption."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            assert goes_on.wait(30)

    with Solver(**CHAIN) as solver:
        wanted = alone(solver).candidates
        solver.listeners = (wait,)
        stream = solver.stream(PROBLEM)
        assert begun.wait(30)

        def interrupt(line: Line) -> None:
            goes_on.set()
            raise KeyboardInterrupt

        with (
            tracing(interrupt, lambda code: code is inspect.unwrap(ReadWriteLock.waiting).__code__),
            pytest.raises(KeyboardInterrupt),
        ):
            solver.solve(PROBLEM)

        assert stream.solution.candidates == wanted
