"""Setup: the settings of a solver, resolved for its model, that all of its runs share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arbor import components
from arbor.controllers.base import Controller
from arbor.errors import UsageError
from arbor.feature import hook
from arbor.model.checkpoint import Checkpoint
from arbor.model.fitted_files import found_file
from arbor.model.loading import ModelLocation
from arbor.model.parallel.shards import cannot
from arbor.model.sampling_params import Sampling
from arbor.registry import name_of
from arbor.retention.alpha import with_alpha
from arbor.run.plugin_answers import (
    check_boundary,
    most_proposals,
    own_model_of,
    proposing,
    unchecked,
)
from arbor.run.settings import Settings, recorded, sampling_with
from arbor.tasks.base import BlockLimits, Task
from arbor.tasks.worded import Worded
from arbor.verifiers.base import (
    MayLeave,
    OwnsModel,
    Placement,
    TakesCalibration,
    Verifier,
    VerifierModel,
    parts_of,
)
from arbor.verifiers.exact import Exact

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setup(Settings):
    """The settings of a solver with what belongs to its model.

    Attributes:
        checkpoint: the model and its tokenizer, read when they are needed.
        boundary: where a thought and a path end.
        verifier_models: of the verifiers that have their own.
        alternatives: of the most probable tokens, how many are reported next to each chosen one.
    """

    checkpoint: Checkpoint
    boundary: BlockLimits
    verifier_models: Mapping[Verifier, VerifierModel] = field(default_factory=dict)
    alternatives: int = 0

    @classmethod
    def resolved(cls, settings: Settings) -> Setup:
        """The settings with the model located, its values and thresholds found; loads nothing.

        Raises:
            ArborError: the model does not exist, or cannot be used with these settings.
        """
        boundary = settings.boundary_in(check_boundary(settings.task))
        check_proposals(settings.task, settings.controller, boundary)
        checkpoint = Checkpoint(settings)
        placement = Placement(
            settings.device, settings.backend, settings.deterministic, settings.debug
        )
        models: dict[Verifier, VerifierModel] = {
            part: own_model_of(part, placement)
            for part in parts_of(settings.verifier)
            if isinstance(part, OwnsModel)
        }
        if settings.tp > 1:
            check_ranks(settings)
        source = checkpoint.source
        if settings.keep_kv is not None and not source.path:
            raise UsageError(
                "keep-kv",
                "no files identify the weights of a ready model.",
                "Name its directory or Hub id, or leave keep_kv out.",
            )
        given = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
        if settings.msve is None and (values := hook("msve")) is not None:
            weights = found_file("msve", source)
            try:
                given["msve"] = values() if weights is None else values.load(weights)
            except UsageError as error:
                if settings.policy.reads_values:
                    raise
                logger.warning("%s (this search goes on: its policy reads no values)", error)
                given["msve"] = values()
        given["policy"] = with_alpha(settings.policy, found_file("alpha", source))
        given["verifier"] = resolve_verifier(settings.verifier, settings.task, source)
        return cls(**given, checkpoint=checkpoint, boundary=boundary, verifier_models=models)

    @property
    def resolved_sampling(self) -> Sampling:
        """The sampling, resolved; reads the model's generation config."""
        if isinstance(self.sampling, Sampling):
            return self.sampling
        return sampling_with(self.sampling or {}, self.checkpoint.read().sampling)

    @property
    def config(self) -> dict[str, Any]:
        """Every setting but the machine's, resolved; enough to build the solver again."""
        source, boundary = self.checkpoint.source, self.boundary
        found = {"model": source.name, "revision": source.revision} | recorded(self)
        found |= {
            "model": source.name,
            "revision": source.revision,
            "backend": self.checkpoint.backend,
            "sampling": dataclasses.asdict(self.resolved_sampling),
            "max_depth": boundary.max_depth,
            "step_tokens": boundary.max_tokens,
        }
        optional = {
            "adapter": source.adapter,
            "path_tokens": boundary.path_tokens,
            "updated_weights": self.checkpoint.updated,
            "step_format": None if boundary.form is None else str(boundary.form),
        }
        return found | {name: each for name, each in optional.items() if each is not None}


def check_ranks(settings: Settings) -> None:
    """Refuses what several processes that hold one model do not do together: they run forwards.

    Raises:
        UsageError: names the setting, and what to give instead.
    """
    policy = settings.policy
    parts = parts_of(settings.verifier)
    refused = {
        "KV in host memory": (settings.host is not None, "no --host"),
        "KV on a disk": (settings.disk is not None, "no disk"),
        "keep_kv": (settings.keep_kv is not None, "no keep_kv"),
        f"the policy '{policy.name}', where KV heads keep tokens of their own,": (
            policy.by_head,
            "one with granularity=token",
        ),
        f"the policy '{policy.name}', which observes some of the heads,": (
            policy.observation.heads is not None,
            "one that observes all of them",
        ),
        "a verification that leaves between layers": (
            any(isinstance(part, MayLeave) and part.may_leave for part in parts),
            "levels=skip",
        ),
    }
    for what, (given, instead) in refused.items():
        if given:
            raise cannot(settings.tp, what, instead)


def resolve_verifier(verifier: Verifier, task: Task, source: ModelLocation) -> Verifier:
    """A verifier with the thresholds calibrated for the model and the task, where it takes any.

    Raises:
        UsageError: the exact verifier is asked for, and the task has no exact checker.
    """
    exact = any(isinstance(part, Exact) for part in parts_of(verifier))
    if exact and isinstance(own := unchecked(task), Worded) and type(own).value is Worded.value:
        raise own.no_exact_checker()
    if not isinstance(verifier, TakesCalibration):
        return verifier
    name = str(components.spec_of(task)["name"])
    return verifier.calibrated(source, name)


def check_proposals(task: Task, controller: Controller, boundary: BlockLimits) -> None:
    """Refuses a search that proposes thoughts where they cannot be asked for.

    Raises:
        UsageError: the task has no question for them, or thoughts have a format.
    """
    if not most_proposals(controller, boundary.max_depth):
        return
    if proposing(task) is None:
        raise UsageError(
            "generate",
            f"the task '{name_of(task)}' has no question for several thoughts, and the search "
            "proposes them.",
            "Use generate=sample; docs/task.md says what a task of your own needs.",
            name=name_of(task),
        )
    if boundary.form is not None:
        raise UsageError(
            "generate",
            "a step format holds for thoughts that are sampled, and the search proposes them.",
            "Leave out step_format, or use generate=sample.",
        )
