"""SharedEngine: searches with settings of their own that join one engine as they arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from arbor.run.batch import FixedPool
from arbor.run.job import SearchJob
from arbor.run.request import Options, Request
from arbor.run.run import Run
from arbor.run.setup import Setup
from arbor.run.worker import Worker
from arbor.tasks.base import Problem

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.run.session import Status

MOST_KV_BYTES = 4 * 2**30  # of the default budget


class SharedEngine:
    """Searches with settings of their own that join one engine as they arrive.

        shared = solver.shared(at_once=8, tokens=16384)
        job = shared.begin(shared.prepare("4 5 6 10", {"seed": 3}, max_expansions=20))
        job.solution()

    A search joins between two steps of the engine, in the order of arrival, as soon as a place is
    free; every step serves all that are in progress. The budget of all is fixed, and they share
    it: a search that asks for less is planned for less, and may hold what others leave free.
    `SearchJob.stop` ends one with its best so far, `SearchJob.abandon` gives one up, and its KV
    with it.

    Args:
        setup: the parts and settings of the solver, those of a search that changes none.
        lend: the engine, loaded, for as long as searches are in progress.
        contended: as for `Worker`.
        at_once: most searches in progress at a time.
        tokens: of KV, for all of them.
    """

    def __init__(
        self,
        setup: Setup,
        lend: Callable[[Worker], AbstractContextManager[Engine]],
        contended: Callable[[], bool],
        at_once: int,
        tokens: int,
    ) -> None:
        self.setup = dataclasses.replace(setup, record_bytes=0)
        self.tokens = tokens
        self._worker = Worker(at_once, lend, contended, FixedPool(tokens, at_once))

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
        """
        asked = Options() if options is None else options
        run = self._planned(problem, asked, changes)
        if run.plan.budget_tokens > self.tokens:
            run = self._planned(problem, {**asked, "budget": f"{self.tokens}tok"}, changes)
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
        self._worker.add(job)
        self._worker.start()
        return job

    @property
    def running(self) -> int:
        """Number of searches in progress."""
        return len(self._worker.running)

    @property
    def waiting(self) -> int:
        """Number of searches that have not begun."""
        return self._worker.waiting

    def stop(self, status: Status = "interrupted") -> None:
        """End all searches after the current forward; those that wait never begin."""
        self._worker.stop(status)


def default_tokens(context: int, at_once: int, bytes_per_token: int) -> int:
    """Tokens of KV by default: the model's context for every request in progress, at most
    `MOST_KV_BYTES`.

    Args:
        context: the model's, in tokens.
        at_once: requests in progress at a time.
        bytes_per_token: of KV.
    """
    return max(context, min(context * at_once, MOST_KV_BYTES // bytes_per_token))
