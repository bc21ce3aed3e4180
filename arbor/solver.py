"""Solver: one object that owns a model and its settings; one call solves a problem."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack

from arbor import components
from arbor.aggregate.base import Aggregate
from arbor.budget import Budget, Plan
from arbor.controllers.base import Controller
from arbor.engine.hooks import PromptHook
from arbor.engine.mode_names import SIMILAR, Mode, Rehydrate
from arbor.errors import ArborError, SearchBug, UsageError
from arbor.events import Event, Listener
from arbor.feature import hook, hook_for
from arbor.model.checkpoint import Checkpoint
from arbor.model.level_rule import KV_PROBE, LevelRule
from arbor.model.model_info import ModelInfo
from arbor.model.parallel.shards import cannot
from arbor.model.sampling_params import Sampling
from arbor.retention.base import Allocator
from arbor.retention.policy import Policy
from arbor.run.batch import Batch, Found, Job, OnError, each_solution, several, solutions_of
from arbor.run.config import read_config, refuse_trust, refuse_unnamed, refuse_updated
from arbor.run.limits import RunLimits, check_count, limited
from arbor.run.request import Options, Request
from arbor.run.rollout import Rollout, RolloutFold, refuse_rollouts
from arbor.run.run import Run, asked_config
from arbor.run.searches import as_completed, each_within
from arbor.run.settings import Settings
from arbor.run.setup import Setup
from arbor.run.solution import Solution, failed_solution
from arbor.run.stream import SearchJob
from arbor.run.token_level import Continuation, Generation, TokenScoring, checked_beams
from arbor.run.worker import SearchWorker, SharedEngine
from arbor.support.early_import import early_import
from arbor.support.garbage import free_dropped
from arbor.support.setting import known_keywords, settings_of
from arbor.tasks.base import BlockLimits, Problem, Task
from arbor.verifiers.base import Verifier

if TYPE_CHECKING:
    import torch

    from arbor.engine.engine import Engine
    from arbor.engine.likelihood import TokenScores
    from arbor.model.int8_weights import WeightRounding
    from arbor.model.runner import ModelRunner
    from arbor.run.session import Status
    from arbor.run.stream import SearchStream

# Settings in a configuration file that are not a solver's: of one run, and of ``arbor eval``.
RUN_SETTINGS = ("problem", "expected", *settings_of(RunLimits), "trace", "trace_level")
# fmt: off
EVALUATION_SETTINGS = (
    "arbor", "dataset", "split", "input_key", "target_key", "encoding", "limit", "sample_id",
    "on_error", "trace_text", "grader_version", "model_content", "prompt_version",
)
# fmt: on

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Stop:
    """One call of `Solver.stop`; what was asked for before it ends, however far it is."""

    status: Status


class Solver:
    """Solves problems by searching a tree of thoughts, within a KV budget.

        with Solver(task="game24", budget=0.25) as solver:
            print(solver.solve("4 5 6 10"))

    Names, settings and the model's directory are checked here; `plan` reads the config and the
    tokenizer, the first `solve` (or `load`) the weights. One solver searches one problem at a time
    with `solve`, many with `solve_batch`, `imap` and `as_completed`, and all that are open with
    `stream` and `asolve`; any of these waits while another is in progress in another thread.

    Args:
        model: ``builtin:sapling``, a directory, a Hub id, or a ready `PreTrainedModel` (then
            `tokenizer` too, see `ModelSettings`).
        task, controller, verifier, aggregate, budget, policy, sampling, seed, listeners: see
            `SolverSettings`.
        mode, rehydrate: see `ModeSettings`.
        host: see `TierSettings`.
        max_depth: see `BoundarySettings`.
        device: see `ModelSettings`.
        settings: the other settings by name; ``arbor list settings`` shows all of them, and
            `Settings` names the classes that describe them.

    Raises:
        UsageError, UnknownName, BudgetRange, ModelError: an invalid setting; nothing was loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any = Settings.model,
        *,
        task: str | Mapping[str, Any] | Task = Settings.task,
        controller: str | Mapping[str, Any] | Controller = Settings.controller,
        verifier: str | Mapping[str, Any] | Verifier = Settings.verifier,
        aggregate: str | Mapping[str, Any] | Aggregate = Settings.aggregate,
        budget: float | str | Budget = Settings.budget,
        policy: str | Mapping[str, Any] | Policy | Allocator | None = Settings.policy,
        mode: Mode = Settings.mode,
        rehydrate: Rehydrate | None = Settings.rehydrate,
        host: str | int | Budget | None = Settings.host,
        sampling: Sampling | Mapping[str, float] | None = Settings.sampling,
        max_depth: int | None = Settings.max_depth,
        device: str = Settings.device,
        seed: int = Settings.seed,
        listeners: Sequence[Listener] = Settings.listeners,
        **settings: Any,
    ) -> None:
        given = {
            "model": model,
            "task": task,
            "controller": controller,
            "verifier": verifier,
            "aggregate": aggregate,
            "budget": budget,
            "policy": policy,
            "mode": mode,
            "rehydrate": rehydrate,
            "host": host,
            "sampling": sampling,
            "max_depth": max_depth,
            "device": device,
            "seed": seed,
        }
        self.setup = Setup.resolved(Settings.of(given | settings))
        if not isinstance(listeners, Iterable) or not all(map(callable, listeners)):
            what = f"listeners = {listeners!r:.60}: it must be a list of functions of an event."
            raise UsageError("setting-type", what, setting="listeners")
        self.listeners = tuple(listeners)
        self._engine: Engine | None = None
        self._closed: list[Engine] = []  # by `close`, and perhaps in use
        self._loading = threading.Lock()
        # the search in progress, or several
        self._run: Run | Batch | SearchWorker | Generation | TokenScoring | None = None
        self._last_stop = _Stop("interrupted")
        self._busy = threading.Lock()  # held by it
        self._next = threading.Lock()  # held by the thread that has `_busy` next
        self._thread: threading.Thread | None = None  # in which it runs, or ran last
        self._process: int | None = None  # that first used the engine
        self._worker = SearchWorker(self.setup.at_once, self._lend, self._contended)
        self._shared: list[weakref.ref[SearchWorker]] = []  # those of `shared`

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any
    ) -> Self:
        """The solver of a configuration: a trace header's, a solution's, or a TOML file.

        Settings of one run (a problem, its answer key, limits) and of ``arbor eval`` (a dataset)
        are ignored. ``arbor trace config`` writes such a file.

        Raises:
            UsageError: an unknown setting, or the configuration sets `trust_remote_code`: pass
                ``trust_remote_code=True`` as an argument instead; or it is that of a search with
                weights of `update_weights`, or no settings by name.
        """
        read = read_config(config) if isinstance(config, str | os.PathLike) else config
        refuse_unnamed(read)
        refuse_trust(read, "the configuration")
        refuse_updated(read, "the configuration")
        settings = {**read, **overrides}
        for name in (*RUN_SETTINGS, *EVALUATION_SETTINGS):
            settings.pop(name, None)
        return cls(**settings)

    def __repr__(self) -> str:
        names = {
            kind: components.spec_of(getattr(self, kind))["name"]
            for kind in ("task", "controller", "verifier", "policy")
        }
        named = ", ".join(f"{kind}={name!r}" for kind, name in names.items())
        return (
            f"{type(self).__name__}({self.checkpoint.source.name!r}, {named}, "
            f"budget={str(self.setup.budget)!r}, mode={self.setup.mode!r}, seed={self.seed})"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "solver-process",
            "a Solver is neither copied nor pickled: its model and its threads are of one process.",
            "Make another there: Solver.from_config(solver.config, **solver.unrecorded).",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and its KV; streams in progress end after the current forward.

        Other searches in progress go on to their end with the model they have; the next ones load
        it again. A small model's memory comes back when Python next looks for cycles.
        """
        self._worker.stop()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._closed.append(engine)
            del engine
        self._give_back()
        self.checkpoint.close()
        for model in self.setup.verifier_models.values():
            model.close()
        free_dropped()

    def _give_back(self) -> None:
        """Free what closed engines hold in lower tiers, unless a search is in progress: its end
        does."""
        while self._closed and self._busy.acquire(blocking=False):
            try:
                while self._closed:
                    self._closed.pop().give_back()
            finally:
                self._busy.release()

    # Its parts

    @property
    def task(self) -> Task:
        """What is solved."""
        return self.setup.task

    @property
    def controller(self) -> Controller:
        """What chooses the leaves to grow."""
        return self.setup.controller

    @property
    def verifier(self) -> Verifier:
        """What judges thoughts."""
        return self.setup.verifier

    @property
    def aggregate(self) -> Aggregate:
        """What chooses the answer."""
        return self.setup.aggregate

    @property
    def policy(self) -> Policy:
        """What is kept of blocks off the running paths."""
        return self.setup.policy

    @property
    def boundary(self) -> BlockLimits:
        """Where a thought and a path end."""
        return self.setup.boundary

    @property
    def seed(self) -> int:
        """Seed of every random stream."""
        return self.setup.seed

    @property
    def checkpoint(self) -> Checkpoint:
        """The model and its tokenizer; that of another solver may be shared."""
        return self.setup.checkpoint

    @checkpoint.setter
    def checkpoint(self, shared: Checkpoint) -> None:
        self.setup = replace(self.setup, checkpoint=shared)

    # Loading

    def describe(self) -> ModelInfo:
        """What the model needs, from its config alone."""
        return self.checkpoint.read().info

    @property
    def rounding(self) -> WeightRounding | None:
        """What `weights` changed in the model; None without it, before the model is loaded, and for
        a model that another solver had loaded so."""
        return self.checkpoint.rounding

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer; reads it."""
        return self.checkpoint.read_files().tokenizer

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, resolved; reads the model's generation config."""
        return self.setup.resolved_sampling

    def load(self) -> None:
        """Load the weights now rather than at the first problem.

        Raises:
            ModelError: unsupported, incomplete or unreadable.
            UsageError: `deterministic`, and layers of the model depend on the batch.
        """
        _ = self.engine

    @property
    def engine(self) -> Engine:
        """The engine, loaded; after a search that was not interrupted it still holds its tree,
        until the weights change."""
        self._refuse_fork()
        with self._loading, self._computing():
            engine = self._engine  # read once: `close` may take it away
            if engine is None or engine.runner is not self.checkpoint.load().runner:
                self._engine = engine = None  # its KV is of other weights
                self._engine = engine = self._loaded()
            return engine

    def _loaded(self) -> Engine:
        from arbor.engine.engine import Engine
        from arbor.memory.pool import bytes_per_token
        from arbor.model.fetch_probe import chosen_costs
        from arbor.model.runner import StagedBackend

        setup, weights = self.setup, self.checkpoint.load()
        runner, named = weights.runner, (self.checkpoint.source.name, weights.backend)
        companions = [model.load() for model in setup.verifier_models.values()]
        if setup.staged and isinstance(runner.backend, StagedBackend):
            raise UsageError(
                "staging",
                f"the backend '{weights.backend}' plans a forward as a whole, and staging computes "
                "it in chunks.",
                "Use --backend torch.",
            )
        kv_bytes = bytes_per_token(runner.layer_kv, runner.kv_dtype)
        room = setup.tier_room(kv_bytes, runner.kv_dtype.itemsize)
        engine = Engine(
            runner,
            self.checkpoint.read().tokenizer,
            policy=setup.policy,
            mode=setup.mode,
            rehydrate=setup.rehydrate,
            share=setup.share,
            prompt_hook=self._prompt_hook(runner),
            scores=setup.msve,
            levels=self._levels(runner, *named),
            lower=room,
            prompts=setup.prompt_files(self.checkpoint),
            costs=chosen_costs(setup.fetch, runner, room, *named) if setup.tiered else None,
            debug=setup.debug,
        )
        engine.companions = tuple(companions)
        return engine

    def _prompt_hook(self, runner: ModelRunner) -> PromptHook | None:
        """What says whether a search reads another prompt than its own."""
        share = self.setup.share
        if share not in SIMILAR:
            return None
        found: PromptHook = hook_for("share", share)(
            runner, self.tokenizer, self.setup.share_threshold
        )
        return found

    def _levels(self, runner: ModelRunner, model: str, backend: str) -> LevelRule:
        """Which shared spans rows read together."""
        from arbor.model.plan import usual_levels

        fixed = usual_levels(runner.device, runner.backend)
        probe = "off" if self.setup.deterministic else self.setup.kv_probe
        if probe == "off":
            return fixed
        if probe not in KV_PROBE:
            rule = LevelRule.parse(probe)
        else:
            measured = hook("kv_probe")
            rule = (measured and measured(probe, runner, model, backend)) or fixed
        if rule.least_rows:
            logger.info("KV probe: rows from which shared spans are read once: %s", rule)
        return rule

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        drain: bool = False,
    ) -> None:
        """Replace weights of the model; the others stay, and no KV of the former ones is read.

            solver.update_weights(trained.state_dict())

        All are checked before anything changes. Solvers that share the checkpoint have them too.
        `close` gives them up: the next search reads the model's own files.

        Args:
            weights: by the names of the model's ``state_dict()``; either name of tied ones. They
                are copied, in the dtype and to the device of those before.
            drain: let the searches in progress end first, with the former weights, and begin no
                other, but those that a loop in another thread waits for; such a loop has to go on,
                or be closed. A loop over a batch may ask for that: what was in progress is handed
                out next, and the problems left are searched with the new weights.

        Raises:
            UsageError: searches are in progress, without `drain` or in this thread; a weight that
                does not fit; 8-bit weights; several processes hold the model together.
            ModelError, OutOfMemory: as `load`; the former weights are back.
        """
        if self.setup.tp > 1:
            raise cannot(self.setup.tp, "an update of weights", "one process")
        self._refuse_fork()
        use = self.checkpoint.use
        with use.announced():
            if use.is_read and not drain:
                raise UsageError(
                    "solver-busy",
                    "searches of this model are in progress, and read its weights.",
                    "Let them end, close the loops over them, or give drain=True.",
                )
            if use.is_read:
                logger.info("searches in progress end with the former weights")
            batch = self._run if self._thread is threading.current_thread() else None
            if isinstance(batch, Batch) and not batch.in_step:
                batch.finish()
            if use.is_read_here or use.is_written_here:
                raise _busy()
            with use.writing(), self._computing():
                self._engine = None
                self.checkpoint.update(weights)

    @property
    def eos(self) -> tuple[int, ...]:
        """Token ids that end a text."""
        return self.checkpoint.load().eos

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.checkpoint.device

    # Planning

    @known_keywords("a plan")
    def plan(
        self,
        problem: str | Problem | None = None,
        *,
        budget: float | str | Budget | None = None,
        max_depth: int | None = None,
        path_tokens: int | None = None,
        step_tokens: int | None = None,
    ) -> Plan:
        """Memory of a problem at a budget, as a plan; reads no weights.

        Args:
            problem: one of the task's own if there is none.
            budget, max_depth, path_tokens, step_tokens: instead of the solver's.

        Raises:
            InputError: an unreadable, empty or over-long problem.
            BudgetInfeasible: the budget is too small; names the smallest that works.
        """
        chosen = self.task.example if problem is None else problem
        boundary = limited(self.boundary, max_depth, step_tokens, path_tokens)
        return Run(
            replace(self._setup, boundary=boundary), chosen, Request.of({"budget": budget})
        ).plan

    @property
    def config(self) -> dict[str, Any]:
        """Every setting but `unrecorded`, resolved; enough to build this solver again."""
        return self.setup.config

    @property
    def unrecorded(self) -> dict[str, Any]:
        """Settings that `config` leaves out: those of this machine, and trust. With both, a solver
        in another process is this one: ``Solver.from_config(config, **unrecorded)``.

        Raises:
            UsageError: the model is a ready one, or there are listeners; both live in this process.
        """
        source = self.checkpoint.source
        if not source.path:
            raise UsageError(
                "workers-model",
                "a ready model cannot be handed to other processes.",
                "Name its Hub id, or the directory where save_pretrained wrote it before its first search.",
            )
        if self.checkpoint.updated is not None:
            raise UsageError(
                "workers-model",
                "weights of update_weights cannot be handed to other processes.",
                "Save the trained model with save_pretrained, and name the directory.",
            )
        if self.listeners:
            raise UsageError(
                "workers-listeners",
                "listeners live in this process, and the searches would run in others.",
                "Leave listeners out, and read the traces of the searches.",
            )
        out = ("tokenizer", "listeners")
        return {name: each for name, each in self.setup.unrecorded.items() if name not in out}

    # Solving

    def solve(self, problem: str | Problem, **options: Unpack[Options]) -> Solution:
        """Search one problem.

        Args:
            problem: as a user types it, or parsed.
            options: the fields of `Request`: ``expected``, ``budget``, ``seed``, ``timeout``,
                ``max_tokens``, ``first``, ``confidence``, ``trace``, ``trace_level``, ``recorded``.

        Raises:
            InputError, BudgetInfeasible, ModelError: before the search begins.
            UsageError: an invalid option, a problem of another type, or a search of this solver
                already runs in this thread.
            BudgetInfeasible, OutOfMemory: also during the search, where a policy of your own gives
                up too little, a question is longer than planned, or the machine runs out of
                memory; the error's data hold the best answer so far.
            Exception: from a listener; `StopSearch` only ends the search.
        """
        lend = partial(self._lend, since=self._last_stop)
        return Run(self._setup, problem, Request.of(options)).solve(lend)

    def stream(self, problem: str | Problem, **options: Unpack[Options]) -> SearchStream:
        """`solve`, event by event, for ``for`` and ``async for``; see `SearchStream`.

        Several may be open at once: one background thread searches up to 8 of them together, in one
        engine (`as_completed` says when one). They share the budget: it is set while the engine is
        idle, from the searches that wait then, and a ratio is of the sum of theirs. A search that
        needs more waits until the engine is idle again, and so do `solve` and batches. In lossy
        mode each keeps within its own part. Their trees are those of `solve`, one by one.
        """
        stream = self._stream(problem, options)
        self._start()
        return stream

    async def asolve(self, problem: str | Problem, **options: Unpack[Options]) -> Solution:
        """`solve` without blocking the event loop; cancelling it stops the search.

        Those that are awaited together are searched together, see `stream`.
        """
        self._refuse_itself(in_loop=True)
        stream = self._stream(problem, options, keeps_events=False)
        self._start_soon()
        return await stream.wait()

    def astream(self, problem: str | Problem, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """The events of `stream`, for ``async for``; leaving the loop early stops the search."""
        stream = self._stream(problem, options)
        self._start_soon()
        return aiter(stream)

    def _stream(
        self, problem: str | Problem, options: Options, *, keeps_events: bool = True
    ) -> SearchStream:
        """A stream that the worker has not been started for."""
        from arbor.run.stream import SearchStream

        self._refuse_fork()
        since = self._last_stop
        job = SearchJob(Run(self._setup, problem, Request.of(options)), keeps_events=keeps_events)
        self._worker.add(job)
        if self._last_stop is not since:
            job.stop(self._last_stop.status)
        return SearchStream(job, self._waiting)

    def _start(self) -> None:
        """Start the worker, for a thread that may compute with torch meanwhile."""
        from arbor.model.threads import keep_threads

        keep_threads()
        self._worker.start()

    def _start_soon(self) -> None:
        """Start the worker when the other tasks of this turn of the event loop have added theirs,
        so that the budget is that of all, and when torch is imported."""
        import asyncio  # takes long

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop
            self._start()
            return

        def start(imported: Future[None]) -> None:
            # without torch the worker starts all the same: it ends what waits with that error
            begin = self._worker.start if imported.exception() else self._start
            with suppress(RuntimeError):  # the loop is closed, and what waited in it
                loop.call_soon_threadsafe(begin)

        early_import("arbor.model.threads").add_done_callback(start)

    def imap(
        self,
        problems: Iterable[str | Problem],
        *,
        concurrency: int = 1,
        ordered: bool = True,
        on_error: OnError = "raise",
        **options: Unpack[Options],
    ) -> Iterator[Solution]:
        """Solve many problems, several at a time in one engine, each when its solution is asked
        for.

        Args:
            problems: read `concurrency` ahead.
            concurrency: problems in progress at a time. They share the budget: a ratio is of the
                sum of theirs. In lossy mode each keeps within its own part of it, what it would
                have alone, and waits until that is free. Their trees are those of `solve`, one by
                one.
            ordered: solutions in the problems' order; else as they are found.
            on_error: ``return`` gives a solution with `error` where a problem cannot be solved; a
                bug is always raised.
            options: the same for every problem, so no ``trace``.
        """
        check_count("concurrency", concurrency)
        solving = partial(self.results, concurrency=concurrency)
        return each_solution(
            solving, self.failed, problems, options, ordered=ordered, on_error=on_error
        )

    def failed(
        self, problem: str | Problem, error: ArborError, options: Mapping[str, Any]
    ) -> Solution:
        """The solution of a problem that could not be solved because of an error."""
        try:
            request = Request.of(options)
        except ArborError:  # what it asks for cannot be
            request = Request()
        config = asked_config(self.setup, request)
        return failed_solution(self.task.name, problem, error, config)

    def as_completed(
        self,
        jobs: Iterable[tuple[str | Problem, Mapping[str, Any]] | None],
        *,
        concurrency: int | None = None,
        on_error: OnError = "raise",
        listen: Callable[[int, Event], None] | None = None,
    ) -> Generator[tuple[int, Solution], None, None]:
        """Solve many problems, several at a time in one engine, each with options of its own.

        Args:
            jobs: problems, and keyword arguments of `solve` for each (`Options`); read
                `concurrency` ahead. None where none is ready yet, while others are in progress: the
                next is asked for after a step of the engine.
            concurrency: as in `imap`; None: 8, or 1 where a search depends on what is searched next
                to it: in lossy mode with `staging` or similar prompts.
            on_error: as in `imap`.
            listen: called with the job's place, 0-based, and every event of its search.

        Yields:
            the job's place and its solution, as they are found. Closing the generator gives up what
            is in progress.

        Raises:
            UsageError: at once, for an invalid `concurrency` or `on_error`.
            ArborError: the first problem that cannot be solved, unless `on_error` is ``return``.
        """
        check_count("concurrency", concurrency)
        solving = partial(self.results, concurrency=concurrency, listen=listen)
        return solutions_of(solving, self.failed, jobs, on_error=on_error)

    def results(
        self,
        jobs: Iterable[tuple[str | Problem, Mapping[str, Any]] | None],
        *,
        concurrency: int | None = None,
        listen: Callable[[int, Event], None] | None = None,
        bugs: Literal["raise", "return"] = "raise",
    ) -> Generator[tuple[int, Solution | ArborError], None, None]:
        """`as_completed` with the error itself that ended a search in place of its solution.

        Nothing begins before the first is asked for; a `stop` after this call ends it all the same.

        Args:
            jobs, concurrency, listen: as in `as_completed`.
            bugs: ``return`` makes an internal error in one search that search's `SearchBug`, and
                the others go on.
        """
        at_once = check_count("concurrency", concurrency) or self.setup.at_once
        if bugs not in ("raise", "return"):
            message = f"unknown bugs {bugs!r:.60}."
            raise UsageError("setting-choice", message, "Known: raise, return.", setting="bugs")
        since = self._last_stop

        def results() -> Generator[Found, None, None]:
            batch = Batch(self._setup, jobs, at_once, listen)

            def found() -> Generator[Found, None, None]:
                engine = self.engine
                begin = batch.searches(engine)
                for search in as_completed(engine, begin, at_once, batch.begun):
                    batch.over(search.place)
                    if isinstance(search.error, ArborError):
                        yield search.place, search.error
                    elif isinstance(search.error, Exception) and bugs == "return":
                        yield search.place, SearchBug(search.error)
                    elif search.error is not None:
                        raise search.error
                    else:
                        assert search.result is not None
                        yield search.place, search.result

            def searched() -> Generator[Found, None, None]:
                with self._held(batch, since) as in_thread:
                    yield from each_within(in_thread, found())

            yield from batch.results(searched)

        return results()

    def solve_batch(
        self,
        problems: Iterable[str | Problem],
        *,
        concurrency: int | None = None,
        on_error: OnError = "raise",
        **options: Unpack[Options],
    ) -> list[Solution]:
        """`imap`, all at once: `concurrency` of them in progress at a time; None: as in
        `as_completed`."""
        at_once = check_count("concurrency", concurrency) or self.setup.at_once
        return list(self.imap(problems, concurrency=at_once, on_error=on_error, **options))

    def rollouts(
        self,
        problems: Iterable[str | Problem],
        *,
        group: int = 1,
        concurrency: int | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Rollout]:
        """Finished trees for training, in the problems' order: tokens, and their log probabilities.

        Args:
            problems: read `concurrency` ahead.
            group: trees for each problem, one after another. Every tree has a seed of its own,
                from `seed` on, so that no two draw with the same random numbers.
            concurrency: as in `as_completed`.
            options: the same for every problem, so no ``trace``.

        Raises:
            UsageError: at once, for one problem instead of several, a trace that all would write,
                or where tokens are not drawn from the model's own distribution (`Rollout`).
            ArborError: the first problem that cannot be searched.
        """
        check_count("group", group)
        refuse_rollouts(self.setup)
        one_by_one = several(problems)
        options["trace_level"] = "tokens"
        Request.of(options)  # refuses what it cannot be before anything is searched
        first = self.seed if (seed := options.get("seed")) is None else seed
        folds: dict[int, RolloutFold] = defaultdict(RolloutFold)
        given: dict[int, str | Problem] = {}

        def solving(
            jobs: Iterable[Job | None],
        ) -> Generator[tuple[int, Solution | ArborError], None, None]:
            def seeded() -> Iterator[Job]:
                for place, (problem, each) in enumerate(filter(None, jobs)):
                    given[place] = problem
                    yield problem, {**each, "seed": first + place}

            def listen(place: int, event: Event) -> None:
                folds[place](event)

            return self.results(seeded(), concurrency=concurrency, listen=listen)

        grouped = (problem for problem in one_by_one for _ in range(group))
        solutions = each_solution(
            solving, self.failed, grouped, options, ordered=True, on_error="raise"
        )

        def found() -> Iterator[Rollout]:
            for place, solution in enumerate(solutions):
                run = Run(self._setup, given.pop(place), Request.of(options))
                yield folds.pop(place).rollout(run.task, run.problem, run.prompt, solution)

        return found()

    @known_keywords("a generation")
    def generate(
        self,
        prompt: str,
        *,
        beams: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["first", "heuristic", "never"] = "heuristic",
        groups: int = 1,
        diversity: float = 0.0,
        budget: float | str | Budget | None = None,
        chat: bool = True,
    ) -> list[Continuation]:
        """Token-level beam search: the continuations that are most probable as a whole.

        The result is that of transformers' ``generate(num_beams=beams, do_sample=False)``; every
        fork shares its KV.

        Args:
            prompt: one user message where the tokenizer has a chat template, else text to continue.
            beams: hypotheses that go on at each step, and continuations returned.
            max_tokens: tokens of the longest continuation.
            length_penalty, early_stopping, groups, diversity: see `BeamSettings`.
            budget: slots, instead of the solver's; a ratio is a part of the prompt and `max_tokens`
                of every beam.
            chat: whether the chat template is used.

        Returns:
            `beams` continuations, best first; fewer where there are no more, or after `stop`.

        Raises:
            UsageError, InputError, ModelError, BudgetInfeasible: before the search begins.
            BudgetInfeasible: also where the beams hold more tokens than the budget.
        """
        settings = checked_beams(
            {
                "beams": beams,
                "max_tokens": max_tokens,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "groups": groups,
                "diversity": diversity,
            }
        )
        slots = self.setup.budget if budget is None else Budget.parse(budget)
        since = self._last_stop
        generation = Generation(self.checkpoint, prompt, settings, slots, self.setup, chat=chat)
        with self._lend(generation, since) as engine:
            return generation.run(engine, self.eos)

    def logprobs(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[TokenScores | None]:
        """The log probability of given tokens after given tokens; no search.

            before, yes, no = map(solver.tokenizer.encode, ("2 + 2 = 4.", " yes", " no"))
            scores = solver.logprobs([(before, yes), (before, no)])
            print(scores[0].total, scores[1].total)

        What texts begin with alike is computed once.

        Args:
            pairs: (token ids before, token ids to score), at least one of each.

        Returns:
            the scores of each, in their order; None for those that `stop` left out.

        Raises:
            InputError, UsageError, ModelError: before anything is computed.
        """
        lend = partial(self._lend, since=self._last_stop)
        return TokenScoring(self.checkpoint, pairs).run(lend)

    def shared(self, at_once: int, tokens: int | None = None) -> SharedEngine:
        """This solver's engine for searches with settings of their own, as they arrive.

        `solve`, batches and streams of the solver wait while any is in progress.

        Args:
            at_once: most of them in progress at a time; one where a search depends on what is
                searched next to it (`as_completed`).
            tokens: of KV, for all of them; None: as many as their budgets need.
        """
        most = at_once if self.setup.at_once > 1 else 1
        shared = SharedEngine(self._setup, self._lend, self._contended, most, tokens)
        self._shared.append(weakref.ref(shared.worker, self._shared.remove))
        return shared

    def stop(self, status: Status = "interrupted") -> None:
        """End the search in progress, or all of them, after the current forward.

        What was asked for and waits, or still reads the model, ends as soon as it begins. Safe from
        a signal handler or another thread.
        """
        self._last_stop = _Stop(status)
        run = self._run  # read once, after that: the search may begin or end meanwhile
        if run is not None:
            run.stop(status)
        for worker in (self._worker, *(each() for each in list(self._shared))):
            if worker is not None:
                worker.stop(status)

    # One run

    @property
    def _setup(self) -> Setup:
        return replace(self.setup, listeners=tuple(self.listeners))

    @contextmanager
    def _lend(
        self,
        run: Run | Batch | SearchWorker | Generation | TokenScoring,
        since: _Stop | None = None,
    ) -> Iterator[Engine]:
        """The engine, loaded, for one run at a time, or for several that share it.

        Args:
            run: that is stopped where `stop` was called after `since`.
            since: the last call when the run was asked for; None: it knows of later ones.

        Raises:
            UsageError: this thread is in the middle of a run already.
        """
        with self._held(run, since) as in_thread, in_thread():
            yield self.engine

    @contextmanager
    def _held(
        self,
        run: Run | Batch | SearchWorker | Generation | TokenScoring,
        since: _Stop | None,
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """The engine is held as in `_lend`, for a run that goes on in any thread within the context
        that is given; the last of them is the one that would wait for itself."""
        from arbor.model.threads import torch_threads

        self._refuse_fork()
        self._refuse_itself()
        held = False
        try:
            with self.checkpoint.use.waiting(), self._next:
                held = self._busy.acquire()
            self._thread = threading.current_thread()
            self._run = run
            if since not in (None, self._last_stop):
                run.stop(self._last_stop.status)
            threads = self._threads()
            with self.checkpoint.use.reading() as reading:

                @contextmanager
                def in_thread() -> Iterator[None]:
                    self._thread = reading.thread = threading.current_thread()
                    with torch_threads(threads):
                        yield

                yield in_thread
        except (Exception, GeneratorExit):
            raise
        except BaseException as interruption:  # it may have come where no search could end
            if held and (engine := self._engine) is not None:
                engine.abandon(interruption)
            raise
        finally:
            if held:
                self._run = self._thread = None
                self._busy.release()
                self._give_back()

    def _contended(self) -> bool:
        """Whether no search may begin in the engine: another thread waits for it, or to change the
        weights, or the model was closed."""
        engine, checkpoint = self._engine, self.checkpoint
        closed = engine is None or not checkpoint.has(engine.runner)
        return closed or self._next.locked() or checkpoint.use.is_due

    @contextmanager
    def _waiting(self, in_loop: bool) -> Iterator[None]:
        """While it lasts, this thread waits for a stream, which may begin before new weights do if
        the thread is in a loop that reads the former ones.

        Args:
            in_loop: an event loop waits, in which another task may go on with a batch.

        Raises:
            UsageError: the thread would wait for itself.
        """
        self._refuse_fork()
        self._refuse_itself(in_loop)
        with self.checkpoint.use.waiting():
            yield

    def _refuse_itself(self, in_loop: bool = False) -> None:
        """Refuses a thread that would wait for itself: it searches, or replaces the weights.

        Args:
            in_loop: see `_waiting`.
        """
        run = self._run
        between_steps = isinstance(run, Batch) and not run.in_step
        searches = self._thread is threading.current_thread() and not (in_loop and between_steps)
        if searches or self.checkpoint.use.is_written_here:
            raise _busy()

    def _refuse_fork(self) -> None:
        """Refuses a fork of the process that first used the engine.

        The threads that search, hold locks or belong to torch are in that process alone.
        """
        here = os.getpid()
        if self._process not in (None, here):
            raise UsageError(
                "solver-process",
                "this process is a fork of the one that used this solver, and lacks its threads.",
                "Begin processes by 'spawn', as multiprocessing.get_context('spawn') does, and "
                "make a Solver in each.",
            )
        self._process = here

    def _computing(self) -> AbstractContextManager[None]:
        """The solver's number of torch threads, in this thread."""
        from arbor.model.threads import torch_threads

        return torch_threads(self._threads())

    def _threads(self) -> int | None:
        """The number of torch threads, see `thread_count`."""
        from arbor.model.threads import thread_count

        models = [
            self.describe(),
            *(each.describe() for each in self.setup.verifier_models.values()),
        ]
        largest = max(models, key=lambda info: info.parameters)
        return thread_count(self.setup.threads, largest, self.setup.tp)


def _busy() -> UsageError:
    return UsageError(
        "solver-busy",
        "a listener, task, verifier or controller of this search asked its own solver for another "
        "search or new weights, or a loop over a batch or an iterator of new weights did.",
        "Use another Solver there, or ask after the search.",
    )
