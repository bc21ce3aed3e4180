"""The same searches at smaller and smaller budgets: is the tree the same, and what does it cost?

    python scripts/bench_budget.py --n 20 --json out.json

Every problem is solved at every budget in turn, with the same seed; the tree is the same if every block has the same
tokens. Thread CPU time, one thread; the ratio is per problem against full retention, its median with a bootstrap 95 %
interval.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_decode import interval

from arbor import Solver
from arbor.events import Boundary, Event
from arbor.tasks.game24 import Game24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--budgets", nargs="+", default=["full", "0.1", "0.05", "0.035"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    events: list[Event] = []
    solvers = {
        budget: Solver(budget=budget, seed=args.seed, listeners=[events.append])
        for budget in args.budgets
    }
    seen: dict[str, list[dict[str, Any]]] = {budget: [] for budget in args.budgets}
    for problem in Game24().problems("test", args.n):
        for budget, solver in solvers.items():
            solver.load()
            events.clear()
            began = time.thread_time()
            solution = solver.solve(problem)
            seen[budget].append(
                {
                    "cpu_s": time.thread_time() - began,
                    "tree": {e.node: e.ids for e in events if isinstance(e, Boundary)},
                    "answer": solution.answer,
                    "metrics": solution.metrics,
                }
            )
    rows = []
    full = seen[args.budgets[0]]
    for budget, runs in seen.items():
        metrics = [run["metrics"] for run in runs]
        times = np.array([run["cpu_s"] for run in runs])
        ratio, low, high = interval(times / np.array([run["cpu_s"] for run in full]))
        rows.append(
            {
                "budget": budget,
                "n": len(runs),
                "same_tree": sum(a["tree"] == b["tree"] for a, b in zip(runs, full, strict=True)),
                "same_answer": sum(
                    a["answer"] == b["answer"] for a, b in zip(runs, full, strict=True)
                ),
                "budget_tokens": int(np.median([m.budget_tokens for m in metrics])),
                "peak_tokens_max": max(m.peak_tokens for m in metrics),
                "over_budget": sum(m.peak_tokens > m.budget_tokens for m in metrics),
                "recomputed_tokens_mean": float(np.mean([m.tokens_recomputed for m in metrics])),
                "cpu_s_median": round(float(np.median(times)), 2),
                "time_ratio": [round(x, 2) for x in (ratio, low, high)],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
