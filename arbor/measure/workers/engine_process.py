"""EngineProcess: one engine in a process of its own, which takes jobs and delivers outcomes."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbor._version import __version__
from arbor.errors import ArborError, ModelError
from arbor.measure.outcomes import Job, outcomes
from arbor.measure.workers.cluster import Delivered

if TYPE_CHECKING:
    from arbor.solver import Solver

LINGER_S = 0.05  # in which jobs that are sent together arrive


class EngineProcess:
    """One engine in a process of its own, which takes jobs and delivers outcomes.

    `load` is called first; then `give` and `take`, each from a thread of its own. A thread of this
    object searches: it takes what was given, several jobs at a time, and the budget of all is set
    when the engine is idle, by the jobs that are there then.

    Args:
        config: of the solver, see `Solver.from_config`.
        unrecorded: settings that a configuration does not hold, see `Solver.unrecorded`.
        concurrency: jobs in progress at a time.
        version: arbor's, where the jobs come from.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        unrecorded: Mapping[str, Any],
        concurrency: int,
        version: str = __version__,
    ) -> None:
        self._config, self._unrecorded = config, unrecorded
        self._concurrency = concurrency
        self._version = version
        self._given: queue.SimpleQueue[tuple[Job, bool]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Delivered | str] = queue.SimpleQueue()
        self._in_progress = 0

    def load(self) -> str | ArborError:
        """Load the model; names this process, or returns the error that every process would have.

        Raises:
            Exception: a bug.
        """
        where = f"process {os.getpid()} of {socket.gethostname()}"
        if self._version != __version__:
            return ModelError(
                "worker-version",
                f"the worker in {where} has arbor {__version__}, and its jobs come from "
                f"{self._version}.",
                "Install the same version on every machine.",
            )
        from arbor.solver import Solver

        try:
            solver = Solver.from_config(self._config, **self._unrecorded)
            solver.load()
        except ArborError as error:
            error.data["worker"] = where
            return error
        threading.Thread(
            target=self._work, args=(solver,), name="arbor-engine", daemon=True
        ).start()
        return where

    def give(self, jobs: Sequence[Job], alone: bool) -> None:
        """Add jobs; `alone` where nothing else is to be in progress next to them."""
        for job in jobs:
            self._given.put((job, alone))

    def take(self) -> list[Delivered] | str:
        """What was found since the last call, at least one outcome; waits for it.

        Returns:
            outcomes, or the traceback of a bug, after which nothing follows.
        """
        found = [self._found.get()]
        while not self._found.empty():
            found.append(self._found.get())
        delivered = []
        for each in found:
            if isinstance(each, str):
                return each
            delivered.append(each)
        return delivered

    # The thread that searches

    def _work(self, solver: Solver) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="arbor-traces-") as folder:
                while True:
                    self._search(solver, Path(folder))
        except BaseException:
            self._found.put(traceback.format_exc())

    def _search(self, solver: Solver, folder: Path) -> None:
        """Search until nothing is in progress and nothing is given."""
        first = self._first()
        self._in_progress = 0
        wanted: dict[int, Path | None] = {}  # where the sender wants its trace

        def jobs() -> Iterator[Job | None]:
            while True:
                job = first.popleft() if first else self._next()
                if job is None and self._in_progress == 0:
                    return
                if job is None:
                    yield None
                    continue
                self._in_progress += 1
                wanted[job.place] = job.trace
                if job.trace is not None:
                    suffixes = ".arbor.jsonl" + (".gz" if job.trace.suffix == ".gz" else "")
                    job = replace(job, trace=folder / f"{job.place}{suffixes}")
                yield job

        for outcome in outcomes(solver, jobs(), self._concurrency):
            self._in_progress -= 1
            path, data = outcome.job.trace, None
            if outcome.traced and path is not None:
                data = path.read_bytes()
                path.unlink()
            place = outcome.job.place
            sent = replace(outcome, job=replace(outcome.job, trace=wanted.pop(place)))
            self._found.put(Delivered(sent, data))

    def _first(self) -> deque[Job]:
        """The jobs of an idle engine: waits for one, and briefly for those sent with it."""
        job, alone = self._given.get()
        first = deque([job])
        while len(first) < self._concurrency and not alone:
            try:
                job, alone = self._given.get(timeout=LINGER_S)
            except queue.Empty:
                break
            first.append(job)
        return first

    def _next(self) -> Job | None:
        """The next job, if it is here."""
        try:
            return self._given.get_nowait()[0]
        except queue.Empty:
            return None
