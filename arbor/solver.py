"""Solver: one object that owns the model, the tree, the KV budget and the trace; one call solves a problem."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch

from arbor import registry
from arbor._version import __version__
from arbor.budget import Budget, Footprint, Plan
from arbor.config import read_config, refuse_trust
from arbor.controllers.base import Controller
from arbor.engine.engine import Engine
from arbor.engine.mode import Mode, Rehydrate
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import ArborError, InputError, ModelError, UsageError
from arbor.events import Ended, Event, Header, Listener
from arbor.metrics import Metrics, MetricsFold
from arbor.model.checkpoint import Checkpoint
from arbor.model.describe import ModelInfo
from arbor.model.sampling_params import Sampling
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.callbacks import StopSearch, tell_failed
from arbor.run.limits import limit_of, seed_of
from arbor.run.request import Options, Request
from arbor.run.session import Limits, Outcome, Session, Status
from arbor.run.settings import (
    boundary_of,
    component_of,
    msve_of,
    refuse_unknown,
    resolve_mode,
    sampling_of,
)
from arbor.run.solution import Candidate, Solution, Step, failed_solution
from arbor.run.stream import SearchStream
from arbor.tasks.base import BlockLimits, Problem, Task
from arbor.trace.write import SCHEMA
from arbor.tree import Node
from arbor.verifiers.base import Verifier

# one more cascade level costs a launch and a merge per layer on a GPU: estimated to pay from here on (Llama-8B shapes)
CUDA_SAVED_READS = 12_000

logger = logging.getLogger(__name__)


DEFAULT_POLICY = "reentry"
# what a configuration may hold beside a solver's settings: what one run asks for, and what ``arbor eval`` solves
# fmt: off
NOT_THE_SOLVERS = (
    "problem", "expected", "timeout", "max_tokens",
    "arbor", "dataset", "split", "input_key", "target_key", "encoding", "limit", "sample_id", "on_error",
    "trace", "trace_level", "trace_text",
)
# fmt: on


class Solver:
    """Solves problems by searching a tree of thoughts, within a KV budget.

        with Solver(task="game24", budget=0.5) as solver:
            print(solver.solve("4 5 6 10"))

    Names, settings and the model's directory are checked here; the config and the tokenizer are read by `plan`, weights
    by the first `solve` (or `load`). One solver runs one search at a time.

    Args:
        model: ``builtin:sapling``, a directory, a Hub id, or a ready `PreTrainedModel` (then `tokenizer` too).
            `load` takes a ready model over, in place: its attention becomes arbor's, and on a CPU the weights of its
            linear layers are packed and gone from it. It generates nothing by itself afterwards, and cannot be saved.
        tokenizer: for a ready model.
        revision: branch, tag or commit of a model of the Hub; by default its main branch.
        trust_remote_code: run the Python code that lies beside a model's weights; it is in no configuration, so that
            nobody trusts by accident.
        task, controller, verifier: a name, perhaps with settings (``tot,beam=3``), a table (``{"name": "tot", "beam": 3}``),
            or a ready component.
        budget: the part of full retention's KV that is kept, in (0, 1]; or ``8192tok``, ``6GiB``; ``full``.
        policy: what blocks off the running paths keep on the device: likewise a name, a table or a ready policy.
        mode: ``lossless``: any budget gives what full retention gives; ``lossy``: tokens of running paths may leave too.
        rehydrate: ``selective`` (missing tokens come back), ``span`` (whole blocks do), ``off`` (nothing does; the default
            and only where lossy).
        msve: block values for the policies that read them: an `MSVE`, its numbers (``2,1,1,-2``), or a file of ``arbor calibrate``; by default the
            model directory's ``msve.json``, what ``arbor calibrate`` kept for this revision of a Hub model, or `MSVE()`.
        sampling: how tokens are chosen; a mapping changes some of the defaults, which are those of the model's
            `generation_config.json` if it samples, else those of `Sampling`.
        max_depth, step_tokens: override the task's thoughts per path and tokens per thought.
        max_expansions: leaves grown in all.
        dtype, device: ``auto`` is the dtype of the weights, and CUDA where there is one; those of a ready model are its
            own.
        backend: what computes attention: ``auto``, ``torch``, ``flashinfer`` (CUDA), ``rowwise``, ``reference``, a plugin.
            ``auto`` is FlashInfer where it is installed and has kernels for the model, else torch.
        seed: of every random stream.
        deterministic: linears in fixed row chunks and one attention request per row, so that results do not depend on
            what else is in the batch (CPU; slower; no mixtures of experts).
        listeners: called with every event, in order: functions, or `Callback`s. An exception in one ends the run;
            `StopSearch` ends the search with its best so far.
        debug: poison freed KV with NaN and check every invariant after every change (slow).

    Raises:
        UsageError, UnknownName, BudgetRange, ModelError: what cannot be meant, before anything loads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any = "builtin:sapling",
        *,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        task: str | Mapping[str, Any] | Task = "game24",
        controller: str | Mapping[str, Any] | Controller = "tot",
        verifier: str | Mapping[str, Any] | Verifier = "self",
        budget: float | str | Budget = "full",
        policy: str | Mapping[str, Any] | Policy = DEFAULT_POLICY,
        mode: Mode = "lossless",
        rehydrate: Rehydrate | None = None,
        msve: MSVE | str | os.PathLike[str] | None = None,
        sampling: Sampling | Mapping[str, float] | None = None,
        max_depth: int | None = None,
        step_tokens: int | None = None,
        max_expansions: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        seed: int = 0,
        deterministic: bool = False,
        listeners: Sequence[Listener] = (),
        debug: bool = False,
    ) -> None:
        self.task: Task = component_of("task", task, Task)
        self.controller: Controller = component_of("controller", controller, Controller)
        self.verifier: Verifier = component_of("verifier", verifier, Verifier)
        self.budget = Budget.parse(budget)
        self.policy: Policy = component_of("policy", policy, Policy)
        self.mode, self.rehydrate = resolve_mode(mode, rehydrate)
        self._sampling = sampling
        if isinstance(sampling, Mapping):
            sampling_of(sampling)  # refuses what cannot be meant before anything loads
        self.boundary = boundary_of(self.task.boundary, max_depth, step_tokens)
        self.max_expansions = limit_of("max_expansions", max_expansions)
        self.seed = seed_of(seed)
        self.listeners = tuple(listeners)
        self.debug = debug
        self.checkpoint = Checkpoint(
            model,
            tokenizer,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            backend=backend,
            deterministic=deterministic,
        )
        self.msve = msve_of(msve, self.checkpoint.source)
        self._engine: Engine | None = None
        self._session: Session | None = None
        self._busy = threading.Lock()
        self._searching: int | None = None  # the thread that holds it
        self._making = threading.Lock()  # of the engine

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any
    ) -> Self:
        """The solver that a trace header's or a solution's `config` describes, or a TOML file of ``arbor trace config``.

        What is for `solve` (a problem, its answer key, limits) or for ``arbor eval`` (a dataset) is left aside.

        Raises:
            UsageError: a setting that there is not; or the configuration itself asks for trust in a model's code: pass
                ``trust_remote_code=True`` beside it.
        """
        read = read_config(config) if isinstance(config, str | os.PathLike) else config
        refuse_trust(read, "the configuration")
        settings = {**read, **overrides}
        for name in NOT_THE_SOLVERS:
            settings.pop(name, None)
        known = inspect.signature(cls).parameters | inspect.signature(Solver).parameters
        refuse_unknown("the solver", settings, known)
        sampling = settings.get("sampling")
        if isinstance(sampling, Mapping):
            settings["sampling"] = sampling_of(sampling)
        return cls(**settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and its KV."""
        self._engine = None
        self.checkpoint.close()

    # Loading

    def describe(self) -> ModelInfo:
        """What the model needs, from its config alone."""
        return self.checkpoint.read().info

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer; reads it."""
        return self.checkpoint.read().tokenizer

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, resolved; reads the model's generation config."""
        if isinstance(self._sampling, Sampling):
            return self._sampling
        return dataclasses.replace(self.checkpoint.read().sampling, **(self._sampling or {}))  # type: ignore[arg-type]

    def load(self) -> None:
        """Load the weights now rather than at the first problem.

        Raises:
            ModelError: unsupported, incomplete or unreadable.
            UsageError: `deterministic`, and layers of the model depend on the batch.
        """
        _ = self.engine

    @property
    def engine(self) -> Engine:
        """The engine, loaded; after a search it still holds its tree."""
        with self._making:
            if self._engine is None:
                self._engine = Engine(
                    self.checkpoint.load().runner,
                    self.tokenizer,
                    policy=self.policy,
                    mode=self.mode,
                    rehydrate=self.rehydrate,
                    msve=self.msve,
                    min_saved_reads=CUDA_SAVED_READS if self.device.type == "cuda" else 0,
                    debug=self.debug,
                )
            return self._engine

    @property
    def eos(self) -> tuple[int, ...]:
        """Token ids that end a text."""
        return self.checkpoint.load().eos

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.checkpoint.device

    @property
    def deterministic(self) -> bool:
        """Whether tokens are the same, bit for bit, whatever decodes beside them."""
        return self.checkpoint.deterministic

    # Planning

    def plan(
        self,
        problem: str | Problem | None = None,
        *,
        budget: float | str | Budget | None = None,
        max_depth: int | None = None,
        step_tokens: int | None = None,
    ) -> Plan:
        """What a budget buys for a problem; reads no weights.

        Args:
            problem: one of the task's own if there is none.
            budget, max_depth, step_tokens: instead of the solver's.

        Raises:
            InputError: an unreadable, empty or over-long problem.
            BudgetInfeasible: the budget is too small; names the smallest that works.
        """
        parsed = self._parse(self.task.example if problem is None else problem)
        boundary = boundary_of(self.boundary, max_depth, step_tokens)
        return self._plan(parsed, len(self._encode(parsed)), budget, boundary)

    def _parse(self, problem: str | Problem) -> Problem:
        return problem if isinstance(problem, Problem) else self.task.parse(problem)

    def _encode(self, problem: Problem) -> list[int]:
        tokenizer, prompt = self.tokenizer, self.task.prompt(problem)
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            encoded = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=True
            )
            return list(encoded["input_ids"])
        return list(tokenizer.encode(prompt))

    def _plan(
        self,
        problem: Problem,
        prompt_tokens: int,
        budget: float | str | Budget | None,
        boundary: BlockLimits,
    ) -> Plan:
        info = self.describe()
        if not info.supported:
            raise ModelError("arch-unsupported", info.reason, "See 'arbor info MODEL'.")
        question = 0
        if self.verifier.needs_model:
            text = self.task.question(problem, ()).text
            question = len(self.tokenizer.encode(text, add_special_tokens=False))
        blocks = self.controller.max_blocks(boundary.max_depth)
        protect = self.policy.protect
        shape = Footprint(
            prompt_tokens,
            boundary.max_tokens,
            boundary.max_depth,
            blocks,
            question,
            protect.sinks + protect.recent if self.mode == "lossy" else None,
        )
        if shape.path_tokens > info.context:
            levers = ["Shorten the problem", *shape.levers(info.context)]
            raise InputError(
                "problem-too-long",
                f"{prompt_tokens:,} tokens; the model's context is {info.context:,} and the search needs "
                f"{shape.path_tokens - prompt_tokens:,} more.",
                f"{', or '.join(levers)}.",
                tokens=prompt_tokens,
                context=info.context,
            )
        chosen = self.budget if budget is None else Budget.parse(budget)
        return chosen.plan(shape, info.kv_bytes_per_token)

    # Solving

    def solve(self, problem: str | Problem, **options: Unpack[Options]) -> Solution:
        """Search one problem.

        Args:
            problem: as a user types it, or parsed.
            options: what `Request` holds: ``expected``, ``budget``, ``seed``, ``timeout``, ``max_tokens``, ``trace``,
                ``trace_level``.

        Raises:
            InputError, BudgetInfeasible, ModelError: before the search begins.
            UsageError: what cannot be meant; or this thread is in the middle of a search of this solver.
            BudgetInfeasible, OutOfMemory: also in its middle, where the policy gives up too little (``full``) or the machine
                runs out of memory; the error's data hold the best answer until then.
            Exception: whatever a listener raises; `StopSearch` only ends the search.
        """
        return self._solve(self._parse(problem), Request(**options), ())

    def stream(self, problem: str | Problem, **options: Unpack[Options]) -> SearchStream:
        """`solve`, event by event, for ``for`` and ``async for``; see `SearchStream`."""
        parsed, request = self._parse(problem), Request(**options)
        own: list[Session] = []  # to stop this search and none that follows it

        def search(listener: Listener) -> Solution:
            try:
                return self._solve(parsed, request, (listener,), own.append)
            finally:
                own.clear()

        def stop(status: Status) -> None:
            for session in own:
                session.stop(status)

        return SearchStream(search, stop)

    async def asolve(self, problem: str | Problem, **options: Unpack[Options]) -> Solution:
        """`solve` without blocking the event loop; cancelling it stops the search after its current forward."""
        return await self.stream(problem, **options).wait()

    def astream(self, problem: str | Problem, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """The events of `stream`, for ``async for``; leaving the loop early stops the search."""
        return aiter(self.stream(problem, **options))

    def imap(
        self,
        problems: Iterable[str | Problem],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Iterator[Solution]:
        """Solve many problems, one after the other and in their order, as they are asked for.

        Args:
            problems: read one at a time.
            on_error: ``return`` gives a solution with `error` where a problem cannot be solved; a bug is always raised.
            options: the same for every problem, so no ``trace``.
        """
        if on_error not in ("raise", "return"):
            raise UsageError("on-error", f"on_error is {on_error!r}.", "It is 'raise' or 'return'.")
        if options.get("trace") is not None:
            raise UsageError(
                "trace-shared", "one trace for many problems.", "Use solve, or stream."
            )
        return self._each(problems, on_error, options)

    def _each(
        self, problems: Iterable[str | Problem], on_error: str, options: Options
    ) -> Iterator[Solution]:
        for problem in problems:
            try:
                yield self.solve(problem, **options)
            except ArborError as error:
                if on_error == "raise":
                    raise
                seed = options.get("seed")
                yield failed_solution(
                    self.task.name, problem, error, self.seed if seed is None else seed, self.config
                )

    def solve_batch(
        self,
        problems: Iterable[str | Problem],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> list[Solution]:
        """`imap`, all at once."""
        return list(self.imap(problems, on_error=on_error, **options))

    def stop(self, status: Status = "interrupted") -> None:
        """End the search in progress after its current forward; safe from a signal handler or another thread."""
        session = self._session  # read once: the search may end meanwhile
        if session is not None:
            session.stop(status)

    def _solve(
        self,
        problem: Problem,
        request: Request,
        listeners: Sequence[Listener],
        begun: Callable[[Session], object] = lambda session: None,
    ) -> Solution:
        if self._searching == threading.get_ident():
            raise UsageError(
                "solver-busy",
                "a listener, task, verifier or controller of this search asked its own solver to solve another problem.",
                "One solver runs one search at a time: use another Solver there, or solve after the search.",
            )
        if request.expected is not None:
            problem = dataclasses.replace(problem, expected=request.expected)
        seed = self.seed if request.seed is None else request.seed
        prompt = self._encode(problem)
        plan = self._plan(problem, len(prompt), request.budget, self.boundary)
        uses = request.uses(problem.text, seed)
        if uses is None and self.policy.name == "belady":
            raise UsageError(
                "belady-blind",
                "belady knows the future only of a recorded run.",
                "Solve once with a trace, then solve(…, recorded=TRACE), or: arbor replay TRACE --policy belady.",
            )
        budget = str(Budget.parse(request.budget or self.budget))
        config = self.config | {"budget": budget, **request.limits}
        logger.info(
            "%s of %d tokens, seed %d: %d of %d tokens of KV, policy %s, %s",
            self.task.name,
            len(prompt),
            seed,
            plan.budget_tokens,
            plan.full_tokens,
            config["policy"]["name"],
            self.mode,
        )
        with self._searched():
            engine = self.engine
            fold = MetricsFold()
            writer = request.writer()
            heard = (fold, *((writer,) if writer else ()), *self.listeners, *listeners)

            def emit(event: Event) -> None:
                for listener in heard:
                    try:
                        listener(event)
                    except StopSearch:
                        session.stop("interrupted")
                limit = request.max_tokens
                if limit is not None and fold.metrics().tokens_generated >= limit:
                    session.stop("limit")

            stop = StopRule(self.tokenizer, self.boundary, self.eos)
            session = self._session = Session(
                engine,
                self.task,
                problem,
                self.controller,
                self.verifier,
                Growth(seed, self.sampling, stop),
                Limits(self.boundary.max_depth, self.max_expansions, request.timeout),
                plan.budget_tokens,
                emit,
                uses,
                request.trace_level,
            )
            begun(session)
            try:
                emit(self._header(problem, seed, plan, config))
                try:
                    outcome = session.run(prompt, self.task.prompt(problem))
                except BaseException:
                    end = Ended("error", fold.metrics().nodes, fold.metrics().to_dict())
                    tell_failed(heard, end)
                    raise
                emit(Ended(outcome.status, len(outcome.tree), fold.metrics().to_dict()))
                cost = fold.metrics()
                logger.info(
                    "%s: %d tokens in %.2f s, %d recomputed, at most %d tokens of KV",
                    outcome.status,
                    cost.tokens_generated,
                    cost.wall_s,
                    cost.tokens_recomputed,
                    cost.peak_tokens,
                )
            finally:
                engine.finish()
                self._session = None
                if writer is not None:
                    writer.close()
            path = None if writer is None else os.fspath(writer.path)
            return self._solution(problem, outcome, fold.metrics(), seed, config, path)

    @contextmanager
    def _searched(self) -> Iterator[None]:
        """Within, this thread is the only one that searches."""
        with self._busy:
            self._searching = threading.get_ident()
            try:
                yield
            finally:
                self._searching = None

    def _header(self, problem: Problem, seed: int, plan: Plan, config: dict[str, Any]) -> Header:
        info = self.describe()
        created = datetime.now(UTC)
        content = f"{created.isoformat()} {os.getpid()} {problem.id}"
        return Header(
            schema=SCHEMA,
            run=hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
            created=created.isoformat(timespec="seconds"),
            arbor=__version__,
            task=self.task.name,
            problem=problem.text,
            seed=seed,
            expected=problem.expected,
            model=info.to_dict(),
            device={
                "name": str(self.device),
                "torch": torch.__version__,
                "backend": self.checkpoint.backend_name(info),
            },
            config=config,
            kv=plan.to_dict(),
        )

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, resolved; enough to build this solver again."""
        return {
            "model": self.checkpoint.source.name,
            "revision": self.checkpoint.source.revision,
            "task": registry.spec_of(self.task),
            "controller": registry.spec_of(self.controller),
            "verifier": registry.spec_of(self.verifier),
            "budget": str(self.budget),
            "policy": registry.spec_of(self.policy),
            "mode": self.mode,
            "rehydrate": self.rehydrate,
            "msve": str(self.msve),
            "sampling": dataclasses.asdict(self.sampling),
            "max_depth": self.boundary.max_depth,
            "step_tokens": self.boundary.max_tokens,
            "max_expansions": self.max_expansions,
            "dtype": self.checkpoint.dtype,
            "backend": self.checkpoint.backend,
            "seed": self.seed,
            "deterministic": self.deterministic,
        }

    def _solution(
        self,
        problem: Problem,
        outcome: Outcome,
        metrics: Metrics,
        seed: int,
        config: dict[str, Any],
        trace: str | None,
    ) -> Solution:
        best = outcome.best
        path: list[Node] = [] if best is None else best.path
        return Solution(
            id=problem.id,
            task=self.task.name,
            problem=problem.text,
            answer=outcome.answer,
            text="".join(node.text for node in path[1:]),
            score=0.0 if best is None else best.value,
            correct=outcome.correct,
            finish_reason=outcome.status,
            path=tuple(node.id for node in path),
            steps=tuple(Step(n.id, n.text, n.value, len(n.tokens)) for n in path[1:]),
            candidates=tuple(
                Candidate(
                    leaf.id, self.task.answer(problem, leaf.thoughts), leaf.value, leaf.logprob
                )
                for leaf in outcome.finished
            ),
            metrics=metrics,
            seed=seed,
            config=config,
            trace_path=trace,
        )
