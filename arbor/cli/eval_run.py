"""The loop of ``arbor eval``: solves the samples that are not finished."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbor.cli.eval_options import EvalOptions
from arbor.cli.output import Output
from arbor.cli.progress import Progress
from arbor.cli.signals import StopSignals
from arbor.errors import ArborError, ModelError
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.folder import RunFolder
from arbor.measure.evaluation.results import is_right
from arbor.tasks.base import Problem
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter

if TYPE_CHECKING:
    from arbor.run.solution import Solution
    from arbor.solver import Solver


def solve_all(
    output: Output,
    options: EvalOptions,
    solver: Solver,
    folder: RunFolder,
    samples: list[Sample],
    signals: StopSignals,
) -> None:
    """Solves every sample that is not finished; returns early on a signal.

    Raises:
        ArborError: a sample cannot be solved, with ``--on-error stop``.
    """
    waiting = [sample for sample in samples if not folder.finished(sample)]
    if folder.unreadable:
        output.warn(
            f"warning: {folder.unreadable} unreadable line(s) of samples.jsonl are left out"
        )
    if len(waiting) < len(samples):
        output.say(f"{len(samples) - len(waiting):,} of {len(samples):,} samples are finished")
    if not waiting:
        return
    output.say(f"loading {options.solver.model} · seed {options.solver.seed}")
    console = None if output.progress == "none" else output.console()
    with Progress(console, output.progress == "live", len(waiting)) as progress:
        for sample in waiting:
            row = solve_one(options, solver, folder, sample, signals, progress)
            if row is None:
                return
            folder.add(row)
            progress.add(is_right(row))
            if signals.received is not None:
                return


def solve_one(
    options: EvalOptions,
    solver: Solver,
    folder: RunFolder,
    sample: Sample,
    signals: StopSignals,
    progress: Progress,
) -> dict[str, Any] | None:
    """A line of ``samples.jsonl``; None if a signal ended the search.

    Raises:
        ArborError: the sample cannot be solved, with ``--on-error stop``; or a ModelError, which
            every other sample would raise too.
    """
    path = folder.trace_path(sample.id) if options.trace == "on" else None
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        if sample.problem is None:
            assert sample.error is not None, "a sample has a problem or an error"
            raise sample.error
        solver.plan(sample.problem)  # refuses an infeasible budget before the model is loaded
        solver.load()
        began, began_cpu = time.perf_counter(), time.process_time()
        solution = _search(options, solver, sample.problem, path, signals, progress)
    except ArborError as error:
        if options.on_error == "stop" or isinstance(error, ModelError):
            error.data["sample"] = sample.id
            raise
        outcome: dict[str, Any] = {"answer": None, "correct": None, "finish_reason": "error"}
        outcome |= {"score": 0.0, "metrics": {}, "error": error.to_dict()}
        if path is not None and not _has_events(path):
            path.unlink(missing_ok=True)
    else:
        if signals.received is not None and solution.finish_reason == "interrupted":
            return None
        outcome = {
            name: getattr(solution, name)
            for name in ("answer", "correct", "finish_reason", "score")
        }
        outcome |= {"metrics": solution.metrics.to_dict(), "error": None}
    traced = path is not None and path.is_file()
    if traced and path and not path.stat().st_size:  # the disk was full before its first event
        path.unlink()
        traced = False
    return {
        "id": sample.id,
        "problem": sample.text,
        "expected": sample.expected,
        **outcome,
        "trace": path.relative_to(folder.path).as_posix() if traced and path else None,
        "cpu_s": round(time.process_time() - began_cpu, 6),
        "wall_s": round(time.perf_counter() - began, 6),
    }


def _has_events(path: Path) -> bool:
    """Whether a trace has any event."""
    try:
        return bool(read_trace(path).events)
    except ArborError:
        return False


def _search(
    options: EvalOptions,
    solver: Solver,
    problem: Problem,
    path: Path | None,
    signals: StopSignals,
    progress: Progress,
) -> Solution:
    writer = None if path is None else TraceWriter(path, text=options.trace_detail.trace_text)
    with writer or contextlib.nullcontext():
        stream = solver.stream(
            problem,
            timeout=options.run.timeout,
            max_tokens=options.run.max_tokens,
            trace=writer,
            trace_level=options.trace_detail.trace_level,
        )
        with signals.stopping(stream):
            for _ in stream:
                progress.tick()
    return stream.solution
