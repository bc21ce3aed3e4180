"""The Python interface around a search: callbacks, many problems, event loops, plans,
configurations."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import pytest

from arbor import (
    Callback,
    InputError,
    Solution,
    Solver,
    UsageError,
    read_trace,
)
from arbor.controllers.tot import ToT
from arbor.events import Boundary, Ended, Event, Header, Selected, Terminal
from arbor.model.loading import load_model, load_tokenizer
from arbor.run.solution import failed_solution
from arbor.tasks.base import Problem
from arbor.tasks.reasoning import Reasoning
from arbor.trace import Replay

PUZZLE, OTHER = "4 5 6 10", "1 2 3 4"
SOLVED = 2  # a seed with which the small search solves the puzzle
SMALL: dict[str, Any] = {"controller": ToT(beam=2, width=3), "verifier": "exact"}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with Solver(**SMALL) as solver:
        solver.load()
        yield solver


@pytest.fixture
def listening(solver: Solver) -> Iterator[Solver]:
    """The same solver; its listeners are forgotten afterwards."""
    yield solver
    solver.listeners = ()


# Callbacks


def test_a_callback_has_a_method_for_each_event(listening: Solver) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.all: list[str] = []
            self.ended: list[Ended] = []

        def on_event(self, event: Event) -> None:
            self.all.append(event.name)

        def on_boundary(self, event: Boundary) -> None:
            assert isinstance(event, Boundary)
            self.all.append("- boundary")

        def on_end(self, event: Ended) -> None:
            self.ended.append(event)

    watch = Watch()
    listening.listeners = (watch,)
    solution = listening.solve(PUZZLE)

    assert (watch.all[0], watch.all[-1]) == ("header", "end")
    assert watch.all.count("- boundary") == watch.all.count("boundary") == solution.metrics.blocks
    assert watch.ended[0].metrics["nodes"] == solution.metrics.nodes


def test_what_a_callback_raises_reaches_the_caller(listening: Solver) -> None:
    class Broken(Callback):
        def on_select(self, event: Selected) -> None:
            raise ZeroDivisionError

    listening.listeners = (Broken(),)

    with pytest.raises(ZeroDivisionError):
        listening.solve(PUZZLE)


def test_a_callback_that_ends_an_iteration_is_named(listening: Solver) -> None:
    nothing: Iterator[Event] = iter(())
    listening.listeners = (lambda event: next(nothing) if isinstance(event, Selected) else None,)

    for solve in (listening.solve, lambda problem: next(listening.imap([problem]))):
        with pytest.raises(UsageError, match="StopIteration at 'select'") as caught:
            solve(PUZZLE)
        assert caught.value.code == "listener-raised"


def test_a_callback_that_fails_at_the_header_leaves_a_whole_trace(
    listening: Solver, tmp_path: Path
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Header):
            raise ZeroDivisionError

    listening.listeners = (fail,)
    with pytest.raises(ZeroDivisionError):
        listening.solve(PUZZLE, trace=tmp_path / "run.arbor.jsonl")

    ended = Replay.of(read_trace(tmp_path / "run.arbor.jsonl")).ended
    assert ended is not None and ended.status == "error"


def test_a_search_within_a_search_of_the_same_solver_is_refused(listening: Solver) -> None:
    def again(event: Event) -> None:
        if isinstance(event, Selected):
            listening.solve(OTHER)

    listening.listeners = (again,)
    stream = listening.stream(PUZZLE)  # a thread of its own: what hangs must not hang the tests

    with pytest.raises(UsageError, match="solver-busy"):
        _ = stream.solution
    listening.listeners = ()
    assert listening.solve(OTHER).problem == OTHER


# What one run asks for


def test_a_solution_that_kept_no_events_says_what_would_work(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, max_tokens=1)
    from_json = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))

    assert from_json == solution
    with pytest.raises(UsageError, match=r"trace-missing.*kept none.*trace='run"):
        from_json.replay()
    with Solver(record_bytes=0, **SMALL) as forgetful:
        forgotten = forgetful.solve(PUZZLE, max_tokens=1)
    with pytest.raises(UsageError, match="kept none in memory"):
        forgotten.to_html("never.html")
    with Solver(record_bytes=100, **SMALL) as short:
        long = short.solve(PUZZLE, seed=SOLVED)
        assert long.recording is not None and long.recording.bytes == 0
        with pytest.raises(UsageError, match=r"events take more than the 100 B.*record_bytes"):
            long.replay()
        assert "<svg" not in long._repr_html_() and long.steps[0].text.strip() in long._repr_html_()


def test_a_notebook_shows_the_page(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    ipython = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=object()),
        display=types.SimpleNamespace(display=lambda data, raw: shown.append((data, raw))),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    solution, printed = solver.solve(PUZZLE, max_tokens=1), io.StringIO()

    solution.show(printed)
    assert printed.getvalue() and not shown
    solution.show()

    (data, raw) = shown[0]
    assert raw and "<iframe" in data["text/html"] and "sandbox" in data["text/html"]


# Short forms


class Counting(Reasoning):
    """Problems in words whose model writes no answer but a number, and ends its text there."""

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return bool(thoughts)

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return super().answer(problem, ["Then 3 and 4 make 7."] if thoughts else [])

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return super().is_guess(problem, ["Then 3 and 4 make 7."])


class Endless(Counting):
    """The same problems, where the text goes on for ever."""

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return False


@pytest.mark.parametrize("limit", ["max_depth", "path_tokens"])
def test_a_path_that_a_limit_cuts_has_no_guess_for_an_answer(limit: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_depth": 1, "step_tokens": 4, "controller": "chain"}
    limits |= {"path_tokens": 4, "max_depth": 64} if limit == "path_tokens" else {}
    with Solver(task=Endless(), **limits) as solver:
        solution = solver.solve("3+4?", trace=tmp_path / "run.arbor.jsonl")

    assert solution.answer is None and solution.finish_reason == "cut"
    assert sum(step.tokens for step in solution.steps) == 4
    assert [(each.answer, each.cut) for each in solution.candidates] == [(None, True)]
    (end,) = (e for e in read_trace(str(solution.trace_path)).events if isinstance(e, Terminal))
    assert end.cut and end.answer is None and not end.guessed


@dataclass(frozen=True)
class Final(Counting):
    """The same problems, where a path that ends gives this."""

    gives: str | None = None

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return self.gives

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return self.gives == "guess"


@pytest.mark.parametrize(("gives", "status"), [(None, "cut"), ("guess", "solved"), ("7", "solved")])
def test_a_step_that_a_limit_shortened_ends_a_path_only_with_an_answer(
    gives: str | None, status: str
) -> None:
    with Solver(task=Final(gives=gives), step_tokens=4, controller="chain") as solver:
        solution = solver.solve("3+4?")

    assert (solution.answer, solution.finish_reason) == (gives, status)
    assert [each.cut for each in solution.candidates] == [status == "cut"]
    assert solution.guessed == (gives == "guess")


@pytest.mark.parametrize("limit", [{"path_tokens": 5}, {"path_tokens": 24}, {"step_tokens": 3}])
def test_a_line_that_a_limit_shortened_is_a_cut_path(limit: dict[str, int]) -> None:
    """Half a line is no legal step, which also ends a path."""
    with Solver(seed=1, **limit) as solver:
        solution = solver.solve("4 5 6 10")

    assert (solution.answer, solution.finish_reason) == (None, "cut")
    assert any(each.cut for each in solution.candidates)


# Plans and configurations


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"modle": "builtin:sapling"}, "unknown-setting", "Did you mean 'mode'?"),
        ({"sampling": {"top_k": "lossy"}}, "limit", "top_k is 'lossy'. It is a whole number"),
        ({"sampling": {"top_p": True}}, "limit", "top_p is True. It is a number"),
        ({"sampling": {"arithmetic": 1}}, "setting-type", "it must be true or false."),
        ({"model": {}}, "setting-type", "it must be text, or a ready model"),
        ({"sampling": 3}, "setting-type", "it must be a table of settings"),
        ({"sampling": {"temprature": 1}}, "unknown-setting", "Did you mean 'temperature'?"),
        ({"max_depth": 2.5}, "limit", "max_depth is 2.5"),
        ({"step_tokens": True}, "limit", "step_tokens is True"),
        ({"max_expansions": "3"}, "limit", "max_expansions is '3'"),
        ({"seed": 1.0}, "limit", "seed is 1.0"),
        (3, "setting-type", "the configuration is 3. It is the path of a TOML file, or a mapping"),
        ([], "setting-type", "the configuration is []."),
        (b"x", "setting-type", "the configuration is b'x'."),
        ({1: 2}, "setting-type", "the configuration has the key 1."),
        ({None: 2}, "setting-type", "the configuration has the key None."),
    ],
)
def test_an_invalid_configuration_says_what_would_work(config: Any, code: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        Solver.from_config(config)
    assert caught.value.code == code


# Many problems


def test_a_problem_that_cannot_be_solved_is_an_error_or_a_row(solver: Solver) -> None:
    with pytest.raises(InputError):
        solver.solve_batch([PUZZLE, "4 5"])

    with pytest.raises(UsageError, match="on-error"):
        solver.imap([PUZZLE], on_error="ignore")
    good, bad, last = solver.solve_batch([PUZZLE, "4 5", OTHER], on_error="return", max_tokens=5)

    assert good.error is None and last.problem == OTHER
    assert (bad.finish_reason, bad.answer, bad.problem) == ("error", None, "4 5")
    assert bad.error is not None and bad.error["code"] == "problem-invalid"
    assert Solution.from_dict(json.loads(json.dumps(bad.to_dict()))) == bad


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda good: None, "is None, and no mapping"),
        (lambda good: {}, "has no schema; this arbor reads arbor.solution/1"),
        (lambda good: {"error": {"code": "problem-empty"}}, "of a failed run: .*problem-empty"),
        (lambda good: good | {"schema": "arbor.solution/9"}, "schema 'arbor.solution/9'; this"),
        (lambda good: good | {"recording": None}, "unknown entry 'recording'"),
        (lambda good: {"schema": good["schema"]}, "lacks 'path'"),
        (lambda good: {name: good[name] for name in good if name != "seed"}, "argument: 'seed'"),
        (lambda good: good | {"steps": [{"node": 1}]}, "value that cannot be read: .*'text'"),
        (lambda good: good | {"metrics": None}, "value that cannot be read"),
        (lambda good: good | {"votes": [3]}, "value that cannot be read"),
    ],
)
def test_a_document_of_no_solution_is_refused(change: Any, wrong: str) -> None:
    error = InputError("problem-empty", "the problem is empty.")
    good = failed_solution("game24", PUZZLE, error, {"seed": 0}).to_dict()
    assert Solution.from_dict(good).to_dict() == good

    with pytest.raises(InputError, match=rf"solution-invalid\] the solution's document .*{wrong}"):
        Solution.from_dict(change(good))


def test_the_solution_of_a_failed_problem_holds_what_was_asked(solver: Solver) -> None:
    asked: Any = {"budget": 0.25, "max_tokens": 5, "timeout": 9, "seed": 5}
    good, bad = solver.solve_batch([PUZZLE, "4 5"], on_error="return", **asked)

    assert bad.config == good.config
    assert {name: bad.config[name] for name in asked} == {**asked, "budget": "0.25"}
    assert bad.score is None and bad.seed == 5
    (bad,) = solver.solve_batch([PUZZLE], on_error="return", max_tokens=-1)
    assert bad.error is not None and bad.error["code"] == "limit"


# Event loops


def test_searches_that_begin_together_load_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search, if it reads for itself, begins before the first has read and ends while
    that loads."""
    reads, loads = [], []
    second, loading = threading.Event(), threading.Event()

    def read(source: Any) -> Any:
        reads.append(source)
        if len(reads) == 1:
            second.wait(0.3)
        else:
            second.set()
            loading.wait()
        return load_tokenizer(source)

    def load(*given: Any, **named: Any) -> Any:
        loads.append(given)
        loading.set()
        time.sleep(0.3)
        return load_model(*given, **named)

    monkeypatch.setattr("arbor.model.weights.load_tokenizer", read)
    monkeypatch.setattr("arbor.model.weights.load_model", load)

    async def solve(solver: Solver) -> list[Solution]:
        return await asyncio.gather(*(solver.asolve(PUZZLE, max_tokens=1) for _ in range(2)))

    with Solver(**SMALL) as solver:
        solutions = asyncio.run(solve(solver))

    assert [s.finish_reason for s in solutions] == ["limit"] * 2
    assert (len(reads), len(loads)) == (1, 1)


def test_a_cancelled_task_stops_its_search(listening: Solver) -> None:
    begun, go, ended = threading.Event(), threading.Event(), []

    def watch(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            go.wait()
        if isinstance(event, Ended):
            ended.append(event.status)

    listening.listeners = (watch,)

    async def cancel() -> None:
        task = asyncio.create_task(listening.asolve(PUZZLE))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()

    asyncio.run(cancel())
    with listening._busy:  # the search holds it until its end
        assert ended == ["interrupted"]


# The search as a graph


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_the_graph_of_a_trace_is_that_of_the_live_tree(
    solver: Solver, tmp_path: Path, max_tokens: int | None
) -> None:
    solution = solver.solve(PUZZLE, trace=tmp_path / "run.arbor.jsonl", max_tokens=max_tokens)

    graph, live = solution.to_networkx(), solver.engine.tree

    assert networkx.is_arborescence(graph)
    assert set(graph.edges) == {(each.parent.id, each.id) for each in live if each.parent}
    assert dict(graph.nodes(data=True)) == {
        each.id: {
            "text": each.text,
            "value": math.nan if each.judged is None else each.value,
            "state": each.state.value,
            "tokens": len(each.tokens),
        }
        for each in live
    }
    assert len(graph) == solution.metrics.nodes
    assert {"text", "value", "state", "tokens"} == set(graph.nodes[0])
    if solution.path:
        assert tuple(networkx.shortest_path(graph, 0, solution.path[-1])) == solution.path
        texts = "".join(graph.nodes[node]["text"] for node in solution.path[1:])
        assert texts == solution.text


# The search as a table
