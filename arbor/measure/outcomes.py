"""Jobs for an engine and what becomes of them: a solution or an error, a trace, seconds."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arbor.events import Boundary, Event, Opened
from arbor.tasks.base import Problem
from arbor.trace.write import TraceWriter

if TYPE_CHECKING:
    from arbor.errors import ArborError
    from arbor.run.request import Options
    from arbor.run.solution import Solution
    from arbor.solver import Solver


@dataclass(frozen=True, slots=True)
class Job:
    """One problem to solve.

    Attributes:
        place: its place among the jobs, 0-based.
        problem: as a user types it, or parsed.
        options: keyword arguments of `Solver.solve`, without ``trace``.
        trace: where its trace is written; None for none.
        trace_text: whether the words of problem, thoughts, answer and settings are in it.
    """

    place: int
    problem: str | Problem
    options: Options
    trace: Path | None = None
    trace_text: Literal["full", "none"] = "full"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        job: the job.
        result: its solution, or the error that ended it.
        seconds: ``wall_s`` from its beginning to its end, and ``cpu_s``: that time too, or, where
            several jobs are in progress, the process's since the last one was finished, so that the
            sum is right.
        tokens_reused: see `ReusedTokens`.
        traced: whether its trace holds anything.
    """

    job: Job
    result: Solution | ArborError
    seconds: dict[str, float]
    tokens_reused: int = 0
    traced: bool = False


def written_there(job: Job) -> TraceWriter:
    """The writer of a job's trace, in the file that the job names."""
    assert job.trace is not None, "the job asks for a trace"
    return TraceWriter(job.trace, text=job.trace_text)


def outcomes(
    solver: Solver,
    jobs: Iterable[Job | None],
    concurrency: int,
    listen: Callable[[int, Event], None] | None = None,
    write: Callable[[Job], TraceWriter] = written_there,
) -> Generator[JobOutcome, None, None]:
    """What becomes of each job, in one engine, as they end.

    Args:
        solver: whose engine it is.
        jobs: read as far ahead as there are places; None where none is ready yet, see
            `Solver.as_completed`.
        concurrency: jobs in progress at a time.
        listen: called with a job's place and every event of its search.
        write: the writer of the trace of a job that asks for one.

    Yields:
        outcomes, each when its trace is whole. Closing the generator gives up what is in progress;
        traces that hold no event are removed.
    """
    began: dict[int, tuple[float, float]] = {}  # wall and CPU seconds
    finished_s = time.process_time()
    writers: dict[int, TraceWriter] = {}
    reused: defaultdict[int, ReusedTokens] = defaultdict(ReusedTokens)
    begun: dict[int, Job] = {}  # by their number in this engine
    number = 0

    def hear(which: int, event: Event) -> None:
        reused[which](event)
        if listen is not None:
            listen(begun[which].place, event)

    def given() -> Iterator[tuple[str | Problem, Options] | None]:
        nonlocal number
        for job in jobs:
            if job is None:
                yield None
                continue
            began[number] = time.perf_counter(), time.process_time()
            options = job.options.copy()
            if job.trace is not None:
                options["trace"] = writers[number] = write(job)
            begun[number] = job
            number += 1
            yield job.problem, options

    try:
        results = solver.results(given(), concurrency=concurrency, listen=hear, bugs="return")
        with contextlib.closing(results):
            for which, result in results:
                job, tokens = begun.pop(which), reused.pop(which, ReusedTokens()).total
                writer = writers.pop(which, None)
                traced = writer is not None and writer.finish()
                began_s, began_cpu_s = began.pop(which)
                now_s = time.process_time()
                seconds = {
                    "cpu_s": round(now_s - (began_cpu_s if concurrency == 1 else finished_s), 6),
                    "wall_s": round(time.perf_counter() - began_s, 6),
                }
                finished_s = now_s
                yield JobOutcome(job, result, seconds, tokens, traced)
    finally:
        for writer in writers.values():
            writer.finish()


class ReusedTokens:
    """A listener that counts the tokens above each new block, whose KV its path already has.

    Without prefix sharing every block would prefill them. Tokens that had been evicted and were
    computed again count too, see `Metrics.tokens_recomputed`.

    Attributes:
        total: tokens, over all blocks but the root.
    """

    def __init__(self) -> None:
        self.total = 0
        self._parent: dict[int, int] = {}
        self._end: dict[int, int] = {}  # tokens of the path up to each closed block's end

    def __call__(self, event: Event) -> None:
        """Count an opened block's path."""
        match event:
            case Opened(node=node, parent=None, tokens=tokens):
                self._end[node] = tokens
            case Opened(node=node, parent=int(above)):
                self._parent[node] = above
                self.total += self._end.get(above, 0)
            case Boundary(node=node, ids=ids):
                self._end[node] = self._end.get(self._parent.get(node, 0), 0) + len(ids)
            case _:
                pass
