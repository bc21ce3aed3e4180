"""Stage 7: searches of the built-in model, compared with its answers on the CPU in float32.

The same problems at full retention and at a quarter of its peak: in float32 every answer is that
of the CPU; in bfloat16 rounding may turn a near tie, so that as many must be solved, but for one.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from gpu_stages.engines import backend_name
from gpu_stages.rows import Job

from arbor import Solver
from arbor.errors import BudgetInfeasible
from arbor.run.solution import Solution

PROBLEMS = 5
SMALL_SEARCH: dict[str, Any] = {"controller": {"name": "beam", "beam_size": 5, "width": 4}}


def run(job: Job) -> None:
    """Solve the problems on the CPU, then on the device in each dtype and budget."""
    settings = SMALL_SEARCH if job.small else {}
    count = 1 if job.small else PROBLEMS
    right: list[Solution] = []
    with job.checking("cpu float32"), Solver(device="cpu", dtype="float32", **settings) as solver:
        problems = list(itertools.islice(solver.task.problems("test"), count))
        right = [solver.solve(problem) for problem in problems]
        job.row("cpu float32", n=count, solved=solved(right), answers=answers(right))
    device = "cpu" if job.small else "cuda"
    todo = [(dtype, part) for dtype in ("bfloat16", "float32") for part in (1.0, 0.25)]
    while right and todo and job.left_s > 0:
        dtype, part = todo.pop(0)
        name = f"{job.device} {dtype}, {part:g} of the peak"
        with (
            job.checking(name, dtype=dtype),
            Solver(device=device, dtype=dtype, **settings) as solver,
        ):
            found = [bounded(solver, one.problem, one, part) for one in right]
            over = sum(one.metrics.peak_tokens > one.metrics.budget_tokens for one in found)
            same = sum(a == b for a, b in zip(answers(found), answers(right), strict=True))
            recomputed = sum(one.metrics.tokens_recomputed for one in found)
            tried = part == 1.0 or recomputed > 0  # a budget that held everything shows nothing
            enough = same == count if dtype == "float32" else solved(found) >= solved(right) - 1
            job.row(
                name,
                ok=enough and tried and not over,
                backend=backend_name(solver.engine),
                n=count,
                same_answers=same,
                solved=solved(found),
                over_budget=over,
                recomputed=recomputed,
            )
    job.end([f"{dtype}, {part:g} of the peak" for dtype, part in todo])


def bounded(solver: Solver, problem: Any, whole: Solution, part: float) -> Solution:
    """A search within a part of its peak, or within the smallest budget that works."""
    if part == 1.0:
        return solver.solve(problem)
    slots = math.floor(part * whole.metrics.peak_tokens)
    try:
        return solver.solve(problem, budget=f"{slots}tok")
    except BudgetInfeasible:
        return solver.solve(problem, budget=f"{solver.plan(problem).enough_tokens}tok")


def answers(solutions: list[Solution]) -> list[str]:
    return [str(solution.answer) for solution in solutions]


def solved(solutions: list[Solution]) -> int:
    return sum(bool(solution.correct) for solution in solutions)
