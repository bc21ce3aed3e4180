"""Search against one chain of thought, paired on the same held-out puzzles, with the engine itself.

    python scripts/eval_search.py --n 500 --json out.json

Arms: a greedy chain, ToT (BFS, beam 5) with the model's own judge, ToT with the exact verifier,
both also with siblings drawn independently of each other. Reported per arm: share solved with a
Clopper-Pearson 95 % interval; against the first arm: the paired difference with a bootstrap 95 %
interval and the exact McNemar p-value; tokens generated and peak KV per problem.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_and_problems import add_model_and_problems, problems_of, settings_of, verifier_of_chains

from arbor import Sampling, Solver
from arbor.measure.statistics import clopper_pearson, paired
from arbor.papers.rksc.cgee import CGEE
from arbor.papers.rksc.exit_thresholds import LayerExit

# Gates around the model's own judge, with thresholds by RKSC's percentiles
# (docs/experiments/rksc.md) and those of its released code; only where they are named.
GATED: dict[str, Any] = {
    "tot cgee skip": CGEE(confidence=0.9962, gap=0.0006),
    "tot cgee release": CGEE(rule="release"),
    "tot cgee exit": CGEE(levels="exit", exit_rule=LayerExit(threshold=0.198, patience=1)),
}
TOGETHER, INDEPENDENT = Sampling(1.0, 1.0), Sampling(1.0, 1.0, arithmetic=False)
ARMS: dict[str, dict[str, Any]] = {
    "greedy chain": {"controller": "chain", "sampling": Sampling(temperature=0)},
    **{
        name: {"controller": "tot", "verifier": verifier, "sampling": sampling}
        for name, verifier, sampling in (
            ("tot self", "self", TOGETHER),
            ("tot exact", "exact", TOGETHER),
            ("tot self, independent", "self", INDEPENDENT),
            ("tot exact, independent", "exact", INDEPENDENT),
            *((name, gate, TOGETHER) for name, gate in GATED.items()),
        )
    },
}


def run_arm(name: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Solve every problem; returns outcomes and costs, one entry per problem."""
    seen: dict[str, list[float]] = {"solved": [], "tokens": [], "peak_tokens": [], "cpu_s": []}
    settings = settings_of(args) | {"seed": args.seed, **ARMS[name]}
    settings.setdefault("verifier", verifier_of_chains(settings["task"]))
    with Solver(**settings) as solver:
        solver.load()
        for problem in problems_of(args, solver.task, args.skip + args.n, args.split)[args.skip :]:
            began = time.thread_time()
            solution = solver.solve(problem)
            seen["cpu_s"].append(time.thread_time() - began)
            seen["solved"].append(float(bool(solution.correct)))
            seen["tokens"].append(solution.metrics.tokens_generated)
            seen["peak_tokens"].append(solution.metrics.peak_tokens)
    return seen


def summarise(arms: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """One row per arm, paired against the first."""
    baseline = [outcome > 0 for outcome in next(iter(arms.values()))["solved"]]
    rows = []
    for name, seen in arms.items():
        solved = [outcome > 0 for outcome in seen["solved"]]
        against = paired(solved, baseline)
        rows.append(
            {
                "arm": name,
                "n": len(solved),
                "solved": sum(solved) / len(solved),
                "interval": [round(end, 4) for end in clopper_pearson(sum(solved), len(solved))],
                "difference": against.difference,
                "difference_interval": list(against.interval),
                "mcnemar_p": against.p,
                **{f"{key}_mean": float(np.mean(seen[key])) for key in seen if key != "solved"},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_and_problems(parser)
    parser.add_argument("--split", default="test")
    parser.add_argument("--skip", type=int, default=0, help="problems of the split left out first")
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[name for name in ARMS if name not in GATED],
        choices=list(ARMS),
    )
    parser.add_argument("--json", type=Path, help="outcomes per problem")
    parser.add_argument("--merge", nargs="+", type=Path, help="only summarise these outcomes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    arms: dict[str, dict[str, list[float]]] = {}
    if args.merge:
        for path in args.merge:
            for name, seen in json.loads(path.read_text()).items():
                for key, values in seen.items():
                    arms.setdefault(name, {}).setdefault(key, []).extend(values)
    else:
        arms = {name: run_arm(name, args) for name in args.arms}
    for row in summarise(arms):
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(arms))


if __name__ == "__main__":
    main()
