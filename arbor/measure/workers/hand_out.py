"""HandOut: which worker gets which job, and what becomes of the jobs of a worker that dies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")
Worker = Hashable


@dataclass(slots=True)
class Ticket(Generic[Job]):
    """A job that is not finished.

    Attributes:
        place: its place among the jobs, 0-based.
        job: the job.
        deaths: workers that died while they had it.
    """

    place: int
    job: Job
    deaths: int = 0


class HandOut(Generic[Job]):
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
        self._read = 0
        self._exhausted = False
        self._ready: deque[Ticket[Job]] = deque()
        self._again: deque[Ticket[Job]] = deque()
        self._held: dict[Worker, dict[int, Ticket[Job]]] = {}
        self._alone: set[Worker] = set()  # those that have a job which is tried again
        self._read_ahead()

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

    def holds(self, worker: Worker) -> bool:
        """Whether a worker has any job."""
        return bool(self._held.get(worker))

    def give(self, worker: Worker) -> list[Ticket[Job]]:
        """The jobs that a living worker gets now."""
        held = self._held.setdefault(worker, {})
        if worker in self._alone:
            return []
        if self._again and not held:
            self._alone.add(worker)
            given = [self._again.popleft()]
        else:
            self._read_ahead()
            busy = sum(bool(held) for other, held in self._held.items() if other != worker)
            part = math.ceil(len(self._ready) / max(1, self._workers - busy))
            count = min(self._places - len(held), part)
            given = [self._ready.popleft() for _ in range(count)]
        held.update((ticket.place, ticket) for ticket in given)
        return given

    def done(self, worker: Worker, place: int) -> Ticket[Job] | None:
        """A worker has finished a job; None where it is not that worker's."""
        ticket = self._held.get(worker, {}).pop(place, None)
        if ticket is not None:
            self._alone.discard(worker)
        return ticket

    def died(self, worker: Worker) -> list[Ticket[Job]]:
        """A worker has died; those of its jobs that failed, since they were tried too often."""
        self._alone.discard(worker)
        failed: list[Ticket[Job]] = []
        for ticket in self._held.pop(worker, {}).values():
            ticket.deaths += 1
            (failed if ticket.deaths >= self._tries else self._again).append(ticket)
        return failed

    def _read_ahead(self) -> None:
        """Read jobs until every place of every worker could have one."""
        while not self._exhausted and len(self._ready) < self._workers * self._places:
            try:
                job = next(self._source)
            except StopIteration:
                self._exhausted = True
                return
            self._ready.append(Ticket(self._read, job))
            self._read += 1
