"""Real searches that are interrupted or killed at random moments leave traces that can be read."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.run_cli import run_and_record

from arbor.trace import Replay, read_trace
from arbor.trace.repair import repair_trace

MOMENTS = 20
SEARCH = ("solve", "4 5 6 10", "--budget", "0.25")
BYTES = {"": 50_000, ".gz": 8_000}  # about what such a search writes

pytestmark = pytest.mark.slow

# Children are forked from a process that has imported arbor once and started no threads.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["arbor.solver"])


def interrupt(path: Path, number: int, draw: random.Random) -> tuple[int, str]:
    """The command in a child that gets a signal once its trace has a random size; exit code (minus
    a signal that ended it), and stdout with stderr."""
    moment = draw.randrange(1, BYTES[path.suffix if path.suffix == ".gz" else ""])
    said = path.with_suffix(".txt")
    command = [*SEARCH, "--seed", str(draw.randrange(999)), "--trace", str(path)]
    child = CHILDREN.Process(target=run_and_record, args=(command, said))
    child.start()
    while child.is_alive() and not (path.exists() and path.stat().st_size >= moment):
        time.sleep(0.002)
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, number)
    child.join()
    assert child.exitcode is not None
    return child.exitcode, said.read_text("utf-8")


@pytest.mark.parametrize("suffix", BYTES)
def test_a_search_that_is_interrupted_leaves_a_whole_trace(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(f"SIGINT{suffix}")
    interrupted = 0
    for number in range(MOMENTS // 2):
        path = tmp_path / f"{number}.arbor.jsonl{suffix}"
        code, said = interrupt(path, signal.SIGINT, draw)

        assert code in (0, 3, 130), said
        assert "Traceback" not in said
        replay = Replay.of(read_trace(path))
        assert replay.problems == []
        assert replay.ended is not None
        interrupted += replay.ended.status == "interrupted"
        if replay.ended.status == "interrupted":
            assert code == 130
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
        assert trace.header is not None and trace.bad_lines <= 1 and not trace.gaps
        damage = {"the file is cut off", "the end is missing"}
        found = [each for each in Replay.of(trace).problems if each not in damage]
        assert found in ([], [f"line {trace.first_bad_line} is unreadable"])
        repaired = repair_trace(path, tmp_path / f"{number}.clean.jsonl")
        assert Replay.of(read_trace(repaired.path)).problems == []
