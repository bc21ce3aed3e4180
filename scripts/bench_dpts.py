"""What DPTS gains by going on without rounds: forward passes and seconds, against rounds.

    python scripts/bench_dpts.py --n 50 --json out.json

Every problem is solved both ways at full retention, with the same seed, each problem beginning with
the other one. The searches differ: what a slot takes next depends on what is known by then. So
tokens, blocks and solved problems are shown too, and forward passes per grown leaf. Ratios are per
problem, without rounds to with rounds: the median with a bootstrap 95 % interval, and that of the
sums.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_and_problems import add_model_and_problems, problems_of, settings_of
from rounds import interval

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.measure.timing import turned

WAYS = {"continuous": True, "rounds": False}
COUNTS = ("forwards", "wall_s", "cpu_s", "tokens", "expansions", "solved")


class CountedEngine:
    """Counts an engine's steps: one forward pass each, for all that decodes, is asked or prefilled.

    Args:
        engine: whose steps are counted from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps = 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        """Take the engine's step."""
        self.steps += 1
        self._step()


def measure(args: argparse.Namespace, verifier: str) -> list[dict[str, Any]]:
    """One row for each problem and way."""
    solvers, counted = {}, {}
    for way, continuous in WAYS.items():
        controller = {
            "name": "dpts",
            "width": args.width,
            "parallel": args.parallel,
            "max_visited": args.visited,
            "continuous": continuous,
            **({} if args.stop else {"stop_value": None}),
        }
        solvers[way] = Solver(
            **settings_of(args), verifier=verifier, seed=args.seed, controller=controller
        )
        solvers[way].load()
        counted[way] = CountedEngine(solvers[way].engine)
    chosen = problems_of(args, solvers["rounds"].task, args.n + 1)
    for solver in solvers.values():
        solver.solve(chosen[0])  # warm
    rows = []
    for place, problem in enumerate(chosen[1:]):
        for way in turned(list(WAYS), place):
            before, began = counted[way].steps, time.perf_counter()
            spent = time.thread_time()
            solution = solvers[way].solve(problem)
            rows.append(
                {
                    "verifier": verifier,
                    "problem": problem.text,
                    "way": way,
                    "wall_s": time.perf_counter() - began,
                    "cpu_s": time.thread_time() - spent,
                    "forwards": counted[way].steps - before,
                    "tokens": solution.metrics.tokens_generated,
                    "expansions": solution.metrics.expansions,
                    "solved": int(bool(solution.correct)),
                }
            )
    for solver in solvers.values():
        solver.close()
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of both ways, and ratios."""
    by_way = {way: [row for row in rows if row["way"] == way] for way in WAYS}
    by_way = {way: sorted(mine, key=lambda row: row["problem"]) for way, mine in by_way.items()}
    sums = {
        way: {name: sum(row[name] for row in mine) for name in COUNTS}
        for way, mine in by_way.items()
    }
    ratios: dict[str, Any] = {}
    for name, per in (
        ("forwards", None),
        ("wall_s", None),
        ("cpu_s", None),
        ("forwards", "expansions"),
        ("cpu_s", "tokens"),
    ):
        of = [
            np.array([row[name] / (row[per] if per else 1) for row in by_way[way]]) for way in WAYS
        ]
        ratios[f"{name}_per_{per}" if per else name] = {"median": interval(of[0] / of[1])}
    for name in ("forwards", "wall_s", "cpu_s"):
        ratios[name]["sums"] = sums["continuous"][name] / sums["rounds"][name]
    return {"n": len(by_way["rounds"]), "sums": sums, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=50, help="problems")
    parser.add_argument("--verifiers", nargs="+", default=["exact", "self"])
    parser.add_argument("--width", type=int, default=8, help="thoughts of each leaf")
    parser.add_argument("--parallel", type=int, default=4, help="slots")
    parser.add_argument("--visited", type=int, default=24, help="leaves that grow at most")
    parser.add_argument("--stop", action="store_true", help="a proof ends the search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, summaries = [], {}
    for verifier in args.verifiers:
        mine = measure(args, verifier)
        rows += mine
        summaries[verifier] = summary(mine)
        print(verifier, json.dumps(summaries[verifier]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"summaries": summaries, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
