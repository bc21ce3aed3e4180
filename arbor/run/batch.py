"""Batch: the runs of many problems that share one engine and its budget, and their solutions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Literal, get_args

from arbor.budget import Budget, Plan
from arbor.errors import ArborError, UsageError
from arbor.events import Event
from arbor.run.request import Request
from arbor.run.run import Run
from arbor.run.searches import Steps, in_order
from arbor.run.setup import Setup
from arbor.run.solution import Solution
from arbor.tasks.base import Problem
from arbor.verifiers.base import Verifier

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.run.session import Status

# a problem, and keyword arguments of `Solver.solve` (`Options`)
Job = tuple[str | Problem, Mapping[str, Any]]
Found = tuple[int, Solution | ArborError]  # a job's place, and what became of it


class Pool:
    """The budget of all searches in an engine, set while it is idle.

    Searches share it whose budgets are given alike; one with another budget waits until the engine
    is idle, so that none holds more than it was given. Searches with budgets of their own
    (`Setup.own_budgets`) each take theirs out of it, and one whose budget is not left waits.

    Attributes:
        is_fixed: it is an amount whatever the budgets of the searches are.
        tokens: of KV; where the budgets are parts of full retention, of which the pool grows as
            they do, the most that full retention of the first searches needs.
        verifiers: tokens of KV in the models of verifiers that have their own.
    """

    is_fixed = False

    def __init__(self) -> None:
        self.tokens = 0
        self.verifiers: dict[Verifier, int] = {}
        self._given: tuple[str, float] | None = None

    def set(self, runs: Sequence[Run]) -> None:
        """Set it by the searches that run at first: those up to the first with another budget; if
        each keeps within its own, all of them, and their sum where they are not given alike."""
        alike = list(takewhile(lambda run: _given(run) == _given(runs[0]), runs))
        self._given = _given(runs[0]) if runs else None
        if len(alike) < len(runs) and runs[0].setup.own_budgets:
            self.tokens = sum(run.plan.budget_tokens for run in runs)
            self.verifiers = verifier_pools(runs)
            return
        self.tokens = pool_of(alike)
        self.verifiers = verifier_pools(alike)

    def admits(self, run: Run, running: Iterable[Run], idle: bool) -> bool:
        """Whether a search may begin; in an idle engine it may, and the budget grows to its own."""
        own = run.setup.own_budgets
        if not own and self._given not in (None, _given(run)):
            if not idle:
                return False
            self.set([run])
        plan = run.plan
        verifiers = run.verifier_plans
        if idle:
            self.tokens = max(self.tokens, plan.budget_tokens)
            for verifier, each in verifiers.items():
                before = self.verifiers.get(verifier, 0)
                self.verifiers[verifier] = max(before, each.budget_tokens)
            return True
        if plan.part is not None and not self.is_fixed and not own:
            return True
        if plan.smallest_tokens > self.tokens or any(
            each.smallest_tokens > self.verifiers.get(verifier, 0)
            for verifier, each in verifiers.items()
        ):
            return False
        if own:
            taken = sum(other.plan.budget_tokens for other in running)
            return taken + plan.budget_tokens <= self.tokens
        if run.setup.policy.keeps_all:
            taken = sum(other.plan.full_tokens for other in running)
            return taken + plan.full_tokens <= self.tokens
        return True


class FixedPool(Pool):
    """A budget that stays the same whatever is searched.

    Args:
        tokens: of KV.
        at_once: most searches in progress at a time; the models of verifiers have room for as many
            as the first.
    """

    is_fixed = True

    def __init__(self, tokens: int, at_once: int) -> None:
        super().__init__()
        self.tokens = tokens
        self._at_once = at_once

    def set(self, runs: Sequence[Run]) -> None:
        """Nothing: it stays."""

    def admits(self, run: Run, running: Iterable[Run], idle: bool) -> bool:
        """Whether a search, which fits by itself, may begin."""
        for verifier, plan in run.verifier_plans.items():
            room = self.verifiers.setdefault(verifier, self._at_once * plan.budget_tokens)
            if idle:
                self.verifiers[verifier] = max(room, plan.smallest_tokens)
        return super().admits(run, running, idle=False)


class Batch:
    """Many problems, several of which are searched at a time in one budget.

    A ratio is a part of what full retention of all of them holds. An amount is that of all, at most
    full retention of the problems that come first, as many as run at a time; it stays until the
    engine is idle. A problem that needs more, or has another budget, waits until then;
    where the policy evicts nothing, so does one whose full retention is not free, and where each
    keeps within its own budget (`Pool`), one whose budget is not.

    While new weights wait to replace the model's, and once it was closed, no problem begins; what
    is left goes on in another engine.

    Args:
        setup: parts and settings, those of the solver.
        jobs: read when a place becomes free; None where none is ready yet.
        at_once: most of them in progress at a time.
        listen: called with a job's place and every event of its search.

    Attributes:
        begun: how many problems have begun.
    """

    def __init__(
        self,
        setup: Setup,
        jobs: Iterable[Job | None],
        at_once: int,
        listen: Callable[[int, Event], None] | None = None,
    ) -> None:
        self._setup = setup
        self._jobs = (None if job is None else self._run(job) for job in jobs)
        self._at_once = at_once
        self._waiting: deque[Run | Exception] = deque()  # read, in their order
        self._several = self._read_ahead() > 1
        self._listen = listen
        self.begun = 0
        self._running: dict[int, Run] = {}
        self._pool = Pool()
        self._stopped: Status | None = None
        self._going: Generator[Found, None, None] | None = None
        self._early: deque[Found] = deque()  # found by `finish`
        self._failed: Exception | None = None  # raised in it, after them

    def _read_ahead(self) -> int:
        """Read the jobs that run at first; how many there were, with those not ready yet."""
        read = list(islice(self._jobs, self._at_once - len(self._waiting)))
        self._waiting += [run for run in read if run is not None]
        return len(read)

    def results(
        self, searched: Callable[[], Generator[Found, None, None]]
    ) -> Generator[Found, None, None]:
        """Each job's place, and what became of it, as they are found.

        Args:
            searched: the same, in an engine that it holds until no problem may begin.
        """
        while True:
            self._going = searched()
            with closing(self._going) as going:
                yield from going
            while self._early:
                yield self._early.popleft()
            if self._failed is not None:
                raise self._failed
            if not self._waiting or self._stopped is not None:
                return
            self._read_ahead()

    @property
    def in_step(self) -> bool:
        """Whether this is called by a search in progress, or by what reads the jobs."""
        going = self._going
        return going is not None and getgeneratorstate(going) == GEN_RUNNING

    def finish(self) -> None:
        """Carry out what is in progress now; its results, and the error that ends it, are handed
        out later, as if asked for."""
        try:
            self._early.extend(self._going or ())
        except Exception as error:
            self._failed = error

    def searches(self, engine: Engine) -> Iterator[Callable[[bool], Steps[Solution] | None] | None]:
        """What begins each search, see `as_completed`; to be called once for each engine."""
        ready = list(self._waiting)
        self._pool.set([run for run in ready if isinstance(run, Run)])
        place = self.begun
        for run in ready:
            if self._stopped is not None:
                return
            yield partial(self._begin, engine, place, run)
            place += 1
        for read in self._jobs:
            if self._stopped is not None:
                return
            if read is None:
                yield None
                continue
            self._waiting.append(read)
            yield partial(self._begin, engine, place, read)
            place += 1

    def over(self, place: int) -> None:
        """Record that a search has ended."""
        self._running.pop(place, None)

    def stop(self, status: Status = "interrupted") -> None:
        """End the searches in progress after the current forward, and begin no other.

        Safe from a signal handler or another thread.
        """
        self._stopped = status
        for run in list(self._running.values()):
            run.stop(status)

    def _run(self, job: Job) -> Run | Exception:
        """The run of a job, or why it cannot be one."""
        problem, options = job
        try:
            run = Run(self._setup, problem, Request.of(options))
            _ = run.plan
        except ArborError as error:
            return error
        return run

    def _begin(
        self, engine: Engine, place: int, run: Run | Exception, idle: bool
    ) -> Steps[Solution] | None:
        checkpoint = self._setup.checkpoint
        if self._stopped is not None or checkpoint.use.is_due or not checkpoint.has(engine.runner):
            return None
        if isinstance(run, Run) and not self._pool.admits(run, self._running.values(), idle):
            return None
        self._waiting.popleft()
        self.begun += 1
        if isinstance(run, Exception):
            raise run
        run.announce()
        self._running[place] = run
        if self._stopped is not None:  # since it was read above
            run.stop(self._stopped)
        heard = () if self._listen is None else (partial(self._listen, place),)
        if not self._several:
            return run.steps(engine, *heard)
        pool, verifiers = self._pool.tokens, self._pool.verifiers
        return run.steps(engine, *heard, pool=pool, verifier_pools=verifiers)


def _given(run: Run) -> tuple[str, float]:
    """The budget of a search as it was given."""
    return run.budget.unit, run.budget.amount


def pool_of(runs: Sequence[Run]) -> int:
    """The budget of several runs together, in tokens."""
    return _together(runs[0].budget, [run.plan for run in runs]) if runs else 0


def verifier_pools(runs: Sequence[Run]) -> dict[Verifier, int]:
    """The same in the models of verifiers that have their own."""
    plans: dict[Verifier, list[Plan]] = {}
    for run in runs:
        for verifier, plan in run.verifier_plans.items():
            plans.setdefault(verifier, []).append(plan)
    models = {
        verifier: each for run in runs for verifier, each in run.setup.verifier_models.items()
    }
    return {verifier: _together(models[verifier].budget, each) for verifier, each in plans.items()}


def _together(budget: Budget, plans: Sequence[Plan]) -> int:
    """The budget of several searches in one engine, in tokens."""
    if budget.unit == "ratio":
        return sum(plan.budget_tokens for plan in plans)
    full = sum(plan.full_tokens for plan in plans)
    return budget.tokens(full, plans[0].bytes_per_token)


OnError = Literal["raise", "return"]

# jobs, None where none is ready yet -> the place of each and what became of it, as they are found
Solving = Callable[[Iterable[Job | None]], Generator[Found, None, None]]
# the solution of a job that ended with an error
Failed = Callable[[str | Problem, ArborError, Mapping[str, Any]], Solution]


def several(problems: Iterable[str | Problem]) -> Iterable[str | Problem]:
    """Several problems.

    Raises:
        UsageError: it is one.
    """
    if isinstance(problems, str | Problem):
        raise UsageError(
            "problem-type", "one problem instead of several.", "Use solve, or [problem]."
        )
    return problems


def solutions_of(
    solving: Solving,
    failed: Failed,
    jobs: Iterable[Job | None],
    *,
    ordered: bool = False,
    on_error: OnError,
) -> Generator[tuple[int, Solution], None, None]:
    """The place and the solution of each job, as `solving` asks for it.

    Args:
        failed: the solution of a job that ended with an error.
        ordered: in the jobs' order; else as they are found.
        on_error: whether an error is raised, or becomes a solution.

    Raises:
        UsageError: at once, for an unknown `on_error`.
    """
    if on_error not in get_args(OnError):
        raise UsageError("on-error", f"on_error is {on_error!r}.", "It is 'raise' or 'return'.")
    begun: dict[int, Job] = {}  # jobs whose solutions are not handed out yet

    def noted() -> Iterator[Job | None]:
        place = 0
        for job in jobs:
            if job is not None:
                begun[place] = job
                place += 1
            yield job

    results = solving(noted())

    def solutions() -> Generator[tuple[int, Solution], None, None]:
        with closing(results):
            for place, result in in_order(results) if ordered else results:
                problem, options = begun.pop(place)
                if not isinstance(result, ArborError):
                    yield place, result
                elif on_error == "raise":
                    raise result
                else:
                    yield place, failed(problem, result, options)

    return solutions()


def each_solution(
    solving: Solving,
    failed: Failed,
    problems: Iterable[str | Problem],
    options: Mapping[str, Any],
    *,
    ordered: bool,
    on_error: OnError,
) -> Iterator[Solution]:
    """`solutions_of` several problems with the same options, without their places.

    Raises:
        UsageError: at once, for one problem instead of several, an unknown `on_error`, or a trace
            that all would write.
    """
    jobs = ((problem, options) for problem in several(problems))
    found = solutions_of(solving, failed, jobs, ordered=ordered, on_error=on_error)
    if options.get("trace") is not None:
        raise UsageError(
            "trace-shared", "one trace for many problems.", "Use solve, or as_completed."
        )

    def solutions() -> Iterator[Solution]:
        with closing(found):
            for _, solution in found:
                yield solution

    return solutions()
