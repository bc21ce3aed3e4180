"""SharedEngine: searches with settings of their own that join one engine as they arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from arbor.errors import UsageError
from arbor.run.batch import FixedPool, Pool
from arbor.run.job import SearchJob
from arbor.run.request import Options, Request
from arbor.run.run import Run
from arbor.run.setup import Setup
from arbor.run.worker import Worker
from arbor.tasks.base import Problem

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.run.session import Status


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
        contended: as for `Worker`.
        at_once: most searches in progress at a time.
        tokens: of KV, for all of them; None: as many as their budgets need.
    """

    def __init__(
        self,
        setup: Setup,
        lend: Callable[[Worker], AbstractContextManager[Engine]],
        contended: Callable[[], bool],
        at_once: int,
        tokens: int | None,
    ) -> None:
        self.setup = dataclasses.replace(setup, record_bytes=0)
        self.tokens = tokens
        pool = Pool() if tokens is None else FixedPool(tokens, at_once)
        self._worker = Worker(at_once, lend, contended, pool)

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


def default_tokens(context: int, at_once: int, bytes_per_token: int, free_bytes: int) -> int:
    """Tokens of KV by default: half of the free memory, and at most the model's context for every
    request in progress.

    Args:
        context: the model's, in tokens.
        at_once: requests in progress at a time.
        bytes_per_token: of KV.
        free_bytes: of the device, next to the weights; 0: not known.
    """
    most = context * at_once
    return max(1, min(most, free_bytes // 2 // bytes_per_token)) if free_bytes else most
