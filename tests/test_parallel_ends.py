"""Tensor parallelism: processes that end, stand still or are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.run_cli import REAL, spawn
from support.two_ranks import PROBLEM, TWO

from arbor import Solver
from arbor.errors import RankLost
from arbor.events import Ended, Event, Forwarded
from arbor.trace.read import read_trace
from arbor.tree import ThoughtTree

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from kill_ranks import children_of, kill_one, still_running

KILLS = 4
LONG = {**TWO, "controller": "mcts,simulations=200"}
LEAST_BYTES = 400  # of a file that the command writes once it searches


@pytest.mark.slow
def test_the_others_end_with_the_solver() -> None:
    solver = Solver(**TWO)
    solver.load()
    assert solver.engine.runner.followers is not None
    (process,) = solver.engine.runner.followers.processes
    assert process.poll() is None
    solver.close()
    assert process.poll() is not None
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_others_end_with_the_last_search_of_a_closed_solver() -> None:
    def processes() -> list[subprocess.Popen[bytes]]:
        assert solver.engine.runner.followers is not None
        return solver.engine.runner.followers.processes

    solver = Solver(**LONG)
    stream = solver.stream(PROBLEM)
    list(itertools.islice(stream, 60))
    (process,) = processes()
    solver.close()
    assert stream.solution.finish_reason == "interrupted"
    assert process.poll() is not None
    assert not torch.distributed.is_initialized()

    jobs = [(PROBLEM, {"max_tokens": 40 * place + 1}) for place in range(3)]
    loop = solver.as_completed(jobs, concurrency=2)
    next(loop)
    (process,), engine = processes(), solver.engine
    solver.close()
    assert process.poll() is None
    place, solution = next(loop)
    assert (place, solution.finish_reason) == (1, "limit")
    assert len(list(loop)) == 1  # by other processes
    assert process.poll() is not None
    with pytest.raises(RankLost, match="ended with their solver"):
        engine.open(tree := ThoughtTree([1, 2, 3]), 8)
        engine.extend(tree.root)
    solver.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "at"),
    [
        (signal.SIGKILL, 5),
        *(pytest.param(signal.SIGKILL, at, marks=pytest.mark.slow) for at in (1, 2, 3, 9)),
        pytest.param(signal.SIGSTOP, 5, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_or_stands_still_ends_the_search(
    signal_number: signal.Signals, at: int, tmp_path: Path
) -> None:
    count, since = 0, 0.0

    def hear(event: Event) -> None:
        nonlocal count, since
        count += isinstance(event, Forwarded)
        if count == at and not since:
            since = time.monotonic()
            assert solver.engine.runner.followers is not None
            os.kill(solver.engine.runner.followers.processes[0].pid, signal_number)

    trace = tmp_path / "run.arbor.jsonl"
    with Solver(**LONG, listeners=[hear]) as solver:
        with pytest.raises(RankLost) as lost:
            solver.solve(PROBLEM, trace=trace)
        assert time.monotonic() - since < (45 if signal_number == signal.SIGSTOP else 5)
        word = "not answered" if signal_number == signal.SIGSTOP else "SIGKILL"
        assert word in str(lost.value)
        with pytest.raises(RankLost):
            solver.solve(PROBLEM)
    events = read_trace(trace).events
    assert isinstance(events[-1], Ended)
    assert events[-1].status == "error"


def all_end(processes: list[int]) -> bool:
    """Whether none of these runs any more, soon."""
    return not still_running(processes, time.monotonic() + 10)


@pytest.mark.slow
def test_random_kills_of_a_rank_lose_and_leave_nothing() -> None:
    draw = random.Random(1)
    kills = [kill_one(2, draw) for _ in range(KILLS)]
    assert {each.victim for each in kills} == {0, 1}
    assert [each for each in kills if each.running or each.left or each.lost or each.unsaid] == []


def command(*arguments: str, trace: Path) -> subprocess.Popen[bytes]:
    """``arbor`` on two processes, searching."""
    given = (*arguments, "--tp", "2", "--device", "cpu")
    process = spawn(*given, code=REAL)
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if trace.exists() and trace.stat().st_size > LEAST_BYTES:
            return process
        time.sleep(0.002)
    process.kill()
    raise AssertionError(process.communicate())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_to_the_command_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    trace = tmp_path / "run.arbor.jsonl"
    wide = ("--controller", "mcts,simulations=3000", "--trace", str(trace))
    process = command("solve", PROBLEM, *wide, trace=trace)
    others = children_of(process.pid)
    assert others
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert all_end(others)
    assert read_trace(trace).header is not None


@pytest.mark.slow
def test_an_evaluation_whose_rank_is_killed_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("eval", "game24", "--limit", "12", "--concurrency", "1", "--output", str(out))
    first = command(*words, trace=out / "samples.jsonl")
    os.kill(children_of(first.pid)[0], signal.SIGKILL)
    _, said = first.communicate(timeout=30)
    assert first.returncode == 8, said
    assert said.count(b"[rank-lost]") == 1
    assert b"to resume: arbor eval" in said
    assert b"--tp 2" in said
    kept = (out / "samples.jsonl").read_text().splitlines()
    again = spawn(*words, "--tp", "2", "--device", "cpu", code=REAL)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    lines = (out / "samples.jsonl").read_text().splitlines()
    assert lines[: len(kept)] == kept
    alone = Solver(device="cpu")
    for row in map(json.loads, lines):
        assert alone.solve(row["problem"], seed=row["seed"]).answer == row["answer"]
