"""``arbor demo``: a search of the built-in model within a small budget, written as a page."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor.cli.command import Command
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.cli.record_options import options_of, read_options
from arbor.support.setting import setting

if TYPE_CHECKING:
    from arbor.run.solution import Solution
    from arbor.run.stream import SearchStream

PROBLEM = "4 5 6 10"
PAGE = Path("arbor-demo.html")
ATTEMPTS = 4  # seeds; the first search with an answer and a rehydration is shown
ENOUGH_S = 10.0  # no attempt starts later than this
FIRST_SEED = 1

LOOK = """\
Open the page in a browser:
  tree            each bar is a thought, its length the tokens; blue: KV in memory, hollow: evicted
  space           play the search; the strip below the tree stays under the red line, the budget
  r               next rehydration: the search returns to a path and recomputes what is missing
  Regret          panel of evicted tokens that were needed again
  ?               all keys"""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of ``arbor demo``, named as on the command line."""

    HEADING = "Page"

    output: Path = setting(PAGE, "The page.", shown="short", also=("-o",))
    open: bool = setting(False, "Open the page in the browser.", shown="short")
    seed: int = setting(
        FIRST_SEED, "First seed to try.", heading="Sampling", shown="short", least=0
    )


@click.command(cls=Command)
@options_of(DemoOptions)
@output_options
@click.pass_obj
def demo(output: Output, /, **values: Any) -> int:
    """Solve a small example and write it as a page: offline, on a CPU, in about ten seconds.

    The built-in model solves one Game of 24 within the smallest KV budget that works. A terminal
    shows the tree as it grows, and the KV that leaves and comes back; --display plain leaves that
    out.

    \b
      arbor demo
      arbor demo --open
      arbor demo --seed 7 -o demo.html
    """
    from arbor.cli.solve import EXIT_NO_ANSWER
    from arbor.view import read_page_trace, refuse_other_file, write_page

    options = read_options(DemoOptions, values)
    refuse_other_file(options.output)
    with tempfile.TemporaryDirectory() as folder:
        solution = search(output, Path(folder), options.seed)
        assert solution.trace_path is not None, "the demo writes its trace"
        recording = read_page_trace(solution.trace_path)
        page = write_page(options.output, recording)
    metrics = solution.metrics
    if output.json:
        output.document(
            {"schema": "arbor.demo/1", "path": str(page), "solution": solution.to_dict()}
        )
    else:
        kept = 100 * metrics.budget_tokens / max(1, metrics.tree_tokens)
        for name, what in (
            ("problem", f"{solution.problem}: reach 24"),
            ("answer", solution.answer or "none found"),
            (
                "KV budget",
                f"{metrics.budget_tokens:,} tokens, {kept:.0f} % of the tree's {metrics.tree_tokens:,}; "
                f"peak {metrics.peak_tokens:,}",
            ),
            (
                "cost",
                f"{metrics.evictions:,} evictions, {metrics.rehydrations:,} rehydrations, "
                f"{metrics.tokens_recomputed:,} tokens recomputed",
            ),
            ("page", f"{page}"),
        ):
            output.print(f"{name:<11}{what}")
        if not output.quiet and sys.stdout.isatty():
            output.print("")
            output.print(LOOK)
    if options.open:
        output.open(page)
    return 0 if solution.answer is not None else EXIT_NO_ANSWER


def search(output: Output, folder: Path, seed: int) -> Solution:
    """The first search with an answer and a rehydration, over a few seeds; else the best."""
    from arbor.cli.build import import_engine
    from arbor.controllers.tot import ToT
    from arbor.solver import Solver

    import_engine()
    began = time.monotonic()
    controller = ToT(beam=4, width=6)
    with Solver(controller=controller) as planner:
        # the longest path just fits: KV is evicted and recomputed
        budget = f"{planner.plan(PROBLEM).enough_tokens}tok"
    best: Solution | None = None
    with Solver(controller=controller, budget=budget) as solver:
        for attempt in range(seed, seed + ATTEMPTS):
            output.say(f"searching with seed {attempt} and {budget} of KV")
            trace = folder / f"demo-{attempt}.arbor.jsonl"
            if output.progress == "live" and not output.json:
                found = show(output, solver.stream(PROBLEM, seed=attempt, trace=trace))
            else:
                found = solver.solve(PROBLEM, seed=attempt, trace=trace)
            if best is None or quality(found) > quality(best):
                best = found
            if quality(best) == (True, True) or time.monotonic() - began > ENOUGH_S:
                break
    assert best is not None, "there is at least one attempt"
    return best


def show(output: Output, stream: SearchStream) -> Solution:
    """Shows a search slowly enough to follow; leaving it early stops the search."""
    from arbor.view.live import ShowView

    try:
        with ShowView(output.console()) as view:
            for event in stream:
                view(event)
    except BaseException:
        stream.stop()
        raise
    return stream.solution


def quality(solution: Solution) -> tuple[bool, bool]:
    """Whether a search has an answer, and whether it rehydrated."""
    return solution.answer is not None, solution.metrics.rehydrations > 0
