"""SearchWorker: one background thread for the searches of a solver, or of a `SharedEngine`."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

from arbor.errors import UsageError
from arbor.run.batch import FixedPool, Pool
from arbor.run.request import Options, Request
from arbor.run.run import Run
from arbor.run.searches import OneSearch
from arbor.run.setup import Setup
from arbor.run.solution import Solution
from arbor.run.stream import SearchJob
from arbor.tasks.base import Problem

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.run.session import Status

logger = logging.getLogger(__name__)

EXIT_S = 2.0  # longest wait for the current forward when the interpreter exits


class SearchWorker:
    """One background thread that carries out the searches of a solver's streams together.

    The thread is started when there is work and ends when there is none. Every step of the engine
    serves all searches in progress; a job joins between two steps. Jobs begin in their order.

    The budget of all is set when the engine is idle, by the jobs that wait then, as many as are
    searched at a time (`pool_of`). A job that needs more waits until the engine is idle again.

    Args:
        at_once: most searches in progress at a time.
        lend: the engine, loaded, for as long as searches are in progress.
        contended: whether another thread waits for the engine, or its model was closed; no job
            begins before the engine was given back.
        pool: the budget of all; by default it is set as above. In one that is given, a search that
            has ended holds nothing.
    """

    def __init__(
        self,
        at_once: int,
        lend: Callable[[SearchWorker], AbstractContextManager[Engine]],
        contended: Callable[[], bool],
        pool: Pool | None = None,
    ) -> None:
        self._at_once = at_once
        self._lend = lend
        self._contended = contended
        self._lock = threading.Lock()  # of the thread's beginning and end, and of what waits
        self._thread: threading.Thread | None = None
        self._waiting: deque[SearchJob] = deque()
        self._going: list[tuple[OneSearch[Solution], SearchJob]] = []
        self._keeps_last = pool is None  # a lone search's tree, for its user
        self._pool = Pool() if pool is None else pool

    def add(self, job: SearchJob) -> None:
        """Add a job, for the next `start`."""
        with self._lock:
            self._waiting.append(job)

    def start(self) -> None:
        """Start the thread, unless it runs.

        Where that is impossible, the jobs that wait end with the error.
        """
        with self._lock:
            if not self._waiting or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._work, name="arbor-search", daemon=True)
            atexit.register(self._exit)
            try:
                self._thread.start()
            except RuntimeError as error:  # too many threads, or the interpreter exits
                self._thread = None
                atexit.unregister(self._exit)
                self._fail_waiting(error)

    @property
    def running(self) -> list[Run]:
        """The searches in progress."""
        return [job.run for _, job in self._going]

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return sum(not job.taken for job in list(self._waiting))

    def stop(self, status: Status = "interrupted") -> None:
        """End the searches in progress after the current forward; those that wait never begin.

        Safe from a signal handler or another thread.
        """
        waiting = list(self._waiting)  # first: a job goes from there to those in progress
        for job in [*waiting, *(job for _, job in list(self._going))]:
            job.stop(status)

    def _exit(self) -> None:
        """The interpreter exits: torch must not be in the middle of a forward."""
        thread = self._thread
        self.stop()
        if thread is not None:
            thread.join(EXIT_S)

    # The thread

    def _work(self) -> None:
        """Search until there is nothing left."""
        while self._has_work():
            last: list[Callable[[], None]] = []
            try:
                if self._plan_first():
                    self._search(last)
            except BaseException as error:  # the engine cannot be had
                self._fail_waiting(error)
            while last:  # after the engine was given back
                last.pop(0)()

    def _has_work(self) -> bool:
        with self._lock:
            while self._waiting and self._waiting[0].taken:
                self._waiting.popleft()
            if self._waiting:
                return True
            self._thread = None
            atexit.unregister(self._exit)
            return False

    def _plan_first(self) -> bool:
        """Whether a job can begin; those before it, which cannot, are ended."""
        while self._waiting:
            job = self._waiting[0]
            if not job.taken and self._is_planned(job) and not job.taken:  # it may be stopped there
                return True
            self._waiting.popleft()
        return False

    def _is_planned(self, job: SearchJob) -> bool:
        """Whether a job has a plan; one that has none is ended with its error."""
        try:
            _ = job.run.plan
        except BaseException as error:
            if job.take():
                job.end(None, error)
            return False
        return True

    def _fail_waiting(self, error: BaseException) -> None:
        """End the jobs that wait with an error."""
        for job in list(self._waiting):
            if job.take():
                job.end(None, error)

    def _search(self, last: list[Callable[[], None]]) -> None:
        """Search until nothing is in progress and nothing may begin.

        An engine that nobody else has is freed here: the thread may not do so when Python exits.

        Args:
            last: takes the ends that are told after the engine was given back.
        """
        with self._lend(self) as engine:
            first = True
            try:
                while True:
                    if first or not self._contended():
                        self._begin(engine)
                    first = False
                    if not self._going:
                        return
                    over = self._resume()
                    if not over:
                        engine.step()
                        continue
                    if self._going or (self._waiting and not self._contended()):
                        for end in over:
                            end()
                    else:
                        last += over
            except BaseException as error:  # ends every search, as Ctrl-C does
                for search, job in self._going:
                    ended = search.done
                    _close(search)
                    last.append(
                        _ending(job, search.result, search.error)
                        if ended
                        else _ending(job, None, error)
                    )
                if not isinstance(error, Exception):
                    engine.abandon(error)
            finally:
                self._going = []
                if not self._keeps_last:
                    engine.close_finished()

    def _begin(self, engine: Engine) -> None:
        """Begin the jobs that wait, in their order, as many as there are places and room for."""
        if any(job.taken for job in list(self._waiting)):  # they ended before they began
            with self._lock:
                self._waiting = deque(job for job in self._waiting if not job.taken)
        while self._waiting and len(self._going) < self._at_once:
            job = self._waiting[0]
            try:
                if not self._begin_one(engine, job):
                    return
            except BaseException as error:
                if job.take():
                    job.end(None, error)
            self._waiting.popleft()

    def _begin_one(self, engine: Engine, job: SearchJob) -> bool:
        """Begin a job, unless it is taken or cannot be planned; False if it waits for room."""
        if job.taken or not self._is_planned(job):
            return True
        idle, alone = not self._going, False
        if idle:
            runs = self._next_runs()
            self._pool.set(runs)
            alone = len(runs) == 1 and self._keeps_last
        if not self._pool.admits(job.run, self.running, idle):
            return False
        job.run.announce()
        if job.take():
            # alone, its own budget is that of all
            pool = None if alone else self._pool.tokens
            verifiers = None if alone else self._pool.verifiers
            steps = job.run.steps(
                engine,
                job.emit,
                pool=pool,
                verifier_pools=verifiers,
                pool_is_fixed=self._pool.is_fixed,
            )
            search = OneSearch(0, steps)
            self._going.append((search, job))
        return True

    def _next_runs(self) -> list[Run]:
        """The runs that begin next in an idle engine."""
        jobs = (job for job in list(self._waiting) if not job.taken and self._is_planned(job))
        return [job.run for job in islice(jobs, self._at_once)]

    def _resume(self) -> list[Callable[[], None]]:
        """Resume every search whose operation is done; the ends of those that are over, and of
        those that were abandoned, which are given up."""
        over: list[Callable[[], None]] = []
        going: list[tuple[OneSearch[Solution], SearchJob]] = []
        for search, job in self._going:
            if job.abandoned:
                _close(search)
                over.append(_ending(job, None, None))
                continue
            search.go_on()
            if search.done:
                over.append(_ending(job, search.result, search.error))
            else:
                going.append((search, job))
        self._going = going
        return over


def _ending(
    job: SearchJob, solution: Solution | None, error: BaseException | None
) -> Callable[[], None]:
    return lambda: job.end(solution, error)


def _close(search: OneSearch[Solution]) -> None:
    """Give a search up."""
    try:
        search.close()
    except Exception:
        logger.warning("a search failed while it was given up", exc_info=True)


class SharedEngine:
    """Searches with settings of their own that join one engine as they arrive.

        shared = solver.shared(at_once=8, tokens=16384)
        job = shared.begin(shared.prepare("4 5 6 10", {"seed": 3}, max_expansions=20))
        job.solution()

    A search joins between two steps of the engine, in the order of arrival, as soon as a place is
    free; every step serves all that are in progress. With `tokens` the KV of all is fixed, and they
    share it: a search that asks for less is planned for less, and in lossless mode may hold what
    others leave free. Without, budgets are those of `Solver.as_completed`.
    `SearchJob.stop` ends one with its best so far, `SearchJob.abandon` gives one up, and its KV
    with it.

    Args:
        setup: the parts and settings of the solver, those of a search that changes none.
        lend: the engine, loaded, for as long as searches are in progress.
        contended: as for `SearchWorker`.
        at_once: most searches in progress at a time.
        tokens: of KV, for all of them; None: as many as their budgets need.

    Attributes:
        worker: carries the searches out.
    """

    def __init__(
        self,
        setup: Setup,
        lend: Callable[[SearchWorker], AbstractContextManager[Engine]],
        contended: Callable[[], bool],
        at_once: int,
        tokens: int | None,
    ) -> None:
        self.setup = dataclasses.replace(setup, record_bytes=0)
        self.tokens = tokens
        pool = Pool() if tokens is None else FixedPool(tokens, at_once)
        self.worker = SearchWorker(at_once, lend, contended, pool)

    def prepare(
        self, problem: str | Problem, options: Options | None = None, **changes: Any
    ) -> Run:
        """A search, checked and planned, that has not begun.

        Args:
            problem: as a user types it, or parsed.
            options: the keyword arguments of `Solver.solve`.
            changes: fields of `Setup` that replace the solver's; those of the engine (policy, mode,
                sharing, tiers) stay.

        Raises:
            ArborError: an invalid setting, an unreadable problem, or one that needs more KV than
                there is.
            UsageError: a ratio of KV that is fixed.
        """
        asked = Options() if options is None else options
        run = given = self._planned(problem, asked, changes)
        if self.tokens is None:
            return run
        if run.plan.budget_tokens > self.tokens:
            run = self._planned(problem, {**asked, "budget": f"{self.tokens}tok"}, changes)
        if given.budget.unit == "ratio" and not given.budget.keeps_all:
            amount = min(given.plan.room_tokens, self.tokens)
            raise UsageError(
                "budget-shared",
                f"a budget of {given.budget} is a part of what its search holds, and searches share "
                f"{self.tokens:,} tokens of KV here.",
                f"Give an amount, as in {amount}tok, or leave it out.",
            )
        return run

    def _planned(self, problem: str | Problem, options: Options, changes: dict[str, Any]) -> Run:
        run = Run(dataclasses.replace(self.setup, **changes), problem, Request.of(options))
        _ = run.plan
        return run

    def begin(self, run: Run) -> SearchJob:
        """Let a prepared search join; its events and its end are the job's."""
        from arbor.model.threads import keep_threads

        keep_threads()
        job = SearchJob(run)
        self.worker.add(job)
        self.worker.start()
        return job

    @property
    def running(self) -> int:
        """Number of searches in progress."""
        return len(self.worker.running)

    @property
    def waiting(self) -> int:
        """Number of searches that have not begun."""
        return self.worker.waiting

    def stop(self, status: Status = "interrupted") -> None:
        """End all searches after the current forward; those that wait never begin."""
        self.worker.stop(status)


def default_tokens(context: int, at_once: int, bytes_per_token: int, free_bytes: int) -> int:
    """Tokens of KV by default: half of the free memory, and at most the model's context for every
    request in progress.
    """
    most = context * at_once
    return max(1, min(most, free_bytes // 2 // bytes_per_token)) if free_bytes else most
