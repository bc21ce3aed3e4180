"""Setup: the parts and settings that all runs of a solver share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arbor import components
from arbor.aggregate.base import Aggregate
from arbor.aggregate.best import Best
from arbor.budget import Budget
from arbor.controllers.base import Controller
from arbor.engine.hooks import BranchHook
from arbor.engine.mode_names import SIMILAR, Mode, Rehydrate, Share, have_own_budgets
from arbor.events import Listener
from arbor.model.checkpoint import Checkpoint
from arbor.model.sampling_params import Sampling
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.settings import resolve_sampling
from arbor.run.tier_sizes import TierSizes
from arbor.tasks.base import BlockLimits, Task
from arbor.verifiers.base import Verifier, VerifierModel

CONCURRENCY = 8  # searches in progress at a time by default: docs/experiments/server.md


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts and settings that all runs of a solver share, checked.

    Attributes:
        checkpoint: the model and its tokenizer, read when they are needed.
        task, controller, verifier, policy, aggregate: ready components.
        lower: room for KV that has left the device.
        fetch: when it is copied back.
        budget, mode, rehydrate, share, share_threshold, kv_probe, msve, max_expansions, seed: as in
            `Solver`.
        boundary: where a thought and a path end.
        given_sampling: `Solver`'s `sampling`, not resolved: that reads the model's files.
        listeners: called with every event of every run.
        record_bytes: as in `Solver`.
        branch_stop: when branches end early; None: never.
        verifier_models: of the verifiers that have their own.
        alternatives: of the most probable tokens, how many are reported next to each chosen one.
    """

    checkpoint: Checkpoint
    task: Task
    controller: Controller
    verifier: Verifier
    policy: Policy
    budget: Budget
    mode: Mode
    rehydrate: Rehydrate
    lower: TierSizes
    fetch: str
    share: Share
    share_threshold: float
    kv_probe: str
    msve: MSVE
    boundary: BlockLimits
    given_sampling: Sampling | Mapping[str, float] | None
    max_expansions: int | None
    seed: int
    listeners: tuple[Listener, ...]
    record_bytes: int
    aggregate: Aggregate
    branch_stop: BranchHook | None = None
    verifier_models: Mapping[Verifier, VerifierModel] = field(default_factory=dict)
    alternatives: int = 0

    @property
    def sampling(self) -> Sampling:
        """The sampling, resolved; reads the model's generation config."""
        if isinstance(self.given_sampling, Sampling):
            return self.given_sampling
        return resolve_sampling(self.given_sampling or {}, self.checkpoint.read().sampling)

    @property
    def own_budgets(self) -> bool:
        """Whether each of several searches keeps within its own budget."""
        return have_own_budgets(self.mode, self.share, staged=self.lower.staging is not None)

    @property
    def at_once(self) -> int:
        """Searches in progress at a time by default: one where a result depends on others."""
        return CONCURRENCY if self.mode == "lossless" or self.own_budgets else 1

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, resolved; enough to build the solver again.

        Named only where they are not the default: `path_tokens`, `adapter`, `aggregate`, `host`,
        `host_bits`, `staging`, `disk`, `fetch`, `share`, `kv_probe`, `cuda_graphs`, `kv_dtype`,
        `weights`, `step_format`, `branch_stop`.
        """
        source = self.checkpoint.source
        return {
            "model": source.name,
            "revision": source.revision,
            "task": components.spec_of(self.task),
            "controller": components.spec_of(self.controller),
            "verifier": components.spec_of(self.verifier),
            "budget": str(self.budget),
            "policy": components.spec_of(self.policy),
            "mode": self.mode,
            "rehydrate": self.rehydrate,
            "msve": str(self.msve),
            "sampling": dataclasses.asdict(self.sampling),
            "max_depth": self.boundary.max_depth,
            **(
                {}
                if self.boundary.path_tokens is None
                else {"path_tokens": self.boundary.path_tokens}
            ),
            "step_tokens": self.boundary.max_tokens,
            "max_expansions": self.max_expansions,
            "dtype": self.checkpoint.dtype,
            "backend": self.checkpoint.backend,
            "seed": self.seed,
            "deterministic": self.checkpoint.deterministic,
            **({} if source.adapter is None else {"adapter": source.adapter}),
            **(
                {}
                if self.aggregate == Best()
                else {"aggregate": components.spec_of(self.aggregate)}
            ),
            **({} if self.boundary.form is None else {"step_format": str(self.boundary.form)}),
            **({} if self.branch_stop is None else {"branch_stop": str(self.branch_stop)}),
            **({} if self.lower.host is None else {"host": str(self.lower.host)}),
            **({} if self.lower.host_bits is None else {"host_bits": self.lower.host_bits}),
            **({} if self.lower.staging is None else {"staging": str(self.lower.staging)}),
            **({} if self.lower.disk is None else {"disk": str(self.lower.disk)}),
            **({"fetch": self.fetch} if self.lower and self.fetch != "auto" else {}),
            **({} if self.share == "exact" else {"share": self.share}),
            **({"share_threshold": self.share_threshold} if self.share in SIMILAR else {}),
            **({} if self.kv_probe == "kept" else {"kv_probe": self.kv_probe}),
            **({} if self.checkpoint.cuda_graphs else {"cuda_graphs": False}),
            **(
                {} if self.checkpoint.kv_dtype == "auto" else {"kv_dtype": self.checkpoint.kv_dtype}
            ),
            **({} if self.checkpoint.weights == "auto" else {"weights": self.checkpoint.weights}),
        }
