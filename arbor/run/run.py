"""Run: one search of one problem, from its prompt to its solution."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from arbor._version import __version__
from arbor.budget import Budget, Plan
from arbor.engine.mode_names import SIMILAR
from arbor.errors import BudgetInfeasible, UsageError
from arbor.events import Audited, Ended, Header, Listener, ReachedLimit
from arbor.metrics import Metrics, MetricsFold
from arbor.model.known_tokens import check_known
from arbor.retention.future_reads import FutureReads
from arbor.run.limits import SessionLimits
from arbor.run.listeners import Broadcast, RecordedEvents
from arbor.run.planning import (
    encode_problem,
    fitted,
    parse_problem,
    plan_search,
    prompt_of,
)
from arbor.run.plugin_answers import (
    checked_task,
    most_blocks,
    own_questions,
    path_answer,
    unchecked,
)
from arbor.run.questions import PlannedQuestions, question_turn
from arbor.run.request import Request, TraceDetail
from arbor.run.searches import Steps, completed
from arbor.run.setup import Setup
from arbor.run.solution import Candidate, Solution, Step
from arbor.support.setting import changed_settings
from arbor.tasks.base import GivesTokens, Problem, PutsInWords, Task
from arbor.trace.write import SCHEMA, TraceWriter
from arbor.tree import Node
from arbor.verifiers.base import SearchShape, Verifier, VerifierSearch

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.run.session import Outcome, Session, Status

logger = logging.getLogger(__name__)


class Run:
    """One search of one problem: its prompt, plan, header, listeners, trace and session.

    The problem goes down once, through `solve` to the session, and its solution comes back once.
    """

    def __init__(self, setup: Setup, problem: str | Problem, request: Request) -> None:
        parsed = parse_problem(checked_task(setup.task), problem)
        self._given = setup
        if request.expected is not None:
            parsed = dataclasses.replace(parsed, expected=request.expected)
        self.problem = parsed
        self.request = request
        self.seed, self.budget = asked_of(setup, request)
        self.session: Session | None = None  # while the engine searches
        self.since_s: float | None = None  # when its time began, see `Allowance`
        self._stopped: Status | None = None
        self._reached: ReachedLimit | None = None  # which limit stopped it
        self.pool: int | None = None  # the budget of all runs in the engine
        self.pool_is_fixed = False  # it is an amount, whatever the budget of this run is
        self.verifier_pools: Mapping[Verifier, int] = {}  # likewise, in the verifiers' models

    def solve(
        self, lend: Callable[[Run], AbstractContextManager[Engine]], *listeners: Listener
    ) -> Solution:
        """Plan, search, and describe what was found.

        Args:
            lend: the engine, loaded, for as long as the search takes; entered after planning.
            listeners: called with every event, after those of the setup.

        Raises:
            see `Solver.solve`.
        """
        self.announce()
        with lend(self) as engine:
            return completed(engine, self.steps(engine, *listeners))

    def steps(
        self,
        engine: Engine,
        *listeners: Listener,
        pool: int | None = None,
        verifier_pools: Mapping[Verifier, int] | None = None,
        pool_is_fixed: bool = False,
    ) -> Steps[Solution]:
        """`solve`, next to other runs in one engine.

        Yields every operation it asks the engine for; to be resumed when that is done.

        Args:
            engine: loaded.
            listeners: called with every event, after those of the setup.
            pool: the budget of all runs in the engine, tokens; by default that of this run.
            verifier_pools: the same in the models of verifiers that have their own.
            pool_is_fixed: `pool` is the budget of all, whatever that of this run is.
        """
        reads = self._reads()
        self.pool = self._lasting_pool() if self.setup.share in SIMILAR else pool
        self.verifier_pools = verifier_pools or {}
        self.pool_is_fixed = pool_is_fixed
        metrics = MetricsFold()
        writer = self.request.writer()
        most = self.setup.record_bytes
        recording = RecordedEvents(most) if writer is None and most else None
        records = [each for each in (writer, recording) if each is not None]
        try:
            outcome = yield from self._search(engine, reads, metrics, records, listeners)
        finally:
            self.session = None
            for each in records:
                each.close()
        return self._solution(outcome, metrics.metrics(), writer, recording)

    def _lasting_pool(self) -> int:
        """The pool in which the KV of earlier prompts stays: the same for every problem.

        Raises:
            UsageError: the budget depends on the problem.
        """
        if self.budget.unit == "ratio":
            raise UsageError(
                "share",
                f"share={self.setup.share} keeps prompts from one problem to the next, and a budget "
                f"of {self.budget} is another for each.",
                "Give it in tokens or bytes, as in --budget 4096tok.",
            )
        bytes_per_token = self.setup.checkpoint.read().info.kv_bytes_per_token
        return self.budget.tokens(sys.maxsize, bytes_per_token)

    def unsearched(self, status: Status, limit: ReachedLimit | None = None) -> Solution:
        """The solution of a search that was stopped before it began."""
        return Solution(
            id=self.problem.id,
            task=self.task.name,
            problem=self.problem.text,
            finish_reason=status,
            limit=limit,
            seed=self.seed,
            config=self.config,
        )

    def announce(self) -> None:
        """Log what is searched, within which budget, and whether that has no room for a prompt that
        the policy protects; plans it."""
        plan, policy = self.plan, self.setup.policy
        logger.info(
            "%s of %d tokens, seed %d: %d of %d tokens of KV, policy %s, %s",
            self.setup.task.name,
            len(self.prompt),
            self.seed,
            plan.budget_tokens,
            plan.full_tokens,
            self.config["policy"]["name"],
            self.setup.mode,
        )
        parts = plan.part is not None and plan.part < 1
        has_room = not parts and plan.budget_tokens >= len(self.prompt)
        if self.setup.mode == "lossy" and policy.protect.prompt and not has_room:
            _warn_of_prompt(policy.name)

    def stop(self, status: Status = "interrupted", limit: ReachedLimit | None = None) -> None:
        """End the search after its current forward, or as soon as it begins.

        Safe from a signal handler or another thread.
        """
        self._stopped, self._reached = status, limit
        session = self.session  # read once: the search may end meanwhile
        if session is not None:
            session.stop(status, limit)

    # Before the search; reads no weights

    @cached_property
    def setup(self) -> Setup:
        """The settings, with the task's prompts for the model; only a task that has others asks for
        the model's files."""
        given = self._given
        if not isinstance(unchecked(given.task), PutsInWords):
            return given
        task = fitted(given.task, given.checkpoint.read().tokenizer)
        return dataclasses.replace(given, task=task)

    @cached_property
    def task(self) -> Task:
        """What is solved, checked."""
        return checked_task(self.setup.task)

    @cached_property
    def prompt(self) -> list[int]:
        """Token ids of the root.

        Raises:
            InputError: the model's weights lack one.
        """
        files, own = self.setup.checkpoint.read(), unchecked(self.task)
        if isinstance(own, GivesTokens):
            tokens = list(own.prompt_tokens(self.problem))
        else:
            tokens = encode_problem(files.tokenizer, self.task, self.problem)
        check_known(tokens, files.info.vocabulary, "the prompt", files.tokenizer)
        return tokens

    @cached_property
    def plan(self) -> Plan:
        """The plan of this run: its memory at the budget."""
        plan = plan_search(self.setup, self.problem, len(self.prompt), self.budget)
        _ = self.verifier_plans  # what they refuse is refused before anything loads
        return plan

    @cached_property
    def verifier_plans(self) -> Mapping[Verifier, Plan]:
        """The memory of this run in the models of verifiers that have their own."""
        models = self.setup.verifier_models
        return {verifier: model.plan(self._shape) for verifier, model in models.items()}

    @cached_property
    def _shape(self) -> SearchShape:
        """The search, as the models of verifiers plan it."""
        controller, boundary = self.setup.controller, self.setup.boundary
        most = most_blocks(controller, boundary.max_depth)
        return SearchShape(self.task, self.problem, boundary, most, len(self.prompt))

    @cached_property
    def config(self) -> dict[str, Any]:
        """See `asked_config`."""
        return asked_config(self.setup, self.request)

    def _reads(self) -> FutureReads | None:
        """When each block is read, if a recorded run was given."""
        reads = self.request.reads(self.problem.text, self.seed)
        policy = self.setup.policy
        if reads is None and policy.needs_recording:
            raise UsageError(
                "belady-blind",
                f"the policy '{policy.name}' needs a recorded run of the same search.",
                f"Solve once with a trace, then solve(…, recorded=TRACE), or: arbor replay TRACE --policy {policy.name}.",
            )
        return reads

    @property
    def _part(self) -> Fraction | None:
        """The part of full retention that is kept; None: an amount."""
        return None if self.pool_is_fixed else self.plan.fraction

    @property
    def _slots(self) -> int:
        """The own budget in tokens, see `Engine.open`."""
        return self.plan.budget_tokens if self._part is None else self.plan.room_tokens

    # The search

    def _search(
        self,
        engine: Engine,
        reads: FutureReads | None,
        metrics: MetricsFold,
        records: Sequence[Listener],
        listeners: tuple[Listener, ...],
    ) -> Steps[Outcome]:
        """The session between the header and the end."""
        from arbor.engine.grammar import Grammar
        from arbor.engine.open_tree import ignore
        from arbor.engine.operation import Growth
        from arbor.engine.stop_rule import StopRule
        from arbor.run.session import Session

        setup, request = self.setup, self.request
        heard: list[Listener] = [metrics, *records, *setup.listeners, *listeners]
        emit = Broadcast(heard, self.stop)
        eos = setup.checkpoint.load().eos
        boundary, words = setup.boundary, engine.tokenizer
        form = boundary.form
        with ExitStack() as verifiers:
            limits = SessionLimits(boundary.max_depth, setup.max_expansions, **request.limits)
            by_policy = setup.mode == "lossy" and setup.policy.reads_values
            session = partial(
                Session,
                engine,
                setup.task,
                self.problem,
                setup.controller,
                setup.verifier,
                Growth(
                    self.seed,
                    setup.resolved_sampling,
                    StopRule(words, boundary, eos),
                    None if form is None else Grammar(form, boundary.stop, words, eos),
                    setup.branch_stop,
                    setup.alternatives,
                ),
                limits,
                self._slots,
                detail=request.trace_level,
                reads=reads,
                questions=PlannedQuestions(
                    engine,
                    setup.task.name,
                    own_questions(setup.verifier),
                    self.plan,
                    setup.checkpoint.read().info.context,
                    setup.checkpoint.read().info.vocabulary,
                    question_turn(engine.tokenizer, setup.task, self.problem),
                ),
                pool=self.pool,
                aggregate=setup.aggregate,
                by_policy=by_policy,
                since_s=self.since_s,
                opened=self._open_verifiers(emit, verifiers),
                most=self.plan.most_held,
                part=self._part,
                least=self.plan.smallest_tokens,
            )
            text = prompt_of(self.task, self.problem, words)
            self.session = session(emit=emit)
            if self._stopped is not None:  # while the search was being set up
                self.session.stop(self._stopped, self._reached)
            header = self._header(engine)
            try:
                emit(header)
                outcome = yield from self.session.steps(self.prompt, text)
                if setup.share == "audit" and self.session.substituted and self._stopped is None:
                    began = time.perf_counter()
                    self.session = session(emit=ignore, compares=False)
                    honest = yield from self.session.steps(self.prompt, text)
                    if honest.status not in ("timeout", "interrupted"):  # else it was not compared
                        same = honest.answer == outcome.answer
                        emit(Audited(honest.answer, same, elapsed_s=time.perf_counter() - began))
            except BaseException as error:
                if isinstance(error, BudgetInfeasible):
                    self._say_what_is_enough(error)
                cost = metrics.metrics()
                emit.fail(Ended("error", cost.nodes, cost.to_dict()))
                raise
        counters = metrics.metrics().to_dict()
        emit(Ended(outcome.status, len(outcome.tree), counters, outcome.limit))
        cost = metrics.metrics()
        logger.info(
            "%s: %d tokens in %.2f s, %d recomputed, at most %d tokens of KV",
            outcome.status,
            cost.tokens_generated,
            cost.wall_s,
            cost.tokens_recomputed,
            cost.peak_tokens,
        )
        return outcome

    def _say_what_is_enough(self, error: BudgetInfeasible) -> None:
        """Put an amount that is enough for any path into the hint of a path that outgrew its own.

        What raised the error knows no more than the next tokens of that path.
        """
        enough = self.plan.enough_tokens
        if error.hint == error.smallest and error.needed <= enough:
            error.hint = f"{enough}tok is enough for any path; so is a ratio, as in --budget 0.25."
            error.data["enough"] = enough

    def _open_verifiers(
        self, emit: Listener, until: ExitStack
    ) -> Mapping[Verifier, VerifierSearch]:
        """This search in the models of verifiers that have their own."""
        opened: dict[Verifier, VerifierSearch] = {}
        for verifier, model in self.setup.verifier_models.items():
            plan = self.verifier_plans[verifier]
            pool = self.verifier_pools.get(verifier, plan.budget_tokens)
            opened[verifier] = model.open(self._shape, plan, pool, emit)
            until.callback(opened[verifier].close)
        return opened

    def _header(self, engine: Engine) -> Header:
        import torch

        checkpoint, problem = self.setup.checkpoint, self.problem
        info = checkpoint.read().info
        created = datetime.now(UTC)
        content = f"{created.isoformat()} {os.getpid()} {problem.id}"
        return Header(
            schema=SCHEMA,
            run=hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
            created=created.isoformat(timespec="milliseconds"),
            arbor=__version__,
            task=self.setup.task.name,
            problem=problem.text,
            seed=self.seed,
            expected=problem.expected,
            model=info.to_header(),
            device={
                "name": str(checkpoint.device),
                "torch": torch.__version__,
                "backend": checkpoint.backend_name(info),
                "threads": torch.get_num_threads(),
            },
            config=self.config | _measured(engine),
            kv=self.plan.to_dict() | ({} if self.pool is None else {"pool_tokens": self.pool}),
        )

    # After the search

    def _solution(
        self,
        outcome: Outcome,
        metrics: Metrics,
        writer: TraceWriter | None,
        recording: RecordedEvents | None,
    ) -> Solution:
        best, task, problem = outcome.best, self.task, self.problem
        path: list[Node] = [] if best is None else best.path
        return Solution(
            id=problem.id,
            task=task.name,
            problem=problem.text,
            answer=outcome.answer,
            text="".join(node.text for node in path[1:]),
            score=None if best is None else best.judged,
            correct=outcome.correct,
            guessed=outcome.guessed,
            grade=outcome.grade,
            finish_reason=outcome.status,
            limit=outcome.limit,
            path=tuple(node.id for node in path),
            steps=tuple(Step(n.id, n.text, n.judged, len(n.tokens)) for n in path[1:]),
            candidates=tuple(
                Candidate(leaf.id, answer, leaf.judged, leaf.logprob, guessed, leaf.cut)
                for leaf in outcome.finished
                for answer, guessed in [path_answer(task, problem, leaf)]
            ),
            votes=outcome.votes,
            metrics=metrics,
            seed=self.seed,
            config=self.config,
            trace_path=None if writer is None else os.fspath(writer.path),
            recording=recording,
        )


def asked_of(setup: Setup, request: Request) -> tuple[int, Budget]:
    """The seed and the budget of a run: its own, or the solver's."""
    seed = setup.seed if request.seed is None else request.seed
    return seed, setup.budget if request.budget is None else Budget.parse(request.budget)


def asked_config(setup: Setup, request: Request) -> dict[str, Any]:
    """The solver's configuration, with the budget, the seed, the limits and the detail of a run."""
    seed, budget = asked_of(setup, request)
    own = {"budget": str(budget), "seed": seed, **request.limits}
    return setup.config | own | changed_settings(request, TraceDetail)


def _measured(engine: Engine) -> dict[str, str]:
    """What was measured on this machine and decides how a run computes, so that it can be
    repeated."""
    levels = {"kv_probe": str(engine.levels)} if engine.levels.least_rows else {}
    return levels | ({} if engine.costs is None else {"fetch": str(engine.costs)})


@cache
def _warn_of_prompt(policy: str) -> None:
    """Say once in a process that a protected prompt does not stay."""
    logger.warning(
        "the policy %s protects the prompt as far as the budget has room for it; tokens of it leave "
        "too. A budget as an amount, such as 8192tok, keeps a prompt that fits",
        policy,
    )
