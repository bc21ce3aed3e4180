"""Setup: the parts and settings that all runs of a solver share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arbor import components
from arbor.budget import Budget
from arbor.controllers.base import Controller
from arbor.engine.mode_names import Mode, Rehydrate
from arbor.events import Listener
from arbor.model.checkpoint import Checkpoint
from arbor.model.sampling_params import Sampling
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.settings import resolve_sampling
from arbor.tasks.base import BlockLimits, Task
from arbor.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts and settings that all runs of a solver share, checked.

    Attributes:
        checkpoint: the model and its tokenizer, read when they are needed.
        task, controller, verifier, policy: ready components.
        budget, mode, rehydrate, msve, max_expansions, seed: as in `Solver`.
        boundary: where a thought and a path end.
        given_sampling: `Solver`'s `sampling`, not resolved: that reads the model's files.
        listeners: called with every event of every run.
        record_bytes: as in `Solver`.
    """

    checkpoint: Checkpoint
    task: Task
    controller: Controller
    verifier: Verifier
    policy: Policy
    budget: Budget
    mode: Mode
    rehydrate: Rehydrate
    msve: MSVE
    boundary: BlockLimits
    given_sampling: Sampling | Mapping[str, float] | None
    max_expansions: int | None
    seed: int
    listeners: tuple[Listener, ...]
    record_bytes: int

    @property
    def sampling(self) -> Sampling:
        """The sampling, resolved; reads the model's generation config."""
        if isinstance(self.given_sampling, Sampling):
            return self.given_sampling
        return resolve_sampling(self.given_sampling or {}, self.checkpoint.read().sampling)

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, resolved; enough to build the solver again.

        `cuda_graphs` is named only where it is off.
        """
        return {
            "model": self.checkpoint.source.name,
            "revision": self.checkpoint.source.revision,
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
            "step_tokens": self.boundary.max_tokens,
            "max_expansions": self.max_expansions,
            "dtype": self.checkpoint.dtype,
            "backend": self.checkpoint.backend,
            "seed": self.seed,
            "deterministic": self.checkpoint.deterministic,
            **({} if self.checkpoint.cuda_graphs else {"cuda_graphs": False}),
        }
