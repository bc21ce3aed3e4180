"""The Python interface around a search: callbacks, many problems, event loops, plans,
configurations."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import io
import json
import logging
import re
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import networkx
import numpy as np
import pytest

from arbor import (
    Callback,
    InputError,
    SafeCallback,
    Solution,
    Solver,
    StopSearch,
    TraceWriter,
    UsageError,
    read_trace,
)
from arbor.controllers.tot import ToT
from arbor.errors import BudgetInfeasible
from arbor.events import EVENTS, Answered, Boundary, Ended, Event, Header, Selected, Terminal
from arbor.model.loading import load_model, load_tokenizer
from arbor.run.config import config_text
from arbor.run.request import Options, Request
from arbor.tasks.base import Problem
from arbor.tasks.reasoning import Reasoning

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


def test_every_event_can_have_a_method() -> None:
    for kind in EVENTS:
        assert f"on_{kind.name}".isidentifier()


def test_what_a_callback_raises_reaches_the_caller(listening: Solver) -> None:
    class Broken(Callback):
        def on_select(self, event: Selected) -> None:
            raise ZeroDivisionError

    listening.listeners = (Broken(),)

    with pytest.raises(ZeroDivisionError):
        listening.solve(PUZZLE)


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


def test_what_failed_first_is_raised_and_every_listener_gets_the_end(
    listening: Solver, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Selected):
            raise ZeroDivisionError
        if isinstance(event, Ended):
            raise RuntimeError("again")

    heard: list[Event] = []
    listening.listeners = (fail, heard.append)

    with caplog.at_level(logging.WARNING, "arbor"), pytest.raises(ZeroDivisionError):
        listening.solve(PUZZLE)

    assert isinstance(heard[-1], Ended) and heard[-1].status == "error"
    assert [r.getMessage() for r in caplog.records] == [
        "a callback failed at the end of a failed search"
    ]


def test_a_callback_can_end_the_search(listening: Solver, tmp_path: Path) -> None:
    def stop_at_the_first_thought(event: Event) -> None:
        if isinstance(event, Boundary):
            raise StopSearch

    heard: list[Event] = []
    listening.listeners = (stop_at_the_first_thought, heard.append)
    solution = listening.solve(PUZZLE, trace=tmp_path / "run.arbor.jsonl")

    assert solution.finish_reason == "interrupted"
    assert solution.metrics.rounds == 1
    assert len(heard) == len(read_trace(tmp_path / "run.arbor.jsonl").events), "others hear it all"


def test_a_search_can_be_ended_before_it_begins(listening: Solver) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Header):
            raise StopSearch

    listening.listeners = (stop,)

    solution = listening.solve(PUZZLE)

    assert (solution.finish_reason, solution.metrics.blocks) == ("interrupted", 0)


def test_a_safe_callback_fails_once_aloud_and_harms_nothing(
    listening: Solver, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("no disk")

    def stop(event: Event) -> None:
        raise StopSearch

    safe = SafeCallback(fail)
    listening.listeners = (safe,)
    with caplog.at_level(logging.WARNING, "arbor"):
        solution = listening.solve(PUZZLE)

    assert solution.finish_reason in ("solved", "exhausted")
    assert safe.failures > 1
    assert [r.getMessage() for r in caplog.records] == [
        "a callback failed at 'header'; the search goes on"
    ]
    with pytest.raises(StopSearch):
        SafeCallback(stop)(Ended("solved", 0))


# What one run asks for


def test_the_options_of_a_run_are_the_fields_of_its_request() -> None:
    assert get_type_hints(Options) == get_type_hints(Request)


def test_a_budget_for_one_run_is_in_its_config(solver: Solver) -> None:
    smallest = solver.plan(PUZZLE).enough_tokens
    full = solver.solve(PUZZLE)

    small = solver.solve(PUZZLE, budget=f"{smallest}tok")

    assert small.metrics.budget_tokens == smallest < full.metrics.budget_tokens
    assert small.candidates == full.candidates
    assert (small.config["budget"], full.config["budget"]) == (f"{smallest}tok", "full")


def test_a_token_limit_ends_the_search(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, max_tokens=1)

    assert solution.finish_reason == "limit"
    assert solution.metrics.rounds == 1 <= solution.metrics.tokens_generated


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_tokens": 0}, "max_tokens is 0"), ({"timeout": -1.0}, "timeout is -1")],
)
def test_an_invalid_limit(solver: Solver, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        solver.solve(PUZZLE, **options)
    with pytest.raises(UsageError, match=r"'budgett'\. Did you mean 'budget'"):
        solver.solve(PUZZLE, budgett=0.5)  # type: ignore[call-arg]


def test_a_writer_of_ones_own_is_a_trace(solver: Solver, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"

    solution = solver.solve(PUZZLE, trace=TraceWriter(path, text="none"))

    assert solution.trace_path == str(path)
    assert not read_trace(path).words
    replay = solution.replay()
    assert replay.problems == [] and len(replay.blocks) == solution.metrics.nodes


def test_a_run_without_a_trace_is_replayed_from_memory(solver: Solver, tmp_path: Path) -> None:
    bare = solver.solve(PUZZLE, seed=SOLVED)
    traced = solver.solve(PUZZLE, seed=SOLVED, trace=tmp_path / "run.arbor.jsonl")

    assert traced.recording is None, "its trace holds the events"
    kept, read = bare.replay(), traced.replay()
    assert kept.problems == read.problems == []
    assert kept.blocks == read.blocks and kept.series == read.series
    assert kept.metrics() == bare.metrics


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


@pytest.mark.parametrize("most", [-1, 1.5, True, "9"])
def test_the_limit_of_memory_is_a_whole_number(most: Any) -> None:
    with pytest.raises(UsageError, match="record_bytes is"):
        Solver(record_bytes=most)


def test_a_solution_can_be_shown(solver: Solver, tmp_path: Path) -> None:
    kept, drawn, plain = io.StringIO(), io.StringIO(), io.StringIO()
    bare = solver.solve(PUZZLE, seed=SOLVED)
    traced = solver.solve(PUZZLE, seed=SOLVED, trace=tmp_path / "run.arbor.jsonl")

    bare.show(kept)
    traced.show(drawn)
    Solution.from_dict(bare.to_dict()).show(plain)

    for shown in (kept.getvalue(), drawn.getvalue()):
        assert shown.startswith(f"{PUZZLE} -> {bare.answer}\n")
        assert "KV   " in shown and "└── " in shown
    assert plain.getvalue().startswith(f"{PUZZLE} -> {bare.answer}\n")
    for step in bare.steps:
        assert f"#{step.node} v={step.value:.2f} {step.text.strip()}" in plain.getvalue()


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


def test_a_terminal_with_ipython_is_not_a_notebook(
    solver: Solver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    solution = solver.solve(PUZZLE, max_tokens=1)
    capsys.readouterr()

    solution.show()

    assert capsys.readouterr().out.startswith(f"{PUZZLE} -> ")


def test_a_solution_is_a_page(solver: Solver, tmp_path: Path) -> None:
    traced = solver.solve(PUZZLE, seed=SOLVED, trace=tmp_path / "run.arbor.jsonl")
    bare = solver.solve(PUZZLE, seed=SOLVED)

    for solution in (traced, bare):
        page = solution.to_html(tmp_path / "run.html").read_text(encoding="utf-8")
        assert page.lower().startswith("<!doctype html>") and 'class="run"' in page


def test_a_notebook_has_a_static_picture_of_a_solution(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, seed=SOLVED)

    picture = solution._repr_html_()

    assert picture.count("<circle") == solution.metrics.nodes
    assert "<script" not in picture and "<iframe" not in picture
    for step in solution.steps:
        assert f"<li>{html.escape(step.text.strip())}</li>" in picture


def test_words_of_a_problem_and_a_model_are_escaped(solver: Solver) -> None:
    hostile = "</li><script>alert(1)</script>&\x00\u202e\n\"'"
    solution = solver.solve(PUZZLE, seed=SOLVED)
    steps = (dataclasses.replace(solution.steps[0], text=hostile),)

    picture = dataclasses.replace(
        solution, problem=hostile, answer=hostile, steps=steps
    )._repr_html_()

    assert "<script" not in picture and "\x00" not in picture and "\u202e" not in picture
    assert picture.count("&lt;/li&gt;&lt;script&gt;") == 4  # heading (2), summary, step


# Short forms


def test_what_a_prompt_shows_is_one_line(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, seed=SOLVED)
    node = solver.engine.tree.nodes[1]

    assert repr(solver) == (
        "Solver('builtin:sapling', task='game24', controller='tot', verifier='exact', "
        "policy='reentry', budget='full', mode='lossless', seed=0)"
    )
    cost = solution.metrics
    assert repr(solution) == (
        f"Solution('{PUZZLE}': answer '{solution.answer}', correct, solved, {cost.blocks} blocks, "
        f"peak {cost.peak_tokens} of {cost.budget_tokens:,} tokens, {cost.wall_s:.1f} s)"
    )
    assert repr(node) == f"Node(1, {node.state}, tokens={len(node.tokens)}, value={node.value:.3f})"
    assert repr(solver.policy) == (
        "Policy('reentry', Reentry(), Recency(), sinks=4, recent=8, tail=0, floor=0)"
    )


def test_a_long_problem_is_cut_in_the_short_form(solver: Solver) -> None:
    solution = dataclasses.replace(
        solver.solve(PUZZLE, max_tokens=1), problem="x" * 500 + "\n", answer=None, correct=None
    )

    assert len(repr(solution)) < 200 and "\n" not in repr(solution)
    assert "…': no answer, limit" in repr(solution)


def test_a_budget_that_changed_nothing_says_so(solver: Solver) -> None:
    plan = solver.plan(PUZZLE)
    full = solver.solve(PUZZLE, seed=SOLVED)

    wide = solver.solve(PUZZLE, seed=SOLVED, budget=f"{plan.enough_tokens}tok")

    peak = full.metrics.peak_tokens
    assert peak < plan.enough_tokens < plan.full_tokens
    assert wide.metrics.peak_tokens == peak
    assert not full.budget_reached and not wide.budget_reached


class Counting(Reasoning):
    """Problems in words whose model writes no answer but a number, and ends its text there."""

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return bool(thoughts)

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return super().answer(problem, ["Then 3 and 4 make 7."] if thoughts else [])

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return super().is_guess(problem, ["Then 3 and 4 make 7."])


def test_a_guess_is_marked_in_the_solution_and_its_trace(tmp_path: Path) -> None:
    path, printed = tmp_path / "run.arbor.jsonl", io.StringIO()
    limits: dict[str, Any] = {"max_depth": 1, "step_tokens": 4, "controller": "chain"}
    with Solver(task=Counting(), **limits) as solver:
        solution = solver.solve("3+4?", trace=path)

    assert solution.answer == "7" and solution.guessed
    assert all(candidate.guessed for candidate in solution.candidates)
    assert "guessed answer '7'" in repr(solution) and "7</b>" not in solution._repr_html_()
    assert "<b>7 (guessed)</b>" in solution._repr_html_()
    solution.show(printed)
    assert printed.getvalue().startswith("3+4? -> 7 (guessed)\n")
    assert Solution.from_dict(json.loads(json.dumps(solution.to_dict()))) == solution
    ends = [e for e in read_trace(path).events if isinstance(e, Terminal | Answered)]
    assert ends and all(event.guessed for event in ends)


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


class Stated(Endless):
    """Problems whose model states its answer and goes on."""

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return False


def test_a_path_that_a_limit_cuts_keeps_an_answer_that_its_text_states() -> None:
    with Solver(task=Stated(), max_depth=1, step_tokens=4, controller="chain") as solver:
        solution = solver.solve("3+4?", expected="7")

    assert solution.answer == "7" and solution.correct
    assert solution.finish_reason == "cut"


def test_an_answer_of_another_task_is_not_a_guess(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, seed=SOLVED)

    assert solution.answer is not None and not solution.guessed
    assert not any(candidate.guessed for candidate in solution.candidates)


# Plans and configurations


def test_a_plan_needs_no_problem_and_no_weights() -> None:
    solver = Solver(**SMALL)

    plan = solver.plan()

    assert plan == solver.plan(solver.task.example)
    assert solver.plan(budget=0.5).room_tokens == pytest.approx(plan.full_tokens / 2, abs=1)
    assert solver.plan(max_depth=1).full_tokens < plan.full_tokens
    assert solver.plan(step_tokens=1).full_tokens < plan.full_tokens
    assert solver.checkpoint._files is not None
    assert solver.checkpoint._weights is None
    with pytest.raises(BudgetInfeasible):
        solver.plan(budget="3tok")
    with pytest.raises(UsageError, match="max_depth"):
        solver.plan(max_depth=0)


def test_a_configuration_in_a_file_builds_the_same_solver(solver: Solver, tmp_path: Path) -> None:
    settings = {"problem": PUZZLE, "expected": None} | solver.config
    (tmp_path / "run.toml").write_text(config_text(settings), encoding="utf-8")

    again = Solver.from_config(tmp_path / "run.toml")

    assert again.config == solver.config
    assert Solver.from_config(tmp_path / "run.toml", seed=9).config["seed"] == 9


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
    ],
)
def test_an_invalid_configuration_says_what_would_work(
    config: dict[str, object], code: str, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        Solver.from_config(config)
    assert caught.value.code == code


def test_a_configuration_without_a_model_is_of_the_built_in_one() -> None:
    assert Solver.from_config({"task": "game24"}).config["model"] == "builtin:sapling"


def test_limits_of_a_run_are_in_its_trace(solver: Solver, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    solution = solver.solve(PUZZLE, trace=path, timeout=60, max_tokens=40)

    header = read_trace(path).header
    assert header is not None
    assert (header.config["timeout"], header.config["max_tokens"]) == (60, 40)
    assert solution.config == header.config
    assert "timeout" not in solver.solve(PUZZLE).config
    assert Solver.from_config(header.config).config == solver.config


def test_numbers_of_other_kinds_are_taken_as_what_they_are(solver: Solver, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    limits = {"seed": np.int64(3), "timeout": np.float32(60), "max_tokens": np.int64(40)}
    solver.solve(PUZZLE, trace=path, **limits)

    header = read_trace(path).header
    assert header is not None and header.seed == 3
    assert (header.config["timeout"], header.config["max_tokens"]) == (60.0, 40)


def test_a_solver_of_ones_own_is_built_from_a_configuration_too() -> None:
    class Mine(Solver):
        def __init__(self, *given: Any, **settings: Any) -> None:
            super().__init__(*given, **settings)

    assert Mine.from_config({"task": "game24", "seed": 3}).seed == 3


@pytest.mark.parametrize(
    "limits",
    [{"timeout": "3"}, {"timeout": True}, {"max_tokens": 2.5}, {"timeout": 10**400}],
)
def test_limits_are_numbers(solver: Solver, limits: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="limit"):
        solver.solve(PUZZLE, **limits)


def test_a_writer_writes_one_run(solver: Solver, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run.arbor.jsonl")
    solver.solve(PUZZLE, trace=writer)
    before = writer.path.read_bytes()

    with pytest.raises(UsageError, match="trace-closed"):
        solver.solve(PUZZLE, trace=writer)
    assert writer.path.read_bytes() == before


# Many problems


def test_a_batch_is_each_problem_in_its_order(solver: Solver) -> None:
    solutions = solver.solve_batch([PUZZLE, OTHER])

    assert [s.problem for s in solutions] == [PUZZLE, OTHER]
    assert solutions[0].candidates == solver.solve(PUZZLE).candidates


def test_problems_are_read_when_they_are_due(solver: Solver) -> None:
    asked: list[str] = []

    def problems() -> Iterator[str]:
        for problem in (PUZZLE, OTHER):
            asked.append(problem)
            yield problem

    solutions = solver.imap(problems(), max_tokens=5)
    assert asked == []
    next(solutions)
    assert asked == [PUZZLE]


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


def test_one_trace_does_not_serve_many_problems(solver: Solver, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one trace for many"):
        solver.solve_batch([PUZZLE], trace=tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()


# Event loops


def test_a_search_can_be_awaited(solver: Solver) -> None:
    async def both() -> list[Solution]:
        return await asyncio.gather(solver.asolve(PUZZLE), solver.asolve(OTHER))

    first, second = asyncio.run(both())

    assert first.candidates == solver.solve(PUZZLE).candidates
    assert second.problem == OTHER


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

    def load(*given: Any) -> Any:
        loads.append(given)
        loading.set()
        time.sleep(0.3)
        return load_model(*given)

    monkeypatch.setattr("arbor.model.weights.load_tokenizer", read)
    monkeypatch.setattr("arbor.model.weights.load_model", load)

    async def solve(solver: Solver) -> list[Solution]:
        return await asyncio.gather(*(solver.asolve(PUZZLE, max_tokens=1) for _ in range(2)))

    with Solver(**SMALL) as solver:
        solutions = asyncio.run(solve(solver))

    assert [s.finish_reason for s in solutions] == ["limit"] * 2
    assert (len(reads), len(loads)) == (1, 1)


def test_events_can_be_awaited(solver: Solver) -> None:
    async def listen() -> list[Event]:
        return [event async for event in solver.astream(PUZZLE)]

    events = asyncio.run(listen())

    assert isinstance(events[0], Header) and isinstance(events[-1], Ended)


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


def test_what_fails_in_a_stream_is_raised_everywhere(solver: Solver) -> None:
    stream = solver.stream(PUZZLE, budget="3tok")

    with pytest.raises(BudgetInfeasible):
        list(stream)
    with pytest.raises(BudgetInfeasible):
        _ = stream.solution
    with pytest.raises(BudgetInfeasible):
        asyncio.run(stream.wait())


def test_stopping_a_search_that_waits_leaves_the_running_one_alone(listening: Solver) -> None:
    begun, go = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, Selected):
            begun.set()
            go.wait()

    listening.listeners = (watch,)
    solving = threading.Thread(target=lambda: found.append(listening.solve(PUZZLE)))
    found: list[Solution] = []
    solving.start()
    begun.wait()
    stream = listening.stream(OTHER)
    stream.stop()

    assert list(stream) == []
    assert (stream.solution.problem, stream.solution.finish_reason) == (OTHER, "interrupted")
    go.set()
    solving.join()
    assert found[0].finish_reason in ("solved", "exhausted")


def test_stopping_a_search_whose_end_was_not_heard_leaves_the_next_one_alone(
    listening: Solver,
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Ended):
            raise RuntimeError("no end")

    listening.listeners = (fail,)
    ended = listening.stream(PUZZLE, max_tokens=1)
    with pytest.raises(RuntimeError, match="no end"):
        list(ended)

    def stop_the_other(event: Event) -> None:
        ended.stop()

    listening.listeners = (stop_the_other,)

    assert listening.solve(PUZZLE).finish_reason in ("solved", "exhausted")


def test_a_search_that_ends_while_it_is_stopped() -> None:
    class Ending(Solver):
        """The first read of the run in progress is the last that finds one."""

        looked = False

        @property
        def _run(self) -> Any:
            before, self.looked = self.looked, True
            return None if before else FakeRun()

        @_run.setter
        def _run(self, run: Any) -> None:
            pass

    class FakeRun:
        def stop(self, status: str) -> None:
            stopped.append(status)

    stopped: list[str] = []
    Ending(**SMALL).stop()

    assert stopped == ["interrupted"]


# The search as a graph


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_the_graph_of_a_trace_is_that_of_the_live_tree(
    solver: Solver, tmp_path: Path, max_tokens: int | None
) -> None:
    solution = solver.solve(PUZZLE, trace=tmp_path / "run.arbor.jsonl", max_tokens=max_tokens)

    graph, live = solution.to_networkx(), solver.engine.tree.to_networkx()

    assert networkx.is_arborescence(graph)
    assert networkx.utils.graphs_equal(graph, live)
    assert len(graph) == solution.metrics.nodes
    assert {"text", "value", "state", "tokens"} == set(graph.nodes[0])
    if solution.path:
        assert tuple(networkx.shortest_path(graph, 0, solution.path[-1])) == solution.path
        texts = "".join(graph.nodes[node]["text"] for node in solution.path[1:])
        assert texts == solution.text


def test_a_run_without_a_trace_has_its_graph_too(solver: Solver) -> None:
    solution = solver.solve(PUZZLE, max_tokens=40)

    live = solver.engine.tree.to_networkx()
    assert networkx.utils.graphs_equal(solution.to_networkx(), live)


# The search as a table


def test_the_table_has_the_blocks_of_the_graph(solver: Solver) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    solution = solver.solve(PUZZLE, max_tokens=40)

    table, graph = solution.to_pandas(), solution.to_networkx()

    assert list(table.index) == list(graph) and table.index.name == "block"
    for name in ("text", "state", "tokens"):
        assert list(table[name]) == [graph.nodes[node][name] for node in graph]
    parents = {child: parent for parent, child in graph.edges}
    assert {node: int(table.parent[node]) for node in parents} == parents
    assert pandas.isna(table.parent[0])
    valued = table.value.dropna()
    assert len(valued) and dict(valued) == {n: graph.nodes[n]["value"] for n in valued.index}
    assert tuple(table.index[table.on_path]) == tuple(sorted(solution.path))


def test_a_table_needs_pandas(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(UsageError, match="pip install pandas"):
        solver.solve(PUZZLE, max_tokens=40).to_pandas()
