"""Workers: many engines, each in a process of its own, that solve problems together."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack, cast

from arbor.errors import ArborError, UsageError, WorkerError
from arbor.measure.cluster import (
    Broken,
    Cluster,
    Delivered,
    Died,
    Finished,
    News,
    Ready,
    Refused,
    WorkerPlace,
    check_workers,
)
from arbor.measure.outcomes import Job, JobOutcome
from arbor.model.model_info import SMALL_MODEL
from arbor.model.names import check_device
from arbor.registry import part
from arbor.run.batch import OnError, each_solution, solutions_of
from arbor.run.config import read_config
from arbor.run.limits import check_count
from arbor.run.request import Options
from arbor.run.solution import Solution
from arbor.solver import Solver
from arbor.support.atomic_write import write_atomically
from arbor.tasks.base import Problem
from arbor.trace.write import TraceWriter

TRIES = 3  # workers that may die with one problem
POLL_S = 0.25  # in which a signal is noticed
PATIENCE_S = 20.0  # without any worker, before the reason is named
PARTS = ("task", "controller", "verifier", "aggregate", "policy")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Ticket:
    """A job that is not finished, and the workers that died while they had it."""

    job: Job
    deaths: int = 0


class HandOut:
    """Which worker gets which job: each job once, and again where its worker died.

    Jobs go to the workers that have a place free, in their order. At first they are dealt in equal
    parts, so that a few jobs are not all with the first worker that is ready. When a worker dies,
    each of its jobs is tried again alone, on a worker that does nothing else: then a job that kills
    its worker takes no other job with it, and is known after `tries` deaths.

    Args:
        jobs: read as far ahead as `workers` have places.
        workers: number of workers expected.
        places: jobs that a worker has in progress at a time.
        tries: times that a job is given before its deaths count as its failure.
    """

    def __init__(self, jobs: Iterable[Job], workers: int, places: int, tries: int) -> None:
        self._source = iter(jobs)
        self._workers = workers
        self._places = places
        self._tries = tries
        self._exhausted = False
        self._ready: deque[Ticket] = deque()
        self._again: deque[Ticket] = deque()
        self._held: dict[int, dict[int, Ticket]] = {}
        self._alone: set[int] = set()  # those that have a job which is tried again
        self.read_ahead()

    @property
    def waiting(self) -> int:
        """Jobs that were read and that no worker has."""
        return len(self._ready) + len(self._again)

    @property
    def in_progress(self) -> int:
        """Jobs that a worker has."""
        return sum(map(len, self._held.values()))

    @property
    def over(self) -> bool:
        """Whether every job is finished."""
        return self._exhausted and not self.waiting and not self.in_progress

    def holds(self, worker: int) -> bool:
        """Whether a worker has any job."""
        return bool(self._held.get(worker))

    def give(self, worker: int) -> list[Ticket]:
        """The jobs that a living worker gets now."""
        held = self._held.setdefault(worker, {})
        if worker in self._alone:
            return []
        if self._again and not held:
            self._alone.add(worker)
            given = [self._again.popleft()]
        else:
            busy = sum(bool(held) for other, held in self._held.items() if other != worker)
            part = math.ceil(len(self._ready) / max(1, self._workers - busy))
            count = min(self._places - len(held), part)
            given = [self._ready.popleft() for _ in range(count)]
        held.update((ticket.job.place, ticket) for ticket in given)
        return given

    def done(self, worker: int, place: int) -> Ticket | None:
        """A worker has finished a job; None where it is not that worker's."""
        ticket = self._held.get(worker, {}).pop(place, None)
        if ticket is not None:
            self._alone.discard(worker)
        return ticket

    def died(self, worker: int) -> list[Ticket]:
        """A worker has died; those of its jobs that failed, since they were tried too often."""
        self._alone.discard(worker)
        failed: list[Ticket] = []
        for ticket in self._held.pop(worker, {}).values():
            ticket.deaths += 1
            (failed if ticket.deaths >= self._tries else self._again).append(ticket)
        return failed

    def read_ahead(self) -> None:
        """Read jobs until every place of every worker could have one."""
        wanted = self._workers * self._places - len(self._ready)
        read = [Ticket(job) for job in itertools.islice(self._source, max(0, wanted))]
        self._exhausted = self._exhausted or len(read) < wanted
        self._ready += read


class Workers:
    """Many engines, each in a process of its own, that solve problems together.

        with Workers({"task": "game24", "budget": 0.25}, 2) as workers:
            for solution in workers.imap(["4 5 6 10", "1 2 3 4"]):
                print(solution)

    Every worker has the whole model: on one GPU, or on a CPU. Problems go to the workers that have
    a place free. A search depends on its problem, the settings and the seed, so that solutions do
    not depend on the number of workers, nor on which of them had the problem; what differs is what
    an engine did before, such as `Metrics.tokens_shared`. A worker that dies loses what it had in
    progress: each of these problems is tried again, alone, in another process. Processes begin with
    the first problem and live until `close`.

    Args:
        solver: settings of each worker's solver, as `Solver.from_config` takes them, or a `Solver`,
            which stays as it is and need not have loaded anything.
        number: of workers, on this machine; or a cluster of Ray, see `WorkerPlace.parse`: ``ray``
            is the one that runs already, ``8@ray://HOST:PORT`` one elsewhere, with 8 workers.
        concurrency: problems in progress at a time in each worker, sharing its budget.
        device: of each worker: ``cuda``, ``cpu``, or ``auto``: a GPU each where the cluster has
            any; by default that of the solver.
        tries: times that a problem is tried whose workers die.
        cluster: where workers live; by default Ray.
        settings: further settings of the solver.

    Raises:
        UsageError: invalid settings, or Ray is not installed (``arbor-search[ray]``).
        ModelError: the model does not exist.
    """

    def __init__(
        self,
        solver: Solver | Mapping[str, Any] | str | os.PathLike[str],
        number: int | str | WorkerPlace = "ray",
        *,
        concurrency: int = 1,
        device: str | None = None,
        tries: int = TRIES,
        cluster: Cluster | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(solver, Solver):
            read = read_config(solver) if isinstance(solver, str | os.PathLike) else solver
            # a GPU is looked for by the workers, not here
            device = read.get("device") if device is None else device
            self._solver = Solver.from_config(read, **{**settings, "device": "auto"})
        elif settings:
            raise UsageError(
                "workers",
                f"{', '.join(settings)} next to a ready solver.",
                "Give them to the solver.",
            )
        else:
            self._solver = solver
        self._device = self._solver.checkpoint.asked_device if device is None else device
        setup = self._solver.setup
        check_workers(setup.share, check_device(self._device), setup.tp)
        self._place = number if isinstance(number, WorkerPlace) else WorkerPlace.parse(number)
        self._concurrency = check_count("concurrency", concurrency) or 1
        self._tries = check_count("tries", tries) or 1
        unrecorded = self._solver.unrecorded | {"device": self._device}
        self._cluster = self._ray_cluster(unrecorded) if cluster is None else cluster
        self._wanted = 0  # workers; 0 before the cluster was reached
        self._starting: set[int] = set()
        self._ready: dict[int, str] = {}  # worker -> its process, for people
        self._failed_starts = 0  # one after the other
        self._busy = threading.Lock()
        self._stops = 0  # calls of `stop`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        self._starting.clear()
        self._ready.clear()
        self._wanted = 0
        self._cluster.close()

    def stop(self, status: str = "interrupted") -> None:
        """Give up what is in progress; the loop over solutions ends, also one that has not begun.

        Safe from a signal handler or another thread.
        """
        self._stops += 1

    def imap(
        self,
        problems: Iterable[str | Problem],
        *,
        ordered: bool = True,
        on_error: OnError = "raise",
        **options: Unpack[Options],
    ) -> Iterator[Solution]:
        """Solve many problems, see `Solver.imap`."""
        return each_solution(
            self._results,
            self._solver.failed,
            problems,
            options,
            ordered=ordered,
            on_error=on_error,
        )

    def as_completed(
        self,
        jobs: Iterable[tuple[str | Problem, Mapping[str, Any]]],
        *,
        on_error: OnError = "raise",
    ) -> Generator[tuple[int, Solution], None, None]:
        """Solve many problems, each with options of its own, see `Solver.as_completed`.

        Args:
            jobs: problems, and keyword arguments of `Solver.solve` for each; ``trace`` is a path on
                this machine.
            on_error: as in `Solver.imap`.
        """
        return solutions_of(self._results, self._solver.failed, jobs, on_error=on_error)

    def _results(
        self, jobs: Iterable[tuple[str | Problem, Mapping[str, Any]] | None]
    ) -> Generator[tuple[int, Solution | ArborError], None, None]:
        def given() -> Iterator[Job]:
            for place, (problem, asked) in enumerate(filter(None, jobs)):
                options = cast("Options", dict(asked))
                trace = options.pop("trace", None)
                if isinstance(trace, TraceWriter):
                    raise UsageError(
                        "workers-trace", "a TraceWriter lives in this process.", "Pass its path."
                    )
                yield Job(place, problem, options, None if trace is None else Path(trace))

        found = self.outcomes(given())

        def results() -> Generator[tuple[int, Solution | ArborError], None, None]:
            with contextlib.closing(found):
                for outcome in found:
                    yield outcome.job.place, outcome.result

        return results()

    def outcomes(
        self, jobs: Iterable[Job], progress: Callable[[int], None] = lambda in_progress: None
    ) -> Generator[JobOutcome, None, None]:
        """What becomes of each job, as they end; their traces lie where the jobs say.

        Args:
            jobs: read as far ahead as the workers have places; their places are 0, 1, 2 and so on.
            progress: called with the number of jobs in progress, several times a second.

        Yields:
            outcomes. Closing the generator ends the workers that have anything in progress.

        Raises:
            UsageError: the cluster cannot be reached or has no device for a worker, or another
                loop over this object's solutions is open.
            WorkerError: workers die before they have loaded the model.
            ArborError: the model cannot be loaded.
            RuntimeError: a bug in a worker.
        """
        stops = self._stops
        return self._all_outcomes(jobs, progress, lambda: self._stops != stops)

    def _all_outcomes(
        self,
        jobs: Iterable[Job],
        progress: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> Generator[JobOutcome, None, None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                "workers-busy",
                "another loop over the solutions of these workers is open.",
                "End it first, or take other Workers.",
            )
        try:
            if stopped():
                return
            self._wanted = self._wanted or self._cluster.open()
            hand_out = HandOut(jobs, self._wanted, self._concurrency, self._tries)
            try:
                yield from self._outcomes(hand_out, progress, stopped)
            finally:
                for worker in [each for each in self._ready if hand_out.holds(each)]:
                    self._end(worker)
        finally:
            self._busy.release()

    def _outcomes(
        self, hand_out: HandOut, progress: Callable[[int], None], stopped: Callable[[], bool]
    ) -> Generator[JobOutcome, None, None]:
        """The loop: hand out, wait for news, hand out again, and only then yield what was found."""
        since = time.monotonic()
        named = False  # why there is no worker
        while not (hand_out.over or stopped()):
            self._hand_out(hand_out)
            progress(hand_out.in_progress)
            found: list[JobOutcome] = []
            for news in self._cluster.news(POLL_S):
                found += self._heard(hand_out, news)
            if not (hand_out.over or stopped()):
                self._hand_out(hand_out)
            yield from found
            if self._ready:
                since = time.monotonic()
            elif not named and time.monotonic() - since > PATIENCE_S:
                named = True
                self._name_lack()

    def _hand_out(self, hand_out: HandOut) -> None:
        """Give jobs to every worker with a free place, and begin workers for those left."""
        hand_out.read_ahead()
        for worker in list(self._ready):
            tickets = hand_out.give(worker)
            if tickets:
                alone = any(ticket.deaths for ticket in tickets)
                self._cluster.give(worker, [ticket.job for ticket in tickets], alone)
        lacking = self._wanted - len(self._ready) - len(self._starting)
        for _ in range(min(lacking, hand_out.waiting - len(self._starting))):
            self._starting.add(self._cluster.start())

    def _heard(self, hand_out: HandOut, news: News) -> list[JobOutcome]:
        """What was found, or cannot be found, by a piece of news."""
        match news:
            case Ready(worker, where):
                self._starting.discard(worker)
                self._ready[worker] = where
                self._failed_starts = 0
                logger.info("worker %d is ready: %s", worker, where)
            case Finished(worker, delivered):
                return [
                    _received(each)
                    for each in delivered
                    if hand_out.done(worker, each.outcome.job.place) is not None
                ]
            case Died(worker, why):
                return self._died(hand_out, worker, why)
            case Refused(worker, error):
                self._end(worker)
                raise error
            case Broken(worker, traceback):
                where = self._ready.get(worker, "")
                self._end(worker)
                raise RuntimeError(f"a bug in the worker in {where}:\n{traceback}")
        return []

    def _died(self, hand_out: HandOut, worker: int, why: str) -> list[JobOutcome]:
        """What cannot be found since a worker has died."""
        where = self._ready.get(worker)
        self._end(worker)
        if where is None:
            self._failed_starts += 1
            if self._failed_starts >= self._tries:
                raise WorkerError(
                    "worker-start",
                    f"{self._failed_starts} workers died one after the other while they loaded the "
                    f"model: {why}",
                    "Each worker holds the whole model: see the memory, or take fewer workers.",
                )
        lost = hand_out.died(worker)
        logger.warning("the worker in %s died: %s", where or "a process that was loading", why)
        return [_failed(ticket, where or "", why) for ticket in lost]

    def _end(self, worker: int) -> None:
        self._starting.discard(worker)
        self._ready.pop(worker, None)
        self._cluster.end(worker)

    def _name_lack(self) -> None:
        """Say why no worker begins."""
        why = self._cluster.lack()
        if why is None:
            logger.warning("no worker is ready yet")
            return
        if self._place.address is None:
            raise UsageError(
                "workers-resources",
                f"{why}.",
                "Take --device cpu, or a cluster with such devices: --workers ray://HOST:PORT.",
            )
        logger.warning("no worker can begin: %s; waiting for Ray to add machines", why)

    def _ray_cluster(self, unrecorded: dict[str, Any]) -> Cluster:
        """Ray, which is given what a worker's solver is made of."""
        solver = self._solver
        config = dict(solver.config)
        path = Path(solver.checkpoint.source.path)
        if path.is_dir() and not str(config["model"]).startswith("builtin:"):
            config["model"] = str(path.absolute())
        # ready ones, since a process does not know the names that were registered in this one
        config |= {name: getattr(solver.setup, name) for name in PARTS}
        threads = _threads(solver, self._place.number)
        unrecorded = unrecorded | {"threads": threads}
        ray_cluster: Callable[..., Cluster] = part("cluster", "ray")
        return ray_cluster(self._place, config, unrecorded, self._concurrency, threads)


def _threads(solver: Solver, number: int | None) -> int:
    """CPU threads of each process: as given, one for a small model, else a part of the cores."""
    if solver.setup.threads is not None:
        return solver.setup.threads
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    if number is None or solver.describe().parameters < SMALL_MODEL:
        return 1
    return max(1, (os.cpu_count() or 1) // (number * solver.setup.tp))


def _received(delivered: Delivered) -> JobOutcome:
    """An outcome, its trace written where the job says."""
    outcome, path = delivered.outcome, delivered.outcome.job.trace
    if delivered.trace is None or path is None:
        return outcome
    write_atomically(path, delivered.trace)
    if isinstance(outcome.result, Solution):
        return replace(outcome, result=replace(outcome.result, trace_path=os.fspath(path)))
    return outcome


def _failed(ticket: Ticket, where: str, why: str) -> JobOutcome:
    """The outcome of a job whose workers have died."""
    error = WorkerError(
        "worker-died",
        f"{ticket.deaths} workers died one after the other while they had this problem; the last, "
        f"in {where}: {why}",
        "The system ends a process that takes too much memory: take a smaller --budget or "
        "--concurrency, or see what 'arbor solve' does with the problem.",
        tries=ticket.deaths,
    )
    return JobOutcome(ticket.job, error, {"cpu_s": 0.0, "wall_s": 0.0})
