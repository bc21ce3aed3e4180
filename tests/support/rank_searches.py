"""Searches for tests of tensor parallelism: run as a program, it is one rank of several.

    python rank_searches.py RANKS OUT DIE_AT CASES

CASES is a JSON list of settings of `Solver`, one search each; a trace of each goes to OUT/NUMBER.
Rank 1 dies before forward DIE_AT, or stands still where that is negative; 0: never. Its own logits
are noisy, as if it rounded very differently. A case may give each rank a seed, as `seeds`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from arbor import Solver
from arbor.errors import ArborError

ROOT = Path(__file__).parents[2]
PROBLEM = "4 5 6 10"


def trace_of(out: Path, number: int) -> Path:
    """Where the trace of a case is."""
    return out / f"{number}.arbor.jsonl"


def search(cases: Sequence[Mapping[str, Any]], out: Path, ranks: int, die_at: int = 0) -> None:
    """Run each case, in this process."""
    for number, case in enumerate(cases):
        given = dict(case)
        if seeds := given.pop("seeds", None):
            given["seed"] = seeds[int(os.environ["RANK"])]
        with Solver(device="cpu", tp=ranks, **given) as solver:
            runner = solver.engine.runner
            if runner.ranks is not None and runner.ranks.number == 1:
                _add_noise(runner)
                if die_at:
                    _fail(runner, die_at)
            solver.solve(PROBLEM, trace=trace_of(out, number), max_tokens=600)


def start(
    cases: Sequence[Mapping[str, Any]], out: Path, ranks: int = 2, die_at: int = 0
) -> list[subprocess.Popen[str]]:
    """The processes of the ranks, as ``torchrun`` starts them."""
    given = [str(ranks), str(out), str(die_at), json.dumps(cases)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *given],
            env=os.environ
            | shared
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def _add_noise(runner: Any) -> None:
    forward = runner._forward

    def noisy(*args: Any) -> Any:
        result = forward(*args)
        result.logits.add_(torch.randn_like(result.logits))
        return result

    runner._forward = noisy


def _fail(runner: Any, at: int) -> None:
    """Have this rank fail before its forward number |at|."""
    forward, count = runner.forward, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == abs(at):
            if at < 0:
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **kwargs)

    runner.forward = failing


if __name__ == "__main__":
    count, folder, die_at, cases = sys.argv[1:]
    try:
        search(json.loads(cases), Path(folder), int(count), int(die_at))
    except ArborError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
