"""From options to a solver; whatever needs no torch is checked before its import."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from arbor import components, registry
from arbor.budget import Budget
from arbor.cli.component_settings import settings_by_part
from arbor.cli.option_records import SolverOptions
from arbor.cli.output import Output
from arbor.cli.signals import ending_at_once
from arbor.controllers.base import Controller
from arbor.errors import InputError, UsageError
from arbor.model.loading import locate_model
from arbor.model.names import check_device, check_dtype, check_weights
from arbor.model.sampling_params import Sampling
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.breadth import with_breadth
from arbor.run.component_checks import resolve_component
from arbor.run.keep_kv import KeepKV
from arbor.run.limits import check_sharing
from arbor.run.planning import reads_words
from arbor.run.plugin_answers import checked_task
from arbor.run.settings import check_fetch, check_kv_probe, resolve_mode, resolve_tiers
from arbor.tasks.base import Task

if TYPE_CHECKING:
    from arbor.solver import Solver

FLASHINFER = "flashinfer"
WORDS = "reasoning"  # the task for any problem in words
OF_LINES = ("chains", "recall")  # tasks whose prompts no other model than arbor's own can read
OF_USERS = ("aime", "arc", "crosswords", "gsm8k", "math", WORDS)  # tasks without own problems
ENGINE = ("arbor.engine.engine", "arbor.model.weights", "arbor.run.session")  # import torch


def build_solver(
    options: SolverOptions, problem: str | None = None, *, searches: bool = True
) -> Solver:
    """A solver from the options of the command line.

    Args:
        options: its settings.
        problem: checked by the task, if given.
        searches: whether to import the engine. Without it the model is described instead, which
            imports torch only where no earlier process has kept the description.

    Raises:
        ArborError: an invalid option, a problem the task cannot read, or an unreadable model.
    """
    check_options(options)
    settings = settings_by_part(options.set, options.components)
    task = _component("task", options, settings, Task)
    if problem is not None:
        _check_problem(checked_task(task), problem)
    named = with_breadth(options.controller, task)
    built = components.build("controller", named, **settings["controller"])
    controller = resolve_component("controller", built, Controller)
    policy = _component("policy", options, settings, Policy)
    Sampling(**(settings["sampling"] | options.sampling))
    locate_model(options.model, options.revision, options.trust_remote_code, options.adapter)

    with ending_at_once():
        from arbor.solver import Solver
    if searches:
        import_engine()
    solver = Solver(
        options.model,
        revision=options.revision,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
        task=task,
        controller=controller,
        verifier=_verifier(options, settings["verifier"]),
        aggregate=components.build("aggregate", options.aggregate, **settings["aggregate"]),
        budget=options.budget,
        policy=policy,
        mode=options.mode,
        rehydrate=options.rehydrate,
        host=options.host,
        host_bits=options.host_bits,
        staging=options.staging,
        disk=options.disk,
        disk_dir=options.disk_dir,
        fetch=options.fetch,
        keep_kv=options.keep_kv,
        keep_kv_size=options.keep_kv_size,
        share=options.share,
        share_threshold=options.share_threshold,
        kv_probe=options.kv_probe,
        msve=options.msve,
        sampling=settings["sampling"] | options.sampling,
        max_depth=options.max_depth,
        path_tokens=options.path_tokens,
        step_tokens=options.step_tokens,
        step_format=options.step_format,
        branch_stop=options.branch_stop,
        max_expansions=options.max_expansions,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        weights=options.weights,
        device=options.device,
        backend=options.backend,
        threads=options.threads,
        seed=options.seed,
        deterministic=options.deterministic,
        cuda_graphs=options.cuda_graphs,
        record_bytes=0,
    )
    if not searches:
        with ending_at_once():
            solver.describe()
    return solver


def _verifier(options: SolverOptions, settings: Mapping[str, Any]) -> Any:
    """The verifier of the options.

    Raises:
        UsageError: an audit of a verifier that never skips anything.
    """
    built = components.build("verifier", options.verifier, **settings)
    if not options.audit_verify:
        return built
    if "audit" not in components.settings_of(built):
        raise UsageError(
            "audit-verify",
            f"--audit-verify: the verifier '{components.spec_of(built)['name']}' computes every "
            "verification in full.",
            "Use it with --verifier cgee.",
        )
    return components.build("verifier", built, audit=True)


def import_engine() -> None:
    """Imports what a search needs; a signal meanwhile ends the process with one line."""
    with ending_at_once():
        for module in ENGINE:
            importlib.import_module(module)


def check_options(options: SolverOptions) -> None:
    """Refuses names, budgets and settings of the model that no solver would take.

    Raises:
        UsageError: names the option.
    """
    Budget.parse(options.budget)
    for kind, component in options.components.items():
        _check_name(kind, components.split_spec(component)[0])
    if options.backend not in ("auto", FLASHINFER):
        _check_name("backend", options.backend, ("auto", FLASHINFER))
    check_weights(options.weights, check_device(options.device))
    check_dtype(options.dtype)
    check_sharing(options.share, options.mode, options.rehydrate)
    check_fetch(options.fetch)
    KeepKV.parse(options.keep_kv, options.keep_kv_size, options.mode)
    resolve_tiers(
        options.host,
        options.disk,
        options.disk_dir,
        resolve_mode(options.mode, options.rehydrate)[1],
        host_bits=options.host_bits,
        staging=options.staging,
        mode=options.mode,
        kv_dtype=options.kv_dtype,
    )
    check_kv_probe(options.kv_probe)
    if options.msve is not None:
        MSVE.parse(options.msve)


def _check_problem(task: Task, problem: str) -> None:
    """Refuses a problem that the task cannot read; for words the error names the task for them."""
    try:
        task.parse(problem)
    except InputError as error:
        if task.name == WORDS or not any(sign.isalpha() for sign in problem):
            raise
        hint = f"{error.hint.rstrip('.')}. For a problem in words: --task {WORDS}.".lstrip(". ")
        raise InputError(error.code, error.message, hint, **error.data) from error


def warn_of_misfit(output: Output, options: SolverOptions, solver: Solver) -> None:
    """Warns where a task and a model do not fit: problems in words for the built-in model, or lines
    without instructions for a model that reads words."""
    task = components.split_spec(options.task)[0]
    if task in OF_LINES and reads_words(solver.checkpoint.read().tokenizer):
        output.warn(
            f"warning: the task '{task}' has no instructions, only the lines that arbor's own models "
            f"were trained on, and {options.model} is another model. Use --task game24, countdown "
            "or one in words, such as gsm8k."
        )
    if options.model.startswith("builtin:") and task in OF_USERS:
        output.warn(
            f"warning: {options.model} knows only game24, countdown, chains and recall; with "
            f"--task {task} its answers are guesses. Name another model: --model NAME."
        )


def build_task(options: SolverOptions) -> Task:
    """The task of the options; imports nothing else of a solver.

    Raises:
        UsageError: an unknown task or setting.
    """
    settings = settings_by_part(options.set, options.components)
    task: Task = _component("task", options, settings, Task)
    return task


def _component(
    kind: str, options: SolverOptions, settings: Mapping[str, Any], protocol: type[Any]
) -> Any:
    """A component of the options with every member that its kind needs."""
    built = components.build(kind, options.components[kind], **settings[kind])
    return resolve_component(kind, built, protocol)


def known_policy(text: str) -> str:
    """A policy with its settings as ``NAME,KEY=VALUE``, in one spelling; its class is not imported.

    Raises:
        UsageError: an unknown policy, or settings that are not KEY=VALUE.
    """
    name, settings = components.split_spec(text)
    _check_name("policy", name)
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))


def _check_name(kind: str, name: str, more: Iterable[str] = ()) -> None:
    """Refuses an unknown name without importing a known one; a dotted path is not checked."""
    if ":" in name or name in registry.names(kind):
        return
    if more or (kind, name) not in registry.RENAMED:
        raise registry.unknown(kind, name, more)
