"""Measured sizes of the built-in model's searches: the file that ratios as budgets are parts of.

    python scripts/measure_sizes.py --n 40

Every kind of search in `KINDS` (tasks, controllers and verifiers with their default settings, and
depth-first `tot`) solves the first problems of the validation split under full retention, with the
default sampling and seed 0. The file holds number, mean, deviation and range of what full retention
held at its peak, the prompt excluded; only the kinds of `--tasks` are measured again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from arbor import Solver, __version__
from arbor.run.full_retention import FullRetention
from arbor.run.search_sizes import FILE, SearchKind, SearchSize, read_sizes, sizes_text
from arbor.support.atomic_write import write_atomically

MODEL = "builtin:sapling"
OUT = Path(__file__).parents[1] / "arbor" / "sapling" / FILE
TASKS = ("game24", "countdown", "chains", "recall")
# task, controller, verifier
KINDS = (
    *itertools.product(TASKS[:1], ("tot", "tot,strategy=dfs", "beam", "chain"), ("self", "exact")),
    *itertools.product(TASKS[1:], ("tot", "beam", "chain"), ("self",)),
)
SPLIT = "validation"


def measure(n: int, **settings: Any) -> tuple[SearchKind, list[int]]:
    """The kind of a search, and its size on each of the first problems."""
    full = FullRetention()
    with Solver(MODEL, listeners=(full,), **settings) as solver:
        kind = SearchKind.of(
            solver.task,
            solver.controller,
            solver.verifier,
            solver.boundary,
            solver.max_expansions,
        )
        sizes = []
        for problem in itertools.islice(solver.task.problems(SPLIT), n):
            solution = solver.solve(problem)
            assert solution.finish_reason in ("solved", "exhausted"), solution.finish_reason
            sizes.append(full.peak + solver.plan(problem).question_tokens)
    return kind, sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--n", type=int, default=40, help="problems per kind of search")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--controllers", nargs="+", help="only these, as in KINDS")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = read_sizes(args.out)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARBOR_CACHE"] = folder  # what is measured here is learned nowhere else
        for task, controller, verifier in KINDS:
            if task not in args.tasks or controller not in (args.controllers or [controller]):
                continue
            began = time.monotonic()
            kind, sizes = measure(args.n, task=task, controller=controller, verifier=verifier)
            found[kind] = size = SearchSize.of(sizes)
            print(
                f"{task} {controller} {verifier}: {size.n} searches, {size.mean:.1f} tokens, "
                f"deviation {size.deviation:.1f}, {size.least} to {size.most}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            text = sizes_text(
                found,
                model=MODEL,
                arbor=__version__,
                split=SPLIT,
                created=datetime.now(UTC).date().isoformat(),
            )
            write_atomically(args.out, text)


if __name__ == "__main__":
    main()
