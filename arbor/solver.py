"""Solver: one object that owns a model and its settings; one call solves a problem."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from arbor import components
from arbor.aggregate.base import Aggregate
from arbor.budget import Budget, Plan
from arbor.controllers.base import Controller
from arbor.engine.hooks import BranchHook, PromptHook
from arbor.engine.mode_names import SHARE_THRESHOLD, SIMILAR, Mode, Rehydrate, Share, default_policy
from arbor.errors import ArborError, SearchBug, UsageError
from arbor.events import Event, Listener
from arbor.feature import hook
from arbor.model.checkpoint import Checkpoint
from arbor.model.fetch_costs import FetchCosts
from arbor.model.level_rule import LevelRule
from arbor.model.model_info import ModelInfo
from arbor.model.names import check_device_map
from arbor.model.sampling_params import Sampling
from arbor.retention.base import Allocator
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.batch import Batch
from arbor.run.breadth import with_breadth
from arbor.run.component_checks import resolve_component
from arbor.run.config import read_config, refuse_trust
from arbor.run.each_solution import OnError, each_solution
from arbor.run.generation import Continuation, Generation, checked_beams
from arbor.run.job import SearchJob
from arbor.run.keep_kv import DEFAULT_SIZE, KeepKV
from arbor.run.limits import (
    RunLimits,
    check_count,
    check_destroying,
    check_granularity,
    check_packing,
    check_seed,
)
from arbor.run.planning import check_proposals
from arbor.run.plugin_answers import check_boundary
from arbor.run.recording import MOST_BYTES
from arbor.run.request import Options, Request
from arbor.run.run import Run
from arbor.run.scoring import Scoring
from arbor.run.searches import as_completed
from arbor.run.settings import (
    KV_PROBE,
    check_calibration,
    check_fetch,
    check_kv_probe,
    check_plain_types,
    hook_for,
    known_keywords,
    refuse_unknown,
    resolve_boundary,
    resolve_branch_stop,
    resolve_mode,
    resolve_msve,
    resolve_sampling,
    resolve_share,
    resolve_tiers,
    resolve_verifier,
)
from arbor.run.setup import Setup
from arbor.run.shared_engine import SharedEngine
from arbor.run.solution import Solution, failed_solution
from arbor.run.worker import Worker
from arbor.tasks.base import Problem, Task
from arbor.verifiers.base import OwnsModel, Placement, Verifier, VerifierModel, parts_of

if TYPE_CHECKING:
    import torch

    from arbor.engine.engine import Engine
    from arbor.engine.likelihood import TokenScores
    from arbor.memory.prompt_files import PromptFiles
    from arbor.memory.stores import LowerRoom
    from arbor.model.int8_weights import WeightRounding
    from arbor.model.runner import ModelRunner
    from arbor.run.session import Status
    from arbor.run.stream import SearchStream

logger = logging.getLogger(__name__)

# Settings in a configuration file that are not a solver's: of one run, and of ``arbor eval``.
RUN_SETTINGS = ("problem", "expected", *RunLimits.__annotations__, "trace", "trace_level")
# fmt: off
EVALUATION_SETTINGS = (
    "arbor", "dataset", "split", "input_key", "target_key", "encoding", "limit", "sample_id",
    "on_error", "trace_text", "grader_version", "model_content", "prompt_version",
)
# fmt: on


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
            `tokenizer` too). `load` changes a ready model in place: its attention becomes arbor's,
            and on a CPU the weights of its linear layers are packed. It can then neither generate
            by itself nor be saved.
        tokenizer: for a ready model.
        revision: branch, tag or commit of a model of the Hub; by default its main branch.
        trust_remote_code: run the Python code in a model's repository; never part of a
            configuration, so that nobody trusts by accident.
        adapter: LoRA weights of peft, a directory or a Hub id, merged into the model's when it is
            loaded; needs ``arbor-search[adapters]``.
        task, controller, verifier: a name, perhaps with settings (``tot,beam=3``), a table
            (``{"name": "tot", "beam": 3}``), or a ready component.
        aggregate: what chooses the answer among the finished paths, likewise: ``best`` (the best
            path's), ``argmax``, ``majority`` or ``weighted``.
        budget: the part kept of what full retention of the same search holds, in (0, 1], and one
            expansion in any case; or ``8192tok``, ``6GiB``; ``full``. See docs/budget.md.
        policy: what blocks off the running paths keep on the device: likewise a name, a table or a
            ready policy; an allocator alone stands for `Policy(allocator)`. By default ``reentry``,
            and ``ends`` in lossy mode where nothing comes back.
        mode: ``lossless``: the result is full retention's at any budget; ``lossy``: tokens of
            running paths may leave too.
        rehydrate: ``selective``: missing tokens come back; ``span``: whole blocks do; ``off``:
            nothing does (only in lossy mode, where it is the default).
        host: host memory for KV that has left the device, ``8GiB`` or ``20000tok``: what comes back
            from there is copied, not computed again (docs/tiers.md). By default none.
        host_bits: of a number there, 8, 4 or 2; by default those of the model. Only in lossy mode.
        staging: size of a buffer in the budget through which attention reads KV in host memory
            where it is, ``64tok`` or ``1MiB``: a path may then be longer than the budget
            (docs/tiers.md). Nothing is shared between prompts and siblings then. By default none:
            KV is copied back before it is read.
        disk: room on disk for what the host has no room for, likewise.
        disk_dir: the folder of that file; by default the system's for temporary files. Never part
            of a configuration.
        fetch: when KV in a lower tier is copied back rather than computed again: ``auto``, where
            that is faster, as measured once for this model on this machine; ``always``; or the
            numbers of a measurement.
        keep_kv: a folder in which the KV of prompts outlives the run, so that later runs with this
            model load the beginnings they have in common instead of computing them
            (docs/tiers.md). By default none. Never part of a configuration.
        keep_kv_size: most bytes in that folder; what was used least recently goes first.
        share: which first tokens use the same KV. In lossless mode equal ones: ``exact``, those of
            prompts and of siblings; ``prompts``, those of prompts; ``off``, none. In lossy mode
            ``similar``: a prompt is replaced by an earlier one whose hidden states are similar;
            ``audit``: likewise, and the problem is also searched from its own prompt
            (docs/tiers.md).
        share_threshold: the least similarity.
        kv_probe: from how many rows on a shared span is read once for all of them: ``kept``, as
            was measured for this model on this machine, if it was; ``measure``: now; ``off``: by a
            fixed rule, as always if `deterministic`; or the numbers of a measurement (``8,4,2``).
        msve: block values for the policies that read them: an `MSVE`, its numbers (``2,1,1,-2``),
            or a file of ``arbor calibrate``; by default the model directory's ``msve.json``, the
            values that ``arbor calibrate`` kept for this revision of a Hub model, or `MSVE()`.
        sampling: how tokens are chosen; a mapping changes some of the defaults, which are those of
            the model's `generation_config.json` if it samples, else those of `Sampling`.
        max_depth, path_tokens, step_tokens: override the task's thoughts per path, tokens per path
            (the prompt not counted) and tokens per thought.
        max_expansions: leaves grown in all.
        step_format: what every thought has to match: ``regex:PATTERN``, ``json:SCHEMA``,
            ``json:FILE`` or a JSON schema as a mapping; needs ``arbor-search[structured]``.
        branch_stop: a `BranchStop` or its text, by which blocks of one expansion end early where
            one of them is confident (docs/papers/rksc.md); None: never.
        dtype, device: ``auto`` is the dtype of the weights, and CUDA where there is a GPU; a ready
            model keeps its own.
        kv_dtype: ``int8`` keeps K and V in 8 bits, rounded once when a token is written: lossy, and
            up to nearly four times the tokens in the same bytes (CPU only; docs/cpu.md).
            ``auto`` is the model's dtype.
        weights: ``int8`` keeps the weights of linear layers in 8 bits with a scale for each 64,
            rounded once when the model is loaded: lossy (CPU only; docs/cpu.md). ``auto``
            keeps them as they are.
        backend: what computes attention: ``auto``, ``native`` (CPU), ``torch``, ``flashinfer``
            (CUDA), ``rowwise``, ``invariant`` (CUDA), ``reference``, a plugin. ``auto`` is the
            native kernels on a CPU and FlashInfer on CUDA, where they are installed and compute
            the model, else torch; if `deterministic`, ``invariant`` on CUDA, and ``rowwise`` on a
            CPU without the native kernels.
        threads: CPU threads of torch while this solver loads or searches; then torch's number is
            restored. By default one for models below 50 million parameters, whose threads would
            mostly wait, unless ``OMP_NUM_THREADS`` is set; torch's own number for a larger one.
        seed: of every random stream.
        deterministic: results do not depend on the rest of the batch, to the last bit, or the model
            is refused (no mixtures of experts). The native kernels of a CPU need no request for
            that; elsewhere it is slower; see docs/budget.md.
        cuda_graphs: on a GPU with FlashInfer, decode steps are captured and replayed where that
            gives the same logits up to rounding.
        device_map: refused by name: a model lies on one device (docs/compatibility.md).
        listeners: functions or `Callback`s, called with every event in order. An exception in one
            ends the run; `StopSearch` ends the search with its best so far.
        record_bytes: most bytes of memory in which a solution keeps the packed events of a search
            without a trace, for `Solution.show`, `replay` and `to_html`; 0 keeps none.
        debug: poison freed KV with NaN and check every invariant after every change (slow).

    Raises:
        UsageError, UnknownName, BudgetRange, ModelError: an invalid setting; nothing was loaded.
    """

    @known_keywords("the solver")
    def __init__(
        self,
        model: str | os.PathLike[str] | Any = "builtin:sapling",
        *,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        task: str | Mapping[str, Any] | Task = "game24",
        controller: str | Mapping[str, Any] | Controller = "tot",
        verifier: str | Mapping[str, Any] | Verifier = "self",
        aggregate: str | Mapping[str, Any] | Aggregate = "best",
        budget: float | str | Budget = "full",
        policy: str | Mapping[str, Any] | Policy | Allocator | None = None,
        mode: Mode = "lossless",
        rehydrate: Rehydrate | None = None,
        host: str | int | None = None,
        host_bits: int | None = None,
        staging: str | int | None = None,
        disk: str | int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        fetch: str = "auto",
        keep_kv: str | os.PathLike[str] | None = None,
        keep_kv_size: str | int = DEFAULT_SIZE,
        share: Share = "exact",
        share_threshold: float = SHARE_THRESHOLD,
        kv_probe: str = "kept",
        msve: MSVE | str | os.PathLike[str] | None = None,
        sampling: Sampling | Mapping[str, float] | None = None,
        max_depth: int | None = None,
        path_tokens: int | None = None,
        step_tokens: int | None = None,
        max_expansions: int | None = None,
        step_format: str | Mapping[str, Any] | None = None,
        branch_stop: BranchHook | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kv_dtype: str = "auto",
        weights: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        seed: int = 0,
        deterministic: bool = False,
        cuda_graphs: bool = True,
        device_map: None = None,
        listeners: Sequence[Listener] = (),
        record_bytes: int = MOST_BYTES,
        debug: bool = False,
    ) -> None:
        check_device_map(device_map)
        self.task: Task = resolve_component("task", task, Task)
        chosen = with_breadth(controller, self.task)
        self.controller: Controller = resolve_component("controller", chosen, Controller)
        self.verifier: Verifier = resolve_component("verifier", verifier, Verifier)
        self.aggregate: Aggregate = resolve_component("aggregate", aggregate, Aggregate)
        self.budget = Budget.parse(budget)
        self.mode, self.rehydrate = resolve_mode(mode, rehydrate)
        if policy is None:
            policy = default_policy(self.mode, self.rehydrate)
        self.policy: Policy = resolve_component("policy", policy, Policy)
        check_calibration(self.policy)
        check_destroying(self.policy, self.mode, self.rehydrate)
        self.lower = resolve_tiers(
            host,
            disk,
            disk_dir,
            self.rehydrate,
            host_bits=host_bits,
            staging=staging,
            mode=self.mode,
            kv_dtype=kv_dtype,
        )
        check_granularity(self.policy, self.mode, staged=self.lower.staging is not None)
        check_packing(self.policy, host_bits, self.lower.staging is not None)
        self.fetch = check_fetch(fetch)
        self.keep_kv = KeepKV.parse(keep_kv, keep_kv_size, self.mode)
        self.share = resolve_share(share, share_threshold, mode, rehydrate)
        if self.lower.staging is not None:
            self.share = "off"
            if self.keep_kv is not None:
                raise UsageError(
                    "staging",
                    "a prompt that is loaded from --keep-kv has to fit on the device as a whole.",
                    "Leave out --staging, or --keep-kv.",
                )
        self.share_threshold = float(share_threshold)
        self.kv_probe = check_kv_probe(kv_probe)
        if isinstance(sampling, Mapping):
            resolve_sampling(sampling)  # refuses invalid settings before anything loads
        self._sampling = sampling
        self.boundary = resolve_boundary(
            check_boundary(self.task), max_depth, step_tokens, step_format, path_tokens
        )
        check_proposals(self.task, self.controller, self.boundary)
        self.branch_stop = resolve_branch_stop(branch_stop, self.mode)
        self.max_expansions = check_count("max_expansions", max_expansions)
        self.threads = check_count("threads", threads)
        self.seed = check_seed(seed)
        self.listeners = tuple(listeners)
        self.record_bytes = check_count("record_bytes", record_bytes, least=0) or 0
        self.debug = debug
        self.checkpoint = Checkpoint(
            model,
            tokenizer,
            revision=revision,
            trust_remote_code=trust_remote_code,
            adapter=adapter,
            dtype=dtype,
            device=device,
            backend=backend,
            deterministic=deterministic,
            cuda_graphs=cuda_graphs,
            kv_dtype=kv_dtype,
            weights=weights,
        )
        placement = Placement(device, backend, deterministic, debug)
        self.verifier_models: dict[Verifier, VerifierModel] = {
            part: part.own_model(placement)
            for part in parts_of(self.verifier)
            if isinstance(part, OwnsModel)
        }
        source = self.checkpoint.source
        if self.keep_kv is not None and not source.path:
            raise UsageError(
                "keep-kv",
                "no files identify the weights of a ready model.",
                "Name its directory or Hub id, or leave keep_kv out.",
            )
        self.msve = resolve_msve(msve, source)
        self.verifier = resolve_verifier(self.verifier, self.task, source)
        self._engine: Engine | None = None
        self._loading = threading.Lock()
        # the search in progress, or several
        self._run: Run | Batch | Worker | Generation | Scoring | None = None
        self._busy = threading.Lock()  # held by it
        self._next = threading.Lock()  # held by the thread that has `_busy` next
        self._thread: int | None = None  # in which it runs
        self._worker = Worker(self._at_once, self._lend, self._next.locked)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any
    ) -> Self:
        """The solver of a configuration: a trace header's, a solution's, or a TOML file.

        Settings of one run (a problem, its answer key, limits) and of ``arbor eval`` (a dataset)
        are ignored. ``arbor trace config`` writes such a file.

        Raises:
            UsageError: an unknown setting, or the configuration sets `trust_remote_code`: pass
                ``trust_remote_code=True`` as an argument instead.
        """
        read = read_config(config) if isinstance(config, str | os.PathLike) else config
        refuse_trust(read, "the configuration")
        settings = {**read, **overrides}
        for name in (*RUN_SETTINGS, *EVALUATION_SETTINGS):
            settings.pop(name, None)
        known = inspect.signature(cls).parameters | inspect.signature(Solver).parameters
        refuse_unknown("the solver", settings, known)
        check_plain_types(read)
        sampling = settings.get("sampling")
        if isinstance(sampling, Mapping):
            settings["sampling"] = resolve_sampling(sampling)
        return cls(**settings)

    def __repr__(self) -> str:
        names = {
            kind: components.spec_of(getattr(self, kind))["name"]
            for kind in ("task", "controller", "verifier", "policy")
        }
        named = ", ".join(f"{kind}={name!r}" for kind, name in names.items())
        return (
            f"{type(self).__name__}({self.checkpoint.source.name!r}, {named}, "
            f"budget={str(self.budget)!r}, mode={self.mode!r}, seed={self.seed})"
        )

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
        """Free the model and its KV; streams in progress end after the current forward."""
        self._worker.stop()
        self._engine = None
        self.checkpoint.close()
        for model in self.verifier_models.values():
            model.close()

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
        return self._setup.sampling

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
        from arbor.engine.engine import Engine
        from arbor.memory.pool import bytes_per_token
        from arbor.memory.stores import LowerRoom
        from arbor.model.runner import StagedBackend

        with self._loading:
            if self._engine is None:
                with self._computing():
                    runner = self.checkpoint.load().runner
                    companions = [model.load() for model in self.verifier_models.values()]
                    prompts = self._prompt_files(runner)
                kv_bytes = bytes_per_token(runner.layer_kv, runner.kv_dtype)
                tokens = self.lower.tokens(kv_bytes, runner.kv_dtype.itemsize)
                staging = self.lower.staging_tokens(kv_bytes)
                if staging and isinstance(runner.backend, StagedBackend):
                    raise UsageError(
                        "staging",
                        f"the backend '{self.checkpoint.load().backend}' plans a forward as a whole, "
                        "and --staging computes it in chunks.",
                        "Use --backend torch.",
                    )
                room = LowerRoom(
                    *tokens,
                    self.lower.disk_dir,
                    self.lower.host_bits,
                    staging,
                    inexact=bool(staging) and self.mode == "lossy",
                )
                self._engine = Engine(
                    runner,
                    self.tokenizer,
                    policy=self.policy,
                    mode=self.mode,
                    rehydrate=self.rehydrate,
                    share=self.share,
                    prompt_hook=self._prompt_hook(runner),
                    msve=self.msve,
                    levels=self._levels(runner),
                    lower=room,
                    prompts=prompts,
                    costs=self._costs(runner, room),
                    debug=self.debug,
                )
                self._engine.companions = tuple(companions)
            return self._engine

    def _prompt_hook(self, runner: ModelRunner) -> PromptHook | None:
        """What says whether a search reads another prompt than its own."""
        if self.share not in SIMILAR:
            return None
        found: PromptHook = hook_for("share", self.share)(
            runner, self.tokenizer, self.share_threshold
        )
        return found

    def _levels(self, runner: ModelRunner) -> LevelRule:
        """Which shared spans rows read together."""
        from arbor.model.plan import least_saved_reads

        fixed = LevelRule(least_saved_reads(self.device))
        if self.deterministic or self.kv_probe == "off":
            return fixed
        if self.kv_probe not in KV_PROBE:
            rule = LevelRule.parse(self.kv_probe)
        else:
            source = self.checkpoint.source.name, self.checkpoint.load().backend
            measured = hook("kv_probe")
            rule = (measured and measured(self.kv_probe, runner, *source)) or fixed
        if rule.least_rows:
            logger.info("KV probe: rows from which shared spans are read once: %s", rule)
        return rule

    def _costs(self, runner: ModelRunner, room: LowerRoom) -> FetchCosts | None:
        """What fetching and recomputing take; None: what can be fetched is."""
        if not self.lower or self.fetch == "always":
            return None
        if self.fetch != "auto":
            return FetchCosts.parse(self.fetch)
        from arbor.model.fetch_probe import costs_for

        checkpoint = self.checkpoint
        costs = costs_for(runner, room, checkpoint.source.name, checkpoint.load().backend)
        logger.info("costs of fetching and recomputing, in microseconds: %s", costs)
        return costs

    def _prompt_files(self, runner: ModelRunner) -> PromptFiles | None:
        """KV of prompts of earlier runs with this model."""
        if self.keep_kv is None:
            return None
        from arbor.memory.prompt_files import PromptFiles
        from arbor.model.kv_identity import kv_identity

        checkpoint = self.checkpoint
        backend = checkpoint.load().backend
        identity = kv_identity(runner, checkpoint.source, backend, deterministic=self.deterministic)
        if identity is None:
            logger.warning("no KV is kept: the commit of %s is not known", checkpoint.source.label)
            return None
        return PromptFiles(self.keep_kv.folder, identity, self.keep_kv.limit)

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
        """Whether it is required that tokens are the same, bit for bit, in every batch."""
        return self.checkpoint.deterministic

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
        boundary = resolve_boundary(self.boundary, max_depth, step_tokens, path_tokens=path_tokens)
        return Run(replace(self._setup, boundary=boundary), chosen, Request(budget=budget)).plan

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, resolved; enough to build this solver again."""
        return self._setup.config

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
                "Save it with save_pretrained and name the directory, or name its Hub id.",
            )
        if self.listeners:
            raise UsageError(
                "workers-listeners",
                "listeners live in this process, and the searches would run in others.",
                "Leave listeners out, and read the traces of the searches.",
            )
        keep = self.keep_kv
        return {
            "device": self.checkpoint.asked_device,
            "threads": self.threads,
            "disk_dir": None if self.lower.disk_dir is None else self.lower.disk_dir.absolute(),
            "keep_kv": None if keep is None else keep.folder.absolute(),
            **({} if keep is None else {"keep_kv_size": f"{keep.limit}B"}),
            "trust_remote_code": source.trust_remote_code,
            "record_bytes": self.record_bytes,
            "debug": self.debug,
        }

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
        return Run(self._setup, problem, Request.of(options)).solve(self._lend)

    def stream(self, problem: str | Problem, **options: Unpack[Options]) -> SearchStream:
        """`solve`, event by event, for ``for`` and ``async for``; see `SearchStream`.

        Several may be open at once: one background thread searches up to 8 of them together, in one
        engine (`as_completed` says when one). They share the budget: it is set while the engine is
        idle, from the searches that wait then, and a ratio is of the sum of theirs. A search that
        needs more waits until the engine is idle again, and so do `solve` and batches. In lossy
        mode each keeps within its own part. Their trees are those of `solve`, one by one.
        """
        stream = self._stream(problem, options)
        self._worker.start()
        return stream

    async def asolve(self, problem: str | Problem, **options: Unpack[Options]) -> Solution:
        """`solve` without blocking the event loop; cancelling it stops the search.

        Those that are awaited together are searched together, see `stream`.
        """
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
        from arbor.model.threads import keep_threads
        from arbor.run.stream import SearchStream

        keep_threads()
        job = SearchJob(Run(self._setup, problem, Request.of(options)), keeps_events=keeps_events)
        self._worker.add(job)
        return SearchStream(job, self._refuse_waiting)

    def _start_soon(self) -> None:
        """Start the worker when the other tasks of this turn of the event loop have added theirs,
        so that the budget is that of all."""
        import asyncio  # takes long

        try:
            asyncio.get_running_loop().call_soon(self._worker.start)
        except RuntimeError:  # no event loop
            self._worker.start()

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
        solving = partial(self.as_completed, concurrency=concurrency)
        return each_solution(
            solving, self.failed, problems, options, ordered=ordered, on_error=on_error
        )

    def failed(self, problem: str | Problem, error: ArborError, options: Options) -> Solution:
        """The solution of a problem that could not be solved because of an error."""
        seed = options.get("seed")
        seed = self.seed if seed is None else seed
        return failed_solution(self.task.name, problem, error, seed, self.config)

    def as_completed(
        self,
        jobs: Iterable[tuple[str | Problem, Options] | None],
        *,
        concurrency: int | None = None,
        listen: Callable[[int, Event], None] | None = None,
        bugs: Literal["raise", "return"] = "raise",
    ) -> Generator[tuple[int, Solution | ArborError], None, None]:
        """Solve many problems, several at a time in one engine, each with options of its own.

        Args:
            jobs: problems, and keyword arguments of `solve` for each; read `concurrency` ahead.
                None where none is ready yet, while others are in progress: the next is asked for
                after a step of the engine.
            concurrency: as in `imap`; None: 8, or 1 where a search depends on what is searched next
                to it: in lossy mode with `staging` or similar prompts.
            listen: called with the job's place, 0-based, and every event of its search.
            bugs: ``return`` makes an internal error in one search that search's `SearchBug`, and
                the others go on.

        Yields:
            the job's place, and its solution or the error that ended it, as they are found. Closing
            the generator gives up what is in progress.
        """
        at_once = check_count("concurrency", concurrency) or self._at_once
        source = iter(jobs)
        first = list(islice(source, at_once))
        ready = [job for job in first if job is not None]
        batch = Batch(self._setup, ready, source, listen, several=len(first) > 1)
        with self._lend(batch) as engine:
            for search in as_completed(engine, batch.searches(engine), at_once):
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
        at_once = check_count("concurrency", concurrency) or self._at_once
        return list(self.imap(problems, concurrency=at_once, on_error=on_error, **options))

    @property
    def _at_once(self) -> int:
        """Searches in progress at a time, by default."""
        return self._setup.at_once

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
            `beams` continuations, best first; those so far after `stop`.

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
        slots = self.budget if budget is None else Budget.parse(budget)
        generation = Generation(self.checkpoint, prompt, settings, slots, chat=chat)
        with self._lend(generation) as engine:
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
        return Scoring(self.checkpoint, pairs).run(self._lend)

    def shared(self, at_once: int, tokens: int | None = None) -> SharedEngine:
        """This solver's engine for searches with settings of their own, as they arrive.

        `solve`, batches and streams of the solver wait while any is in progress.

        Args:
            at_once: most of them in progress at a time; one where a search depends on what is
                searched next to it (`as_completed`).
            tokens: of KV, for all of them; None: as many as their budgets need.
        """
        most = at_once if self._at_once > 1 else 1
        return SharedEngine(self._setup, self._lend, self._next.locked, most, tokens)

    def stop(self, status: Status = "interrupted") -> None:
        """End the search in progress, or all of them, after the current forward.

        Safe from a signal handler or another thread.
        """
        run = self._run  # read once: the search may end meanwhile
        if run is not None:
            run.stop(status)

    # One run

    @property
    def _setup(self) -> Setup:
        return Setup(
            checkpoint=self.checkpoint,
            task=self.task,
            controller=self.controller,
            verifier=self.verifier,
            aggregate=self.aggregate,
            branch_stop=self.branch_stop,
            policy=self.policy,
            budget=self.budget,
            mode=self.mode,
            rehydrate=self.rehydrate,
            lower=self.lower,
            fetch=self.fetch,
            share=self.share,
            share_threshold=self.share_threshold,
            kv_probe=self.kv_probe,
            msve=self.msve,
            boundary=self.boundary,
            given_sampling=self._sampling,
            max_expansions=self.max_expansions,
            seed=self.seed,
            listeners=tuple(self.listeners),
            record_bytes=self.record_bytes,
            verifier_models=self.verifier_models,
        )

    @contextmanager
    def _lend(self, run: Run | Batch | Worker | Generation | Scoring) -> Iterator[Engine]:
        """The engine, loaded, for one run at a time, or for one batch of runs.

        Raises:
            UsageError: this thread is in the middle of a run already.
        """
        if self._thread == threading.get_ident():
            raise _busy()
        held = False
        try:
            with self._next:
                held = self._busy.acquire()
            self._thread = threading.get_ident()
            self._run = run
            with self._computing():
                yield self.engine
        finally:
            if held:
                self._run = self._thread = None
                self._busy.release()

    def _refuse_waiting(self, in_loop: bool) -> None:
        """Refuse to wait for a stream in the thread that holds the engine.

        Args:
            in_loop: an event loop waits, in which another task may go on with a batch.

        Raises:
            UsageError: the thread would wait for itself.
        """
        here = self._thread == threading.get_ident()
        if here and not (in_loop and isinstance(self._run, Batch)):
            raise _busy()

    def _computing(self) -> AbstractContextManager[None]:
        """The solver's number of torch threads, in this thread."""
        from arbor.model.threads import thread_count, torch_threads

        models = [self.describe(), *(each.describe() for each in self.verifier_models.values())]
        largest = max(models, key=lambda info: info.parameters)
        return torch_threads(thread_count(self.threads, largest))


def _busy() -> UsageError:
    return UsageError(
        "solver-busy",
        "a listener, task, verifier or controller of this search asked its own solver to solve "
        "another problem, or a loop over a batch did.",
        "Use another Solver there, or solve after the search.",
    )
