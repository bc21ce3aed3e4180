"""From options to a solver; whatever needs no torch is checked before its import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from arbor import components, registry
from arbor.cli.output import Output
from arbor.cli.record_options import SolverOptions
from arbor.errors import InputError
from arbor.run.planning import reads_words
from arbor.run.plugin_answers import checked_task
from arbor.run.settings import Settings
from arbor.support.setting import settings_of
from arbor.tasks.base import Task

if TYPE_CHECKING:
    from arbor.solver import Solver

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
    settings = options.settings
    if problem is not None:
        _check_problem(checked_task(settings.task), problem)
    from arbor.solver import Solver

    given = {name: getattr(settings, name) for name in settings_of(Settings)}
    solver = Solver(**{**given, "record_bytes": 0})
    if searches:
        import_engine()
    else:
        solver.describe()
    return solver


def import_engine() -> None:
    """Imports what a search needs before it begins: meanwhile a signal ends the process at once."""
    for module in ENGINE:
        importlib.import_module(module)


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
    task = str(components.spec_of(options.settings.task)["name"])
    if task in OF_LINES and reads_words(solver.checkpoint.read().tokenizer):
        output.warn(
            f"warning: the task '{task}' has no instructions, only the lines that arbor's own models "
            f"were trained on, and {options.settings.model} is another model. Use --task game24, countdown "
            "or one in words, such as gsm8k."
        )
    if str(options.settings.model).startswith("builtin:") and task in OF_USERS:
        output.warn(
            f"warning: {options.settings.model} knows only game24, countdown, chains and recall; with "
            f"--task {task} its answers are guesses. Name another model: --model NAME."
        )


def known_policy(text: str) -> str:
    """A policy with its settings as ``NAME,KEY=VALUE``, in one spelling; its class is not imported.

    Raises:
        UsageError: an unknown policy, or settings that are not KEY=VALUE.
    """
    name, settings = components.split_spec(text)
    if ":" not in name and name not in registry.names("policy"):
        raise registry.unknown("policy", name)
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))
