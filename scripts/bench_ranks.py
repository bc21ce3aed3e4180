"""What several processes cost that hold one model together: CPU seconds and bytes a step.

    python scripts/bench_ranks.py --model ./m.gguf --rows 1 8 --rounds 5 --csv rows.csv

One process computes with as many threads as there are processes otherwise, each of these with one
thread. Every arm decodes the same greedy tokens: `--rows` chains of `--tokens` after one prompt.
A time is the median of the rounds, of all processes together, and excludes loading; the prompt's
forward is a step. Bytes are those that the first process sends in a step, by the collectives of the
ranks (`sums`) and as what it tells the others (`orders`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from experiment_table import ExperimentTable, add_options

from arbor import Solver
from arbor.model.parallel.followers import Followers

PROMPT = "Tom has 3 boxes with 4 apples each. He eats 2. How many apples are left?"
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure every arm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    given = parser.parse_args()
    table = ExperimentTable(given)
    texts: dict[int, list[str]] = {}
    for processes in (1, given.processes):
        settings: dict[str, Any] = {
            "task": "reasoning",
            "controller": "chain",
            "sampling": {"temperature": 0.0},
            "path_tokens": given.tokens,
            "threads": given.processes // processes,
            "device": "cpu",
        }
        with Solver(given.model, tp=processes, **settings) as solver:
            solver.load()
            for rows in given.rows:
                found = [measured(solver, rows) for _ in range(given.rounds)]
                own = texts.setdefault(rows, found[0]["text"])
                row = {
                    "processes": processes,
                    "threads": settings["threads"],
                    "rows": rows,
                    "step_cpu_ms": statistics.median(each["cpu_ms"] for each in found),
                    "sums_bytes": found[-1]["sums"],
                    "orders_bytes": found[-1]["orders"],
                    "same_text": all(each["text"] == own for each in found),
                    "n": given.rounds,
                    "n_of": "rounds",
                }
                table.show(row)


def measured(solver: Solver, rows: int) -> dict[str, Any]:
    """CPU milliseconds and bytes of a step, and what was decoded."""
    followers = solver.engine.runner.followers
    before, cpu_before = sent_by(followers), cpu_seconds(followers)
    solutions = solver.solve_batch([PROMPT] * rows, concurrency=rows)
    cpu = cpu_seconds(followers) - cpu_before
    steps = max(each.metrics.steps for each in solutions)
    sums, orders = (
        (after - first) // steps for after, first in zip(sent_by(followers), before, strict=True)
    )
    text = [each.text for each in solutions]
    return {"cpu_ms": round(1000 * cpu / steps, 2), "sums": sums, "orders": orders, "text": text}


def sent_by(followers: Followers | None) -> tuple[int, int]:
    """Bytes that the first process has sent: in sums, and as orders."""
    if followers is None:
        return 0, 0
    return followers.ranks.sent_bytes, followers.ordered_bytes


def cpu_seconds(followers: Followers | None) -> float:
    """Of all processes."""
    found = time.process_time()
    for process in [] if followers is None else followers.processes:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        found += (int(stat[11]) + int(stat[12])) / TICKS
    return found


if __name__ == "__main__":
    main()
