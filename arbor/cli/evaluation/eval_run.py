"""The loop of ``arbor eval``: solves the samples that are not finished."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from arbor.cli.evaluation.eval_options import EvalOptions
from arbor.cli.output import Output
from arbor.cli.progress import Progress
from arbor.cli.signals import StopSignals
from arbor.errors import ArborError, ModelError, RankLost, SearchBug
from arbor.measure.evaluation.dataset import Sample, sample_seed
from arbor.measure.evaluation.folder import RunFolder
from arbor.measure.evaluation.results import is_right
from arbor.measure.outcomes import Job, JobOutcome, outcomes
from arbor.tasks.base import Task

if TYPE_CHECKING:
    from arbor.run.request import Options
    from arbor.run.solution import Solution
    from arbor.solver import Solver

NO_SECONDS = {"cpu_s": 0.0, "wall_s": 0.0}  # of a sample that was never begun


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
    where = "" if options.workers is None else f" · workers {options.workers}"
    output.say(
        f"loading {options.solver.settings.model} · seed {options.solver.settings.seed}{where}"
    )
    console = None if output.progress == "none" else output.console()
    live, several = output.progress == "live", concurrency(options)
    with Progress(console, live, len(waiting), several) as progress:
        rows = _rows(options, solver, folder, waiting, signals, progress)
        with contextlib.closing(rows):
            for row in rows:
                folder.add(row)
                progress.add(is_right(row))


def concurrency(options: EvalOptions) -> int:
    """Samples in progress at a time, in each engine: as given; ``auto`` is `Settings.at_once`."""
    return options.concurrency or options.solver.settings.at_once


def _rows(
    options: EvalOptions,
    solver: Solver,
    folder: RunFolder,
    waiting: Sequence[Sample],
    signals: StopSignals,
    progress: Progress,
) -> Generator[dict[str, Any], None, None]:
    """A line of ``samples.jsonl`` for each sample, as they are finished; none for a search that a
    signal ended.

    Raises:
        ArborError: a sample cannot be solved, with ``--on-error stop``; or a ModelError or
            RankLost, which every other sample would raise too. An internal error ends its own
            sample only.
    """
    for sample in waiting:
        if sample.problem is None:
            assert sample.error is not None, "a sample has a problem or an error"
            yield _row(options, folder, sample, sample.error) | NO_SECONDS
    readable = [sample for sample in waiting if sample.problem is not None]
    if not readable:
        return
    task = options.solver.settings.task
    found = _outcomes(options, solver, _jobs(options, folder, readable), signals, progress)
    with contextlib.closing(found):
        for outcome in found:
            sample, result = readable[outcome.job.place], outcome.result
            ended = None if isinstance(result, ArborError) else result.finish_reason
            if ended == "interrupted" and signals.received is not None:
                continue
            trace = outcome.job.trace if outcome.traced else None
            row = _row(options, folder, sample, result, trace)
            if not isinstance(result, ArborError):
                row["any_correct"] = _any_correct(task, sample, result)
                row["tokens_reused"] = outcome.tokens_reused
            yield row | outcome.seconds


def _jobs(options: EvalOptions, folder: RunFolder, samples: Sequence[Sample]) -> Iterator[Job]:
    """The jobs of samples with problems."""
    given: Options = {"trace_level": options.trace_detail.trace_level}
    given |= cast("Options", options.run.limits)
    text = options.trace_detail.trace_text
    for place, sample in enumerate(samples):
        assert sample.problem is not None, "a job is of a problem"
        trace = folder.trace_path(sample.id) if options.trace == "on" else None
        own: Options = {**given, "seed": sample_seed(options.solver.settings.seed, sample.id)}
        yield Job(place, sample.problem, own, trace, text)


def _outcomes(
    options: EvalOptions,
    solver: Solver,
    jobs: Iterator[Job],
    signals: StopSignals,
    progress: Progress,
) -> Generator[JobOutcome, None, None]:
    """What becomes of the jobs, in this process or in those of ``--workers``."""
    several = concurrency(options)
    if options.workers is None:
        solver.load()
        with signals.stopping(solver):
            yield from outcomes(solver, jobs, several, lambda _, event: progress.hear(event))
        return
    from arbor.measure.workers import Workers

    device = options.solver.settings.device
    workers = Workers(solver, options.workers, concurrency=several, device=device)
    with workers, signals.stopping(workers):
        yield from workers.outcomes(jobs, progress.show)


def _row(
    options: EvalOptions,
    folder: RunFolder,
    sample: Sample,
    result: Solution | ArborError,
    trace: Path | None = None,
) -> dict[str, Any]:
    """A line of ``samples.jsonl``, without its seconds.

    Raises:
        ArborError: see `_rows`.
    """
    if isinstance(result, ArborError):
        stops = options.on_error == "stop" and not isinstance(result, SearchBug)
        if stops or isinstance(result, ModelError | RankLost):
            result.data["sample"] = sample.id
            raise result
        outcome: dict[str, Any] = {"answer": None, "correct": None, "finish_reason": "error"}
        outcome |= {"guessed": False, "paths": 0, "cut_paths": 0}
        outcome |= {"score": None, "grade": None, "metrics": {}, "error": result.to_dict()}
    else:
        outcome = {
            name: getattr(result, name)
            for name in ("answer", "correct", "guessed", "finish_reason", "limit", "score")
        }
        outcome["paths"] = len(result.candidates)
        outcome["cut_paths"] = sum(each.cut for each in result.candidates)
        grade = None if result.grade is None else dataclasses.asdict(result.grade)
        outcome |= {"grade": grade, "metrics": result.metrics.to_dict(), "error": None}
    return {
        "id": sample.id,
        "problem": sample.text,
        "expected": sample.expected,
        "seed": sample_seed(options.solver.settings.seed, sample.id),
        **outcome,
        "trace": None if trace is None else trace.relative_to(folder.path).as_posix(),
    }


def _any_correct(task: Task, sample: Sample, solution: Solution) -> bool | None:
    """Whether any finished path has a right answer; None without an answer key."""
    if solution.correct or solution.correct is None or sample.problem is None:
        return solution.correct
    others = solution.votes[1:]  # the first one is the answer
    return any(task.grade(sample.problem, each.answer).correct for each in others)
