"""How attention is spread over the tokens of a chain, next to what two papers report.

    python scripts/eval_attention.py --n 200 --csv docs/experiments/attention_statistics.csv

LazyEviction (arXiv 2506.15969) finds that over 95 % of tokens recur: their attention reaches a
threshold again, more than one step after it last did (MRI > 1). The memory hierarchy (arXiv
2605.09490) finds that the top 20 % of reasoning tokens hold 56.5 % of the cumulative attention, and
the bottom half less than 10 %.

Greedy chains of the test split at full retention; attention is the mean over all heads of one layer
in four (`observed`).
Shares are means over problems of the share in one problem, with bootstrap 95 % intervals;
percentiles are over all tokens that recur.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from experiment_table import ExperimentTable, add_options
from model_and_problems import (
    add_model_and_problems,
    problems_of,
    task_of,
    verifier_of_chains,
)

from arbor import Solver
from arbor.measure.statistics import bootstrap
from arbor.papers.lazyeviction.calibrate import (
    PERCENTILES,
    PathReads,
    heaviest_share,
    path_reads,
)

TASKS = ("chains", "recall", "game24")
THRESHOLDS = (1e-4, 5e-4, 4e-3)  # the paper's two; about an even share of a path of 230 tokens


def reads_of(args: argparse.Namespace, task: str) -> list[list[PathReads]]:
    """How the tokens of each problem's chain were read, at each threshold.

    Args:
        args: the script's options.
        task: whose problems.
    """
    with Solver(
        args.model,
        task=task,
        controller="chain",
        verifier=verifier_of_chains(task),
        policy="lazyeviction",
        sampling={"temperature": 0.0},
        threads=1,
    ) as solver:
        problems = problems_of(args, solver.task, args.n)
        found = path_reads(solver, problems, args.thresholds)
        return [each for each in found if len(each[0].mass) > each[0].prompt]


def mean_share(name: str, shares: Sequence[float]) -> dict[str, float]:
    """A mean share in percent, with its interval."""
    low, high = bootstrap(shares)
    ends = {"": float(np.mean(shares)), "_low": low, "_high": high}
    return {f"{name}{end}_percent": round(100 * value, 2) for end, value in ends.items()}


def row_of(task: str, threshold: float, found: Sequence[PathReads]) -> dict[str, Any]:
    """A row of the table."""
    every = np.concatenate([each.intervals for each in found])
    again = every[every > 0]
    thoughts = [each.mass[each.prompt :] for each in found]
    return {
        "task": task,
        "threshold": threshold,
        "tokens": len(every),
        "path_tokens_mean": round(float(np.mean([len(each.mass) for each in found])), 1),
        **mean_share("read_again", [float((each.intervals > 0).mean()) for each in found]),
        **mean_share("recurring", [float((each.intervals > 1).mean()) for each in found]),
        **{
            f"interval_{percent}th": int(np.percentile(again, percent, method="higher"))
            if len(again)
            else ""
            for percent in PERCENTILES
        },
        **mean_share("top_fifth_of_thoughts", [heaviest_share(each) for each in thoughts]),
        **mean_share(
            "bottom_half_of_thoughts", [1 - heaviest_share(each, 0.5) for each in thoughts]
        ),
        **mean_share("top_fifth_with_prompt", [heaviest_share(each.mass) for each in found]),
        "n": len(found),
        "n_of": "problems",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser, task=None)
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="whose own problems are solved")
    parser.add_argument("--thresholds", nargs="+", type=float, default=THRESHOLDS)
    parser.add_argument("--n", type=int, default=200, help="problems of each task")
    add_options(parser)
    args = parser.parse_args()
    table = ExperimentTable(args)
    tasks = args.tasks if args.dataset is None and args.task is None else [task_of(args)]
    for task in tasks:
        reads = reads_of(args, task)
        for threshold, found in zip(args.thresholds, zip(*reads, strict=True), strict=True):
            table.show(row_of(task, threshold, found))


if __name__ == "__main__":
    main()
