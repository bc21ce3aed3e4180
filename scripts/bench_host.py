"""Time of several problems at once in a part of their KV, with and without a host tier.

    python scripts/bench_host.py --problems 24 --rounds 5 --csv ../docs/experiments/host_tier.csv

Problems solved eight at a time in one engine: under full retention, in a part of what such searches
hold, and in that part with room for everything in host memory. The three take turns within a round;
ratios are to full retention in the same round, at the same number at a time. CPU time of the
thread, one thread; the trees of all arms are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from bench_concurrency import shape
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of

from arbor import Solver
from arbor.measure.statistics import bootstrap

# beam search has no path as short as a quarter
PARTS = {"tot": "0.25", "tot,strategy=dfs": "0.25", "beam": "0.4"}


def arms(args: argparse.Namespace, controller: str) -> dict[str, Solver]:
    """Solvers by arm."""
    given = {**settings_of(args), "controller": controller, "threads": 1}
    part = PARTS[controller]
    return {
        "full": Solver(**given, budget="full"),
        "part": Solver(**given, budget=part),
        "part and host": Solver(**given, budget=part, host="1GiB", fetch=args.fetch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--controllers", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[8])
    parser.add_argument("--fetch", default="auto", help="as in `arbor solve`")
    add_model_and_problems(parser)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    for controller in given.controllers:
        solvers = arms(given, controller)
        every = problems_of(given, solvers["full"].task, given.problems)
        for at_a_time in given.at_a_time:
            seconds: dict[str, list[float]] = defaultdict(list)
            found: dict[str, dict[str, Any]] = {}
            trees: dict[str, list[Any]] = {}
            for turn in range(given.rounds + 1):  # the first one warms up
                order = list(solvers)[:: 1 if turn % 2 == 0 else -1]
                for arm in order:
                    began = time.thread_time()
                    solutions = solvers[arm].solve_batch(every, concurrency=at_a_time)
                    took = time.thread_time() - began
                    trees[arm] = [shape(each) for each in solutions]
                    metrics = [each.metrics for each in solutions]
                    found[arm] = {
                        "generated": sum(each.tokens_generated for each in metrics),
                        "recomputed": sum(each.tokens_recomputed for each in metrics),
                        "fetched": sum(each.tokens_fetched for each in metrics),
                    }
                    if turn:
                        seconds[arm].append(took)
            for arm in solvers:
                ratios = [b / a for a, b in zip(seconds["full"], seconds[arm], strict=True)]
                low, high = bootstrap(ratios, "median")
                same = sum(a == b for a, b in zip(trees["full"], trees[arm], strict=True))
                row = {
                    "search": controller,
                    "budget": "full" if arm == "full" else PARTS[controller],
                    "host": arm == "part and host",
                    "at_a_time": at_a_time,
                    "problems": len(every),
                    "same_tree": same,
                    "cpu_s_median": round(statistics.median(seconds[arm]), 3),
                    "ratio_to_full": round(statistics.median(ratios), 3),
                    "ratio_low": round(low, 3),
                    "ratio_high": round(high, 3),
                    **found[arm],
                    "n": given.rounds,
                    "n_of": "rounds",
                }
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                table.add(row)
        for solver in solvers.values():
            solver.close()


if __name__ == "__main__":
    main()
