"""The loop of ``arbor eval``: solves the samples that are not finished."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from arbor.cli.build import build_task
from arbor.cli.evaluation.eval_options import AUTO_CONCURRENCY, EvalOptions
from arbor.cli.output import Output
from arbor.cli.progress import Progress
from arbor.cli.signals import StopSignals
from arbor.errors import ArborError, ModelError
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.folder import RunFolder
from arbor.measure.evaluation.results import is_right
from arbor.measure.evaluation.reused_tokens import ReusedTokens
from arbor.tasks.base import Problem, Task
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter

if TYPE_CHECKING:
    from arbor.events import Event
    from arbor.run.request import Options
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
    live, several = output.progress == "live", concurrency(options)
    with Progress(console, live, len(waiting), several) as progress:
        rows = _rows(
            options, solver, folder, waiting, signals, lambda _, event: progress.hear(event)
        )
        with contextlib.closing(rows):
            for row in rows:
                folder.add(row)
                progress.add(is_right(row))


def concurrency(options: EvalOptions) -> int:
    """Samples in progress at a time: as given; ``auto`` is `AUTO_CONCURRENCY`, or 1 in lossy mode,
    where a search depends on what shares its budget."""
    if options.concurrency is not None:
        return options.concurrency
    return AUTO_CONCURRENCY if options.solver.mode == "lossless" else 1


class Seconds:
    """Seconds of each sample.

    Alone, they are those from its beginning to its end. Where several are in progress, a sample's
    wall time is that too, and its CPU time that of the process since the last sample was finished,
    so that the sum is right.

    Args:
        several: whether several are in progress at a time.
    """

    def __init__(self, several: bool) -> None:
        self._several = several
        self._cpu_s = time.process_time()
        self._began: dict[str, float] = {}

    def begin(self, sample: str) -> None:
        """Begin a sample."""
        self._began[sample] = time.perf_counter()
        if not self._several:
            self._cpu_s = time.process_time()

    def end(self, sample: str) -> dict[str, float]:
        """End a sample; the fields of its row."""
        now, cpu_s = time.perf_counter(), time.process_time()
        wall_s, used_s = now - self._began.pop(sample, now), cpu_s - self._cpu_s
        self._cpu_s = cpu_s
        return {"cpu_s": round(used_s, 6), "wall_s": round(wall_s, 6)}


def _rows(
    options: EvalOptions,
    solver: Solver,
    folder: RunFolder,
    waiting: Sequence[Sample],
    signals: StopSignals,
    listen: Callable[[int, Event], None],
) -> Generator[dict[str, Any], None, None]:
    """A line of ``samples.jsonl`` for each sample, as they are finished; none for a search that a
    signal ended.

    Raises:
        ArborError: a sample cannot be solved, with ``--on-error stop``; or a ModelError, which
            every other sample would raise too.
    """
    several = concurrency(options)
    seconds = Seconds(several > 1)
    for sample in waiting:
        if sample.problem is None:
            assert sample.error is not None, "a sample has a problem or an error"
            yield _row(options, folder, sample, sample.error, None) | seconds.end(sample.id)
    readable = [sample for sample in waiting if sample.problem is not None]
    if not readable:
        return
    solver.load()
    writers: dict[str, TraceWriter] = {}
    task = build_task(options.solver)
    reused: defaultdict[int, ReusedTokens] = defaultdict(ReusedTokens)

    def hear(place: int, event: Event) -> None:
        reused[place](event)
        listen(place, event)

    def jobs() -> Iterator[tuple[Problem, Options]]:
        for sample in readable:
            seconds.begin(sample.id)
            given: Options = {"trace_level": options.trace_detail.trace_level}
            given |= cast("Options", options.run.limits)
            if options.trace == "on":
                text = options.trace_detail.trace_text
                given["trace"] = writers[sample.id] = TraceWriter(
                    folder.trace_path(sample.id), text=text
                )
            assert sample.problem is not None
            yield sample.problem, given

    try:
        results = solver.as_completed(jobs(), concurrency=several, listen=hear)
        with contextlib.closing(results), signals.stopping(solver):
            for place, result in results:
                sample = readable[place]
                writer = writers.pop(sample.id, None)
                if writer is not None:
                    writer.close()
                ended = None if isinstance(result, ArborError) else result.finish_reason
                tokens_reused = reused.pop(place, ReusedTokens()).total
                if ended != "interrupted" or signals.received is None:
                    row = _row(options, folder, sample, result, writer)
                    if not isinstance(result, ArborError):
                        row["any_correct"] = _any_correct(task, sample, result)
                        row["tokens_reused"] = tokens_reused
                    yield row | seconds.end(sample.id)
    finally:
        for writer in writers.values():
            writer.close()
            if not writer.events:  # of a sample that was read ahead and never begun
                writer.path.unlink(missing_ok=True)


def _row(
    options: EvalOptions,
    folder: RunFolder,
    sample: Sample,
    result: Solution | ArborError,
    writer: TraceWriter | None,
) -> dict[str, Any]:
    """A line of ``samples.jsonl``, without its seconds.

    Raises:
        ArborError: see `_rows`.
    """
    path = None if writer is None else folder.trace_path(sample.id)
    if isinstance(result, ArborError):
        if path is not None and not _has_events(path):
            path.unlink(missing_ok=True)
        if options.on_error == "stop" or isinstance(result, ModelError):
            result.data["sample"] = sample.id
            raise result
        outcome: dict[str, Any] = {"answer": None, "correct": None, "finish_reason": "error"}
        outcome |= {"score": 0.0, "grade": None, "metrics": {}, "error": result.to_dict()}
    else:
        outcome = {
            name: getattr(result, name)
            for name in ("answer", "correct", "finish_reason", "limit", "score")
        }
        grade = None if result.grade is None else dataclasses.asdict(result.grade)
        outcome |= {"grade": grade, "metrics": result.metrics.to_dict(), "error": None}
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
    }


def _any_correct(task: Task, sample: Sample, solution: Solution) -> bool | None:
    """Whether any finished path has a right answer; None without an answer key."""
    if solution.correct or solution.correct is None or sample.problem is None:
        return solution.correct
    others = solution.votes[1:]  # the first one is the answer
    return any(task.grade(sample.problem, each.answer).correct for each in others)


def _has_events(path: Path) -> bool:
    """Whether a trace has any event."""
    try:
        return bool(read_trace(path).events)
    except ArborError:
        return False
