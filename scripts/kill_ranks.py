"""Kills of a random one of several processes that hold one model, at a random moment.

    python scripts/kill_ranks.py --rounds 100 --csv rows.csv

A round begins ``arbor solve --tp N`` with the built-in model, waits until the trace has a random
number of forwards, and a random time more, and kills one of the N with SIGKILL. It counts what
must not be: processes that still run 10 s later, temporary files of arbor, a
trace that lost or changed a byte that was written, and a command that ends without its message,
its exit code or the trace's last event.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_table import ExperimentTable, add_options

from arbor.cli import main as arbor
from arbor.errors import RankLost
from arbor.events import Ended
from arbor.trace.read import read_trace

PROC = Path("/proc")
FORWARD = b'"e":"forward"'
LOADING_S, PATIENCE_S, POLL_S = 300.0, 10.0, 0.002
# what a command imports: once, in a process that forks the commands
IMPORTED = ["kill_ranks", "arbor.model.weights", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True, slots=True)
class Killed:
    """What one kill left.

    Attributes:
        victim: 0 is the command itself, which begins the others.
        forwards: in the trace before the kill.
        running: processes that still run `PATIENCE_S` later.
        seconds: until all had ended.
    left: temporary files.
        lost: the trace has not all the bytes it had before the kill.
        unsaid: the command said or wrote something else than it should.
    """

    victim: int
    forwards: int
    running: int
    seconds: float
    left: int
    lost: bool
    unsaid: bool


def main() -> None:
    """Kill, and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    found = []
    for number in range(given.rounds):
        found.append(kill_one(given.processes, draw))
        print(number, found[-1], flush=True)
    table = ExperimentTable(given)
    for victim, group in (
        ("the first", [each for each in found if not each.victim]),
        ("another", [each for each in found if each.victim]),
    ):
        table.show({"processes": given.processes, "victim": victim, **summary(group)})


def summary(group: list[Killed]) -> dict[str, Any]:
    """A row of the table."""
    return {
        "forwards_most": max((each.forwards for each in group), default=0),
        "seconds_most": max((round(each.seconds, 2) for each in group), default=0),
        "still_running": sum(each.running for each in group),
        "files_left": sum(each.left for each in group),
        "traces_lost": sum(each.lost for each in group),
        "ended_otherwise": sum(each.unsaid for each in group),
        "n": len(group),
        "n_of": "kills",
    }


def kill_one(processes: int, draw: random.Random) -> Killed:
    """Begin a search, kill one of its processes, and see what is left."""
    least, victim, later = draw.randrange(1, 15), draw.randrange(processes), draw.random() * 0.2
    with tempfile.TemporaryDirectory() as folder:
        trace, temporary = Path(folder) / "run.arbor.jsonl", Path(folder) / "temporary"
        temporary.mkdir()
        words = ["solve", "4 5 6 10", "--controller", "mcts,simulations=3000,width=12"]
        words += ["--temperature", "1", "--seed", str(draw.randrange(99)), "--device", "cpu"]
        words += ["--tp", str(processes), "--trace", str(trace)]
        said = Path(folder) / "said"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        command = context.Process(target=run_command, args=(words, said, temporary))
        command.start()
        try:
            _wait_for(trace, least, command)
            ranks = [command.pid or 0, *children_of(command.pid or 0)]
            assert len(ranks) == processes, "each rank is a process"
            time.sleep(later)
            before = trace.read_bytes()
            os.kill(ranks[victim], signal.SIGKILL)
            since = time.monotonic()
            command.join(60)
            running = still_running(ranks, since + PATIENCE_S)
            seconds = time.monotonic() - since
        finally:
            command.kill()
        events = read_trace(trace).events
        if victim:
            lost = said.read_bytes().count(b"[rank-lost]") == 1
            right = command.exitcode == RankLost.exit_code and lost
            right = right and isinstance(events[-1], Ended) and events[-1].status == "error"
        else:
            right = command.exitcode == -signal.SIGKILL and bool(events)
        return Killed(
            victim=victim,
            forwards=before.count(FORWARD),
            running=len(running),
            seconds=seconds,
            left=len(list(temporary.glob("arbor-*"))),
            lost=not trace.read_bytes().startswith(before),
            unsaid=not right,
        )


def run_command(words: list[str], said: Path, temporary: Path) -> None:
    """``arbor`` in this process: what it says goes to a file, its temporary files to a folder."""
    os.environ["TMPDIR"] = str(temporary)
    with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.exit(arbor(words))


def _wait_for(trace: Path, forwards: int, command: Any) -> None:
    until = time.monotonic() + LOADING_S
    while not trace.exists() or trace.read_bytes().count(FORWARD) < forwards:
        if command.exitcode is not None or time.monotonic() > until:
            raise SystemExit(f"no search began, exit code {command.exitcode}")
        time.sleep(POLL_S)


def children_of(pid: int) -> list[int]:
    """The processes that a process has begun, in their order."""
    return sorted(
        int(each.parent.name) for each in PROC.glob("[0-9]*/stat") if _parent(each) == pid
    )


def still_running(processes: list[int], until: float) -> list[int]:
    """Those of these that run at a time of the clock; at once if none does."""
    while (running := list(filter(_runs, processes))) and time.monotonic() < until:
        time.sleep(POLL_S)
    return running


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def _runs(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
