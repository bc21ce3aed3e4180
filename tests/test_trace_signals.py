"""Real searches that are interrupted or killed at random moments leave traces that can be read."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

import arbor.solver
from arbor.cli import main
from arbor.trace import Replay, read_trace
from arbor.trace.repair import repair_trace

MOMENTS = 20
SEARCH = ("solve", "4 5 6 10", "--budget", "0.1")
BYTES = {"": 50_000, ".gz": 8_000}  # about what such a search writes

pytestmark = pytest.mark.slow
assert arbor.solver, "imported before the fork, for all children"


def interrupt(path: Path, number: int, draw: random.Random) -> tuple[int, str]:
    """The command in a child that gets a signal once its trace has a random size; exit status, and
    stdout with stderr."""
    moment = draw.randrange(1, BYTES[path.suffix if path.suffix == ".gz" else ""])
    said = path.with_suffix(".txt")
    child = os.fork()
    if child == 0:
        with said.open("w", encoding="utf-8", buffering=1) as sys.stdout:
            sys.stderr = sys.stdout
            os.dup2(sys.stdout.fileno(), 2)  # the signal's handler writes there
            code = main([*SEARCH, "--seed", str(draw.randrange(999)), "--trace", str(path)])
        os._exit(code)
    ended = 0
    while not ended and not (path.exists() and path.stat().st_size >= moment):
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if not ended:
        os.kill(child, number)
        _, status = os.waitpid(child, 0)
    return status, said.read_text("utf-8")


@pytest.mark.parametrize("suffix", BYTES)
def test_a_search_that_is_interrupted_leaves_a_whole_trace(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(f"SIGINT{suffix}")
    interrupted = 0
    for number in range(MOMENTS // 2):
        path = tmp_path / f"{number}.arbor.jsonl{suffix}"
        status, said = interrupt(path, signal.SIGINT, draw)

        assert os.waitstatus_to_exitcode(status) in (0, 3, 130), said
        assert "Traceback" not in said
        replay = Replay.of(read_trace(path))
        assert replay.problems == []
        assert replay.ended is not None
        interrupted += replay.ended.status == "interrupted"
        if replay.ended.status == "interrupted":
            assert os.waitstatus_to_exitcode(status) == 130
        if replay.answered is not None and replay.answered.text is not None:
            assert replay.answered.text in said
    assert interrupted >= MOMENTS // 4, "most signals came in time"


@pytest.mark.parametrize("suffix", BYTES)
def test_a_search_that_is_killed_leaves_a_readable_trace(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(f"SIGKILL{suffix}")
    for number in range(MOMENTS // 4):
        path = tmp_path / f"{number}.arbor.jsonl{suffix}"
        interrupt(path, signal.SIGKILL, draw)

        trace = read_trace(path)
        assert trace.header is not None and trace.bad_lines <= 1 and trace.gaps == ()
        damage = {"the file is cut off", "the end is missing"}
        found = [each for each in Replay.of(trace).problems if each not in damage]
        assert found in ([], [f"line {trace.first_bad_line} is unreadable"])
        repaired = repair_trace(path, tmp_path / f"{number}.clean.jsonl")
        assert Replay.of(read_trace(repaired.path)).problems == []
