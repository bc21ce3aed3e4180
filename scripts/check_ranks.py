"""Whether several processes that hold a model on GPUs give the texts of one, and a step's cost.

    python scripts/check_ranks.py --model ./m.gguf --csv rows.csv
    ARBOR_TP_SHARE_GPU=1 python scripts/check_ranks.py --model ./m.gguf

The second command is for a machine with one GPU, which the processes share. For each dtype, one
process and then several decode greedy chains and a small tree, without CUDA graphs; with the first
dtype one more search is begun, and one of its processes is killed in it. Each of these parts is a
process with a time limit; all load beside each other, and a row says which part did not end. Bytes
are those that the first process sends in a step, as in ``bench_ranks.py``; `gpu_mib` is its largest
allocation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiment_table import ExperimentTable, add_options

PROMPTS = [
    "Tom has 3 boxes with 4 apples each. He eats 2. How many apples are left?",
    "A train goes 60 miles in an hour. How far does it go in three hours?",
]
CASES: dict[str, dict[str, Any]] = {
    "chains": {"controller": "chain", "sampling": {"temperature": 0.0}},
    "tree": {"controller": "beam,beam_size=2,width=2", "sampling": {"temperature": 0.7}},
}
READY = {"ready": True}
KILLED_AT = 4  # forwards of the search in which a process is killed
COLUMNS = (
    *("dtype", "processes", "case", "same_texts", "ms_a_step", "steps", "sums_bytes"),
    *("orders_bytes", "load_s", "weights_mib", "gpu_mib", "ended_s", "said"),
)
LINES = 6  # of what a part that failed has said


def main() -> None:
    """Run every part, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=16, help="of a chain, and of a path")
    parser.add_argument("--load-s", type=float, default=35, help="most seconds until all loaded")
    parser.add_argument("--part-s", type=float, default=20, help="most seconds of a part")
    parser.add_argument("--limit-s", type=float, default=60, help="most seconds in all")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    add_options(parser)
    given = parser.parse_args()
    if given.part is not None:
        run_part(given, **json.loads(given.part))
        return
    table, until = ExperimentTable(given), time.monotonic() + given.limit_s
    texts: dict[tuple[str, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            Part(number, dtype, processes, Path(folder))
            for number, dtype in enumerate(given.dtypes)
            for processes in (1, given.processes)
        ]
        try:
            for part in parts:  # all load beside each other, and are measured one by one
                part.until = min(until, time.monotonic() + given.load_s)
                part.is_ready = next(part.rows(), None) == READY
            for part in parts:
                part.until = min(until, time.monotonic() + given.part_s)
                for row in part.measured():
                    found = row.pop("texts", None)
                    if found is not None:
                        own = texts.setdefault((row["dtype"], row["case"]), found)
                        row["same_texts"] = sum(map(str.__eq__, found, own))
                    row = {name: row.get(name, "") for name in COLUMNS}
                    table.show(row | {"n": len(found or []), "n_of": "texts"})
        finally:
            for part in parts:
                part.end()


class Part:
    """One process that measures.

    Args:
        number: of the dtype; a process of the first one is killed at the end.
        dtype, processes: that hold the model.
        folder: for what it says.

    Attributes:
        until: when the clock says so, it has had its time.
        is_ready: it has loaded.
    """

    def __init__(self, number: int, dtype: str, processes: int, folder: Path) -> None:
        self.until, self.is_ready = 0.0, False
        self._known = {"dtype": dtype, "processes": processes}
        kills = processes > 1 and not number
        words = json.dumps({**self._known, "kills": kills})
        self._said = folder / f"{dtype}-{processes}"
        debug = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{self._said}.nccl.%h.%p"}
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, *sys.argv, "--part", words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                bufsize=1,
                env=debug | dict(os.environ),
            )

    def measured(self) -> Iterator[dict[str, Any]]:
        """What it measures; a row that says why where it fails or does not end."""
        assert self._process.stdin is not None, "it is a pipe"
        if self.is_ready:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write("go\n")
            yield from self.rows()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self.until - time.monotonic()))
        what = "search" if self.is_ready else "load"
        if self._process.poll() is None:
            yield {**self._known, "said": f"did not {what} in time{self._last()}"}
            self.end()
        elif code := self._process.returncode:
            yield {**self._known, "said": f"did not {what}: exit code {code}{self._last()}"}

    def rows(self) -> Iterator[dict[str, Any]]:
        """What it writes, while it has time."""
        assert self._process.stdout is not None, "it is a pipe"
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while waiting.select(max(0.0, self.until - time.monotonic())):
                line = self._process.stdout.readline()
                if not line:
                    return
                yield json.loads(line)

    def end(self) -> None:
        """End it; the processes that it has begun end by themselves."""
        self._process.kill()
        self._process.wait()

    def _last(self) -> str:
        found = ""
        for file in sorted(self._said.parent.glob(f"{self._said.name}*")):
            lines = file.read_text(errors="replace").splitlines()[-LINES:]
            found += f"; {file.name}: {' | '.join(lines)}" if lines else ""
        return found


def run_part(given: argparse.Namespace, dtype: str, processes: int, kills: bool) -> None:
    """Load the model, search, and print a row for each case."""
    import torch
    from bench_ranks import sent_by

    from arbor import Solver

    known = {"dtype": dtype, "processes": processes}
    settings: dict[str, Any] = {
        "task": "reasoning",
        "path_tokens": given.tokens,
        "step_tokens": max(1, given.tokens // 3),
        "dtype": dtype,
        "device": given.device,
        "cuda_graphs": False,
        "tp": processes,
    }
    began = time.monotonic()
    with Solver(given.model, **settings, **CASES["chains"]) as loaded:
        loaded.load()
        loaded.solve(PROMPTS[0], max_tokens=2)  # compiles kernels
        load_s, planned = time.monotonic() - began, loaded.describe().weights_bytes
        followers = loaded.engine.runner.followers
        print(json.dumps(READY), flush=True)
        sys.stdin.readline()
        for case, own in CASES.items():
            solver = Solver(given.model, **settings, **own)
            solver.checkpoint = loaded.checkpoint
            before, began = sent_by(followers), time.monotonic()
            solutions = solver.solve_batch(PROMPTS, concurrency=len(PROMPTS))
            steps = max(each.metrics.steps for each in solutions)
            sums, orders = (
                (after - first) // steps
                for after, first in zip(sent_by(followers), before, strict=True)
            )
            gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            row = {
                **known,
                "case": case,
                "ms_a_step": round(1000 * (time.monotonic() - began) / steps, 2),
                "steps": steps,
                "sums_bytes": sums,
                "orders_bytes": orders,
                "load_s": round(load_s, 1),
                "weights_mib": planned >> 20,
                "gpu_mib": gpu >> 20,
                "texts": [each.text for each in solutions],
            }
            print(json.dumps(row), flush=True)
        if kills:
            longer = Solver(given.model, **{**settings, **CASES["tree"], "path_tokens": 400})
            longer.checkpoint = loaded.checkpoint
            row = {**known, "case": "kill", **killed(longer)}
            print(json.dumps(row), flush=True)


def killed(solver: Any) -> dict[str, Any]:
    """What is said, and how soon, where another process is killed in a search."""
    from arbor.errors import RankLost
    from arbor.events import Event, Forwarded

    count, since = 0, 0.0

    def hear(event: Event) -> None:
        nonlocal count, since
        count += isinstance(event, Forwarded)
        if count >= KILLED_AT and not since:
            since = time.monotonic()
            os.kill(solver.engine.runner.followers.processes[0].pid, signal.SIGKILL)

    solver.listeners = (hear,)
    try:
        solver.solve(PROMPTS[0])
    except RankLost as error:
        return {"ended_s": round(time.monotonic() - since, 2), "said": str(error)}
    return {"ended_s": round(time.monotonic() - since, 2), "said": "nothing"}


if __name__ == "__main__":
    main()
