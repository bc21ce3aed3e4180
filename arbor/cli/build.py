"""From options to a solver; whatever needs no torch is checked before its import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbor import components, registry
from arbor.budget import Budget
from arbor.cli.component_settings import settings_by_part
from arbor.cli.option_records import SolverOptions
from arbor.run.plugin_answers import checked_task
from arbor.tasks.base import Task

if TYPE_CHECKING:
    from arbor.solver import Solver


def build_solver(options: SolverOptions, problem: str | None = None) -> Solver:
    """A solver from the options of the command line.

    Args:
        options: its settings.
        problem: checked by the task, if given.

    Raises:
        ArborError: an invalid option, or a problem the task cannot read.
    """
    Budget.parse(options.budget)
    for kind, component in options.components.items():
        _check_name(kind, components.split_spec(component)[0])
    settings = settings_by_part(options.set, options.components)
    task = components.build("task", options.task, **settings["task"])
    if problem is not None:
        checked_task(task).parse(problem)
    controller = components.build("controller", options.controller, **settings["controller"])

    from arbor.solver import Solver

    return Solver(
        options.model,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        task=task,
        controller=controller,
        verifier=components.build("verifier", options.verifier, **settings["verifier"]),
        budget=options.budget,
        policy=components.build("policy", options.policy, **settings["policy"]),
        mode=options.mode,
        rehydrate=options.rehydrate,
        msve=options.msve,
        sampling=settings["sampling"] | options.sampling,
        max_depth=options.max_depth,
        step_tokens=options.step_tokens,
        max_expansions=options.max_expansions,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        seed=options.seed,
        deterministic=options.deterministic,
        cuda_graphs=options.cuda_graphs,
    )


def build_task(options: SolverOptions) -> Task:
    """The task of the options; imports nothing else of a solver.

    Raises:
        UsageError: an unknown task or setting.
    """
    settings = settings_by_part(options.set, options.components)
    task: Task = components.build("task", options.task, **settings["task"])
    return task


def known_policy(text: str) -> str:
    """A policy with its settings as ``NAME,KEY=VALUE``, in one spelling; its class is not imported.

    Raises:
        UsageError: an unknown policy, or settings that are not KEY=VALUE.
    """
    name, settings = components.split_spec(text)
    _check_name("policy", name)
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))


def _check_name(kind: str, name: str) -> None:
    """Refuses an unknown name without importing a known one; a dotted path is not checked."""
    if ":" not in name and name not in registry.names(kind):
        registry.resolve(kind, name)  # raises, and suggests the closest name
