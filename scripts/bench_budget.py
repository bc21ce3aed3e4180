"""What a smaller budget costs in time, and where the time goes.

    python scripts/bench_budget.py --n 30 --json out.json

Budgets are parts of the full-retention peak of the same problem and search. Every problem is solved
at every budget in turn, with the same seed, each problem beginning with another budget. Thread CPU
time, one thread; the ratio is per problem against full retention, its median with a bootstrap 95 %
interval.

The time above full retention is split by nvtx_range of the engine, each without the phases inside
it: `rehydrate` (forward passes that recompute), `policy` (deciding and evicting), `lost_width`
(decoding and asking in more and narrower forward passes), and `rest` (prefill and everything
outside the engine). The parts are of sums over problems.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_decode import interval
from eval_policies import SEARCHES, Blocks, problems_of

import arbor.engine.forward_pass as forward_pass
from arbor import Solver
from arbor.measure.timing import turned

PHASES = ("prefill", "decode", "verify", "rehydrate", "policy")


class Phases:
    """CPU seconds of the thread in each nvtx_range of the engine, without those of phases inside
    it."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._inside = [0.0]

    @contextmanager
    def nvtx_range(self, name: str) -> Iterator[None]:
        """Stands in for `arbor.engine.nvtx.nvtx_range`."""
        began = time.thread_time()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = time.thread_time() - began
            self._spent[name] += whole - self._inside.pop()
            self._inside[-1] += whole

    def take(self) -> dict[str, float]:
        """What was spent; the next run begins with nothing."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        return {name: spent.get(name, 0.0) for name in PHASES}


def measure(args: argparse.Namespace, name: str, phases: Phases) -> list[dict[str, Any]]:
    """One row for each budget."""
    blocks = Blocks()
    seen: dict[float, list[dict[str, Any]]] = {ratio: [] for ratio in (1.0, *args.budgets)}
    with Solver(
        args.model,
        task=args.task,
        policy=args.policy,
        seed=args.seed,
        listeners=(blocks.hear,),
        **SEARCHES[name],
    ) as solver:
        chosen = problems_of(solver.task, "test", args.n + 1)
        solver.solve(chosen[0])  # warm
        for place, problem in enumerate(chosen[1:]):
            blocks.take()
            peak = solver.solve(problem).metrics.peak_tokens
            whole = blocks.take()
            for ratio in turned(list(seen), place):
                least = solver.plan(problem).smallest_tokens
                slots = max(least, math.floor(ratio * peak))
                budget = f"{slots}tok" if ratio < 1 else "full"
                blocks.take()
                phases.take()
                began = time.thread_time()
                metrics = solver.solve(problem, budget=budget).metrics
                seen[ratio].append(
                    {
                        "cpu_s": time.thread_time() - began,
                        **phases.take(),
                        "same": blocks.take() == whole,
                        "metrics": metrics,
                    }
                )
    return [row(name, ratio, runs, seen[1.0]) for ratio, runs in seen.items()]


def row(
    name: str, ratio: float, runs: list[dict[str, Any]], full: list[dict[str, Any]]
) -> dict[str, Any]:
    """Figures of one budget against full retention of the same problems."""

    def total(key: str, of: list[dict[str, Any]] = runs) -> float:
        return float(sum(run[key] for run in of))

    def more(*keys: str) -> float:
        return sum(total(key) - total(key, full) for key in keys) / total("cpu_s", full)

    metrics = [run["metrics"] for run in runs]
    times = np.array([run["cpu_s"] for run in runs])
    middle, low, high = interval(times / np.array([run["cpu_s"] for run in full]))
    steps = sum(m.steps for m in metrics) / max(1, sum(run["metrics"].steps for run in full))
    extra = {
        "rehydrate": more("rehydrate"),
        "policy": more("policy"),
        "lost_width": more("decode", "verify"),
    }
    extra["rest"] = more("cpu_s") - sum(extra.values())
    return {
        "search": name,
        "budget": ratio,
        "n": len(runs),
        "budget_tokens": int(np.median([m.budget_tokens for m in metrics])),
        "over_budget": sum(m.peak_tokens > m.budget_tokens for m in metrics),
        "same_tree": sum(run["same"] for run in runs),
        "cpu_s_median": round(float(np.median(times)), 3),
        "time_ratio": [round(x, 3) for x in (middle, low, high)],
        "time_ratio_of_sums": round(1 + more("cpu_s"), 3),
        "above_full": {key: round(value, 3) for key, value in extra.items()},
        "policy_share": round(total("policy") / total("cpu_s"), 4),
        "policy_us_per_event": round(
            1e6 * total("policy") / max(1, sum(m.pressure_events for m in metrics))
        ),
        "steps_ratio": round(steps, 2),
        "recomputed_per_generated": round(
            sum(m.tokens_recomputed for m in metrics) / sum(m.tokens_generated for m in metrics), 4
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="builtin:sapling")
    parser.add_argument("--task", default="game24")
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--policy", default="reentry")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=tuple(SEARCHES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    phases = Phases()
    rows = []
    with mock.patch.object(forward_pass, "nvtx_range", phases.nvtx_range):
        for name in args.searches:
            for each in measure(args, name, phases):
                rows.append(each)
                print(json.dumps(each), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
