"""``arbor demo``: a search within a small budget by the built-in model, as a page to look at."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arbor.cli.options import Command, option, output_options
from arbor.cli.output import Output

if TYPE_CHECKING:
    from arbor.run.solution import Solution

PROBLEM = "4 5 6 10"
PAGE = Path("arbor-demo.html")
ATTEMPTS = 4  # seeds; the first that finds an answer and had to bring KV back is shown
ENOUGH_S = 10.0  # after this long no further attempt begins
FIRST_SEED = 1

LOOK = """\
Open it in a browser and look at
  the tree        a bar is a thought, as long as it has tokens; blue is KV that is there, hollow is KV that is gone
  space           plays the search; the strip below the tree stays under its red line, the budget
  r               jumps to the next rehydration: the search comes back to a path, and what it lacks is computed again
  Regret          the panel of what was given up and needed again
  ?               every key"""


@click.command(cls=Command)
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=PAGE,
    metavar="FILE",
    heading="Page",
    help="Where the page goes.",
)
@option("--open", is_flag=True, heading="Page", help="Open it in the browser.")
@option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    default=FIRST_SEED,
    heading="Sampling",
    help="The first to try.",
)
@output_options
@click.pass_obj
def demo(voice: Output, output: Path, open: bool, seed: int) -> int:
    """Watch a search in about ten seconds: offline, on a CPU, with the built-in model.

    It solves one Game of 24 with the smallest KV budget that works, and writes the search as a page.

    \b
      arbor demo
      arbor demo --open
      arbor demo --seed 7 -o demo.html
    """
    from arbor.cli.solve import EXIT_NO_ANSWER
    from arbor.cli.view import open_page
    from arbor.view import read_page_trace, write_page

    with tempfile.TemporaryDirectory() as folder:
        solution = search(voice, Path(folder), seed)
        assert solution.trace_path is not None, "the demo writes its trace"
        recording = read_page_trace(solution.trace_path)
        page = write_page(output, recording)
    metrics = solution.metrics
    if voice.json:
        voice.document(
            {"schema": "arbor.demo/1", "path": str(page), "solution": solution.to_dict()}
        )
    else:
        kept = 100 * metrics.budget_tokens / max(1, metrics.tree_tokens)
        for name, what in (
            ("problem", f"{solution.problem}: reach 24"),
            ("answer", solution.answer or "none found"),
            (
                "KV budget",
                f"{metrics.budget_tokens:,} tokens, {kept:.0f} % of the {metrics.tree_tokens:,} "
                f"that the search made; at most {metrics.peak_tokens:,} were held",
            ),
            (
                "its price",
                f"{metrics.evictions:,} evictions, {metrics.rehydrations:,} rehydrations, "
                f"{metrics.tokens_recomputed:,} tokens computed again",
            ),
            ("page", f"{page}"),
        ):
            voice.print(f"{name:<11}{what}")
        if not voice.quiet:
            voice.print("")
            voice.print(LOOK)
    if open:
        open_page(voice, page)
    return 0 if solution.answer is not None else EXIT_NO_ANSWER


def search(voice: Output, folder: Path, seed: int) -> Solution:
    """Searches with one seed after the other until there is an answer and KV had to come back."""
    from arbor.cli.solve import use_threads
    from arbor.controllers.tot import ToT
    from arbor.solver import Solver

    began = time.monotonic()
    controller = ToT(beam=4, width=6)
    with Solver(controller=controller) as planner:
        use_threads(None, planner.describe())
        # as little as works: KV has to leave and to come back
        budget = f"{planner.plan(PROBLEM).smallest_tokens}tok"
    best: Solution | None = None
    with Solver(controller=controller, budget=budget) as solver:
        for attempt in range(seed, seed + ATTEMPTS):
            voice.say(f"searching with seed {attempt} and {budget} of KV")
            trace = folder / f"demo-{attempt}.arbor.jsonl"
            found = solver.solve(PROBLEM, seed=attempt, trace=trace)
            if best is None or worth(found) > worth(best):
                best = found
            if worth(best) == (True, True) or time.monotonic() - began > ENOUGH_S:
                break
    assert best is not None, "there is at least one attempt"
    return best


def worth(solution: Solution) -> tuple[bool, bool]:
    """What makes a search worth showing: an answer, and KV that had to come back."""
    return solution.answer is not None, solution.metrics.rehydrations > 0
