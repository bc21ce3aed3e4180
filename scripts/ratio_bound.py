"""How few forwards a ratio allows: those of searches that share one, against full retention.

    python scripts/ratio_bound.py --model m.gguf --dataset gsm8k.jsonl --task gsm8k --max-depth 8

It counts and takes no times, so other work on the machine changes nothing. The ratios are of time,
where a forward takes `--first-ms` and `--further-ms` for each row after the first:

- `modelled_ratio`: all forwards, against those of full retention.
- `nothing_again_ratio`: the same forwards without the rows that had been computed before.
- `least_ratio`: any schedule that computes nothing again. It may always hold the most that a ratio
  ever allowed; a forward of full retention whose rows read more is divided among several.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of

from arbor import Solver
from arbor.engine import engine
from arbor.engine.forward_pass import DecodeBatch, ForwardPasses
from arbor.model.plan import ForwardPlan
from arbor.tasks.base import Problem


@dataclass
class Forwards:
    """What the forwards of searches computed and read.

    Attributes:
        rows, again: of all of them; the second had been computed before.
        decoding: rows of each forward that decodes.
        read: tokens that each reads or writes, once.
        most: tokens that could ever be held.
    """

    rows: int = 0
    again: int = 0
    decoding: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    most: int = 0

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.read)

    def add(self, plan: ForwardPlan, allowed: int) -> None:
        """Count one, in which so many tokens may be held."""
        table = plan.table
        pieces = {id(each): each.slots for context in table.contexts for each in context}
        slots = np.concatenate([*pieces.values(), *table.tails, table.write])
        self.read.append(len(np.unique(slots)))
        self.rows += plan.rows
        self.again += int(table.again.sum())
        self.most = max(self.most, allowed)

    def least(self, most: int) -> float:
        """How many compute the same where each reads so many tokens at most."""
        return float(np.maximum(1, np.array(self.read) / most).sum())


def counted(solver: Solver, problems: Sequence[Problem], ratio: float) -> Forwards:
    """The forwards of problems that are searched together."""
    found = Forwards()

    class Counted(ForwardPasses):
        def _forward(self, plan: ForwardPlan, *rest: Any) -> Any:
            found.add(plan, self._state.account(next(iter(self._state.trees))).slots)
            return super()._forward(plan, *rest)

        def run(self, parts: Any, batch: DecodeBatch | None = None) -> Any:
            if batch is not None:
                found.decoding.append(len(batch))
            return super().run(parts, batch)

        def step(self, batch: DecodeBatch, *begun: Any) -> Any:
            found.decoding.append(len(batch))
            return super().step(batch, *begun)

    vars(engine)["ForwardPasses"] = Counted
    try:
        solver.solve_batch(problems, concurrency=len(problems), budget=ratio)
    finally:
        vars(engine)["ForwardPasses"] = ForwardPasses
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--search", default="tot")
    parser.add_argument("--max-depth", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=22.0)
    parser.add_argument("--further-ms", type=float, default=0.55)
    add_options(parser)
    args = parser.parse_args()
    search = {"controller": args.search, "max_depth": args.max_depth, "seed": args.seed}
    with Solver(**settings_of(args), **search) as solver:
        problems = problems_of(args, solver.task, args.together + 1)[1:]
        full, part = (counted(solver, problems, ratio) for ratio in (1.0, args.ratio))

    def ratio_of(rows: int, forwards: float) -> float:
        """Time over that of full retention."""
        times = [
            args.first_ms * count + args.further_ms * (each - count)
            for each, count in ((rows, forwards), (full.rows, full.count))
        ]
        return round(float(times[0] / times[1]), 3)

    table = ExperimentTable(args)
    for ratio, run in ((1.0, full), (args.ratio, part)):
        least = full.least(run.most)
        row = {
            "model": args.model.rsplit("/", 1)[-1],
            "search": args.search,
            "ratio": ratio,
            "forwards": run.count,
            "decode_forwards": len(run.decoding),
            "decode_rows_mean": round(float(np.mean(run.decoding)), 2),
            "rows": run.rows,
            "recomputed_rows": run.again,
            "most_allowed_tokens": run.most,
            "modelled_ratio": ratio_of(run.rows, run.count),
            "nothing_again_ratio": ratio_of(run.rows - run.again, run.count),
            "least_forwards": round(least),
            "least_ratio": ratio_of(full.rows, least),
            "n": len(problems),
            "n_of": "problems together",
        }
        table.show(row)


if __name__ == "__main__":
    main()
