"""The memory hierarchy inside a path: what splits between tiers change, and what destroying costs.

    python scripts/eval_tiers.py splits --n 500 --csv docs/experiments/tiers_splits.csv
    python scripts/eval_tiers.py destroyed --n 500 --csv docs/experiments/tiers_destroyed.csv

Greedy chains, by default of `chains` by the built-in model, paired with full retention.

`splits`: each problem at several parts of its own path on the device, the rest in host memory and
read there through a buffer (`--staging`). Blocks that differ from those of full retention without a
buffer (in tokens), and from those with a buffer and everything on the device (to the last bit); the
device's peak next to the budget; bytes copied per generated token; thread CPU time relative to full
retention, each problem with all splits in turn.

`destroyed`: policy `hierarchy` in lossy mode with room for everything, so that tokens leave by its
clock alone: a part of all eligible tokens (`cumulative`), of those left at each event (`per_event`,
as in the paper), or all but so many (`size`: pure eviction with a budget of live tokens). Destroyed
is the part of the tokens that were ever eligible, at the end of a chain; missing is the same part
in the mean over its steps: what an average step lacks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of, verifier_of_chains
from rounds import solved_columns

from arbor import Solver
from arbor.events import Boundary, Evicted
from arbor.run.solution import Solution

GREEDY: dict[str, Any] = {
    "controller": "chain",
    "sampling": {"temperature": 0.0},
    "threads": 1,
}
LEAST = 8  # tokens on the device next to the buffer, at least
AT_ONCE = 32
RULES: dict[str, tuple[str, tuple[float, ...]]] = {
    "cumulative": ("ratio", (0.03, 0.1, 0.2, 0.3, 0.5, 0.7)),
    "per_event": ("ratio", (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)),
    "size": ("size", (256, 192, 128, 96, 64, 32)),
}


def settings_of_chains(args: argparse.Namespace) -> dict[str, Any]:
    """What the solvers of all arms have in common."""
    settings = settings_of(args) | GREEDY
    return settings | {"verifier": verifier_of_chains(settings["task"])}


def splits(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each part of a path on the device."""
    parts: Sequence[float] = args.parts
    staging: int = args.staging
    settings = settings_of_chains(args)
    found: dict[float, list[dict[str, float]]] = {part: [] for part in parts}
    with (
        Solver(**settings) as plain,
        Solver(**settings, host="4000tok", staging=f"{staging}tok", fetch="always") as buffered,
    ):
        for problem in problems_of(args, plain.task, args.n):
            solved(plain, problem, None)  # what is made at first use
            full, took = solved(plain, problem, None)
            texts = blocks(plain)
            whole: list[Any] = []
            for part in parts:
                budget = max(LEAST, int(part * full.metrics.peak_tokens)) + staging
                mine, seconds = solved(buffered, problem, None if part == 1 else f"{budget}tok")
                own = blocks(buffered)
                whole = whole or own
                metrics = mine.metrics
                found[part].append(
                    {
                        "other_tokens": [t for t, *_ in own] != [t for t, *_ in texts],
                        "other_bits": own != whole,
                        "over": metrics.peak_tokens > metrics.budget_tokens,
                        "at_budget": metrics.peak_tokens == metrics.budget_tokens,
                        "device": metrics.peak_tokens / full.metrics.peak_tokens,
                        "moved": metrics.streamed_bytes / metrics.tokens_generated,
                        "time": seconds / took,
                    }
                )
    for part, rows in found.items():
        yield {
            "part": part,
            "staging": staging,
            "other_tokens": sum(row["other_tokens"] for row in rows),
            "other_bits": sum(row["other_bits"] for row in rows),
            "peaks_over_budget": sum(row["over"] for row in rows),
            "peaks_at_budget": sum(row["at_budget"] for row in rows),
            "device_peak": round(float(np.median([row["device"] for row in rows])), 3),
            "moved_kib_per_token": round(float(np.mean([row["moved"] for row in rows])) / 1024, 1),
            "cpu_time": round(float(np.median([row["time"] for row in rows])), 2),
            "n": len(rows),
            "n_of": "problems",
        }


def solved(solver: Solver, problem: Any, budget: str | None) -> tuple[Solution, float]:
    """A solution, and the thread's CPU seconds."""
    began = time.thread_time()
    solution = solver.solve(problem, budget=budget)
    return solution, time.thread_time() - began


def blocks(solver: Solver) -> list[tuple[tuple[int, ...], float, float]]:
    """Every block of the last search: its tokens and two figures that follow from its logits."""
    return [(tuple(node.tokens), node.logprob, node.confidence) for node in solver.engine.tree]


def destroyed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each rule and setting, and one for full retention."""
    every, recent, scorer = args.every, args.recent, args.scorer
    exact: list[Solution] = []
    first = 4
    arms = [("none", "ratio", 0.0)]
    arms += [(rule, RULES[rule][0], value) for rule in args.rules for value in RULES[rule][1]]
    for rule, name, value in arms:
        chosen = "cumulative" if rule == "none" else rule
        policy = {
            "name": "hierarchy",
            "evict": chosen,
            name: int(value) if name == "size" else value,
            "first": first,
            "every": every,
            "recent": recent,
            "scorer": scorer,
        }
        with Solver(**settings_of_chains(args), mode="lossy", policy=policy) as solver:
            problems = problems_of(args, solver.task, args.n)
            found = solver.solve_batch(problems, concurrency=AT_ONCE)
        exact, n = exact or found, len(found)
        right = [bool(each.correct) for each in found]
        gone = np.array([each.metrics.evicted_tokens for each in found])
        generated = np.array([each.metrics.tokens_generated for each in found])
        eligible = np.maximum(generated - first - recent, gone)
        yield {
            "rule": rule,
            "setting": value,
            "every": every,
            "recent": recent,
            "scorer": scorer,
            "destroyed": round(100 * float(gone.sum() / max(1, eligible.sum())), 2),
            "missing": round(100 * missing(found, first + recent), 2),
            "live": round(float(np.mean(eligible - gone)), 1),
            "generated": round(float(generated.mean()), 1),
            **solved_columns(right, [bool(each.correct) for each in exact]),
            "n": n,
            "n_of": "problems",
        }


def missing(found: Sequence[Solution], safe: int) -> float:
    """The part of the eligible tokens that is gone at a step, in the mean over all steps; as it is
    at the end of each thought.

    Args:
        found: chains of one search each.
        safe: tokens of the thoughts that are not eligible.
    """
    lacking, steps = 0.0, 0
    for each in found:
        assert each.recording is not None
        gone = generated = 0
        for _, event in each.recording:
            if isinstance(event, Evicted):
                gone += sum(count for _, count in event.nodes)
            elif isinstance(event, Boundary):
                generated += len(event.ids)
                lacking += len(event.ids) * gone / max(1, gone, generated - safe)
                steps += len(event.ids)
    return lacking / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["splits", "destroyed"])
    add_model_and_problems(parser, task="chains")
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--parts", type=float, nargs="+", default=[1, 0.5, 0.25, 0.1])
    parser.add_argument("--staging", type=int, default=32, help="tokens of the buffer")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--every", type=int, default=16, help="steps between two events")
    parser.add_argument("--recent", type=int, default=32, help="last tokens that are safe")
    parser.add_argument("--scorer", default="heavy", help="of importance: arbor list scorers")
    add_options(parser)
    args = parser.parse_args()
    table = ExperimentTable(args)
    for row in splits(args) if args.what == "splits" else destroyed(args):
        table.show(row)


if __name__ == "__main__":
    main()
