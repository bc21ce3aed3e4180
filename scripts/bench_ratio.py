"""What a ratio costs in time: `--budget 0.25` against full retention, alone and together.

    python scripts/bench_ratio.py --n 8
    python scripts/bench_ratio.py --model m.gguf --dataset gsm8k.jsonl --task gsm8k --n 2 --host

Every group of problems is solved at every budget in turn, with the same seed, each group beginning
with another budget. Thread CPU time, one thread; the ratio is per group against full retention, its
geometric mean with a bootstrap 95 % interval. `held` is the largest part of what full retention
held, `expansions` how many searches held one expansion rather than the part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of

from arbor import Solver
from arbor.events import Boundary, Event
from arbor.measure.timing import turned
from arbor.tasks.base import Problem

SEARCHES = ("tot", "tot,strategy=dfs", "beam", "dvts", "mcts")
HOST = "1GiB"

Arm = tuple[float, bool]  # the ratio, and whether host memory takes what leaves


class Tokens:
    """A listener that keeps the tokens of all blocks of a group of searches."""

    def __init__(self) -> None:
        self.found: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Boundary):
            self.found.append((event.node, event.ids))

    def take(self) -> list[tuple[int, tuple[int, ...]]]:
        """Those of the group, in an order that no budget changes."""
        found, self.found = sorted(self.found), []
        return found


def measure(args: argparse.Namespace, search: str, together: int) -> list[dict[str, Any]]:
    """A row for each budget."""
    arms = [
        (1.0, False),
        *((args.ratio, host) for host in ((False, True) if args.host else (False,))),
    ]
    seen: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        tokens = Tokens()
        solvers = {
            host: stack.enter_context(
                Solver(
                    **settings_of(args),
                    controller=search,
                    dtype=args.dtype,
                    max_depth=args.max_depth,
                    seed=args.seed,
                    threads=1,
                    host=HOST if host else None,
                    listeners=(tokens,),
                )
            )
            for host in {host for _, host in arms}
        }
        chosen = problems_of(args, solvers[False].task, args.n * together + 1)
        for solver in solvers.values():
            solver.solve(chosen[0])  # warm
        groups = [chosen[at : at + together] for at in range(1, len(chosen), together)]
        for place, group in enumerate(groups):
            tokens.take()
            for ratio, host in turned(arms, place):
                seen[ratio, host].append(run(solvers[host], group, ratio, tokens))
    full = seen[1.0, False]
    return [row(args, search, together, arm, runs, full) for arm, runs in seen.items()]


def run(solver: Solver, group: Sequence[Problem], ratio: float, tokens: Tokens) -> dict[str, Any]:
    """One group at one budget."""
    began = time.thread_time()
    solutions = solver.solve_batch(group, concurrency=len(group), budget=ratio)
    spent = time.thread_time() - began
    return {
        "cpu_s": spent,
        "tokens": tokens.take(),
        "metrics": [each.metrics for each in solutions],
    }


def row(
    args: argparse.Namespace,
    search: str,
    together: int,
    arm: Arm,
    runs: list[dict[str, Any]],
    full: list[dict[str, Any]],
) -> dict[str, Any]:
    """Figures of one budget against full retention of the same problems."""
    ratios = np.log([run["cpu_s"] / whole["cpu_s"] for run, whole in zip(runs, full, strict=True)])
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, [0.025, 0.975]))
    metrics = [each for run in runs for each in run["metrics"]]
    generated = sum(each.tokens_generated for each in metrics)
    return {
        "model": args.model.rsplit("/", 1)[-1],
        "search": search,
        "together": together,
        "ratio": arm[0],
        "host": arm[1],
        "cpu_s_per_problem": round(sum(run["cpu_s"] for run in runs) / len(metrics), 2),
        "time_ratio": round(float(np.exp(ratios.mean())), 3),
        "time_ratio_low": round(float(low), 3),
        "time_ratio_high": round(float(high), 3),
        "same_tokens": sum(a["tokens"] == b["tokens"] for a, b in zip(runs, full, strict=True)),
        "peak_tokens": max(each.peak_tokens for each in metrics),
        "held": round(max(each.retained_share for each in metrics), 3),
        "expansions": sum(0 < each.peak_tokens <= each.expansion_tokens for each in metrics),
        "steps_ratio": round(
            sum(each.steps for each in metrics)
            / sum(each.steps for run in full for each in run["metrics"]),
            2,
        ),
        "recomputed_per_generated": round(
            sum(each.tokens_recomputed for each in metrics) / generated, 3
        ),
        "fetched_per_generated": round(sum(each.tokens_fetched for each in metrics) / generated, 3),
        "n": len(runs),
        "n_of": "problems" if together == 1 else f"groups of {together}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=8, help="problems, or groups of --together")
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--searches", nargs="+", default=SEARCHES)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--host", action="store_true", help="also with host memory below")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-depth", type=int)
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(args)
    for search in args.searches:
        for together in args.together:
            for each in measure(args, search, together):
                table.show(each)


if __name__ == "__main__":
    main()
