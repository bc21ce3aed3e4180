"""``arbor prompt``: what a model reads of a problem, as text and as tokens; needs no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from arbor import components
from arbor.cli.command import Command
from arbor.cli.configure import settings_by_part
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.cli.problem_text import ProblemOptions
from arbor.cli.record_options import names_of, options_of, read_options
from arbor.errors import UsageError
from arbor.model.checkpoint import ModelSource
from arbor.model.description_cache import light_tokenizer
from arbor.model.loading import locate_model
from arbor.run.planning import encode_problem, fitted, parse_problem
from arbor.run.plugin_answers import checked_task
from arbor.run.settings import resolve_component
from arbor.support.setting import setting
from arbor.tasks.base import Task
from arbor.tasks.prompt_template import template_file

PROMPT_SCHEMA = "arbor.prompt/1"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of ``arbor prompt``, named as on the command line."""

    HEADING = "Problem"

    task: str
    source: ProblemOptions
    set: tuple[str, ...] = setting(
        (),
        "Setting of the task, as in shots=2, template=FILE or chat=off; may be repeated.",
        shown="short",
        metavar="KEY=VALUE",
    )
    template: bool = setting(
        False, "Print the task's template instead, to copy and change.", shown="short"
    )
    origin: ModelSource


@click.command(cls=Command)
@click.argument("task", shell_complete=names_of("task"))
@click.argument("problem", required=False)
@options_of(PromptOptions)
@output_options
@click.pass_obj
def prompt(output: Output, /, **values: Any) -> int:
    """Show what a model reads of a problem: the text after its chat template, and the tokens.

    Without PROBLEM it is the task's example. No weights are read.

    \b
      arbor prompt math "What is 2 + 2?" --set shots=2
      arbor prompt game24 "4 5 6 10" --json
      arbor prompt gsm8k --template > mine.toml
    """
    options = read_options(PromptOptions, values)
    task = build(options.task, options.set)
    if options.template:
        output.print(template_text(task))
        return 0
    text = options.source.read() if options.source.given else task.example
    problem = parse_problem(checked_task(task), text)
    source = locate_model(*vars(options.origin).values())
    tokenizer = light_tokenizer(source)
    task = fitted(task, tokenizer)
    tokens = encode_problem(tokenizer, checked_task(task), problem)
    text = tokenizer.decode(tokens)
    if output.json:
        output.document(
            {
                "schema": PROMPT_SCHEMA,
                "task": task.name,
                "model": source.name,
                "problem": problem.text,
                "text": text,
                "tokens": len(tokens),
                "ids": tokens,
            }
        )
        return 0
    output.print(text)
    output.say(f"{len(tokens):,} tokens of {source.name}")
    return 0


def build(name: str, settings: tuple[str, ...]) -> Task:
    """The task with its settings.

    Raises:
        UsageError: an unknown task or setting, or a setting of another part.
    """
    rest = {"controller": "tot", "verifier": "self", "policy": "reentry"}
    parts = settings_by_part(
        [f"task.{each.removeprefix('task.')}" for each in settings], rest | {"task": name}
    )
    built = components.build("task", name, **parts["task"])
    task: Task = resolve_component("task", built, Task)
    return task


def template_text(task: Task) -> str:
    """The file of the task's template.

    Raises:
        UsageError: its prompt has no template.
    """
    name = getattr(task, "template", None)
    if name is None:
        raise UsageError(
            "template-missing",
            f"the prompt of the task '{task.name}' has no template.",
            "Tasks in words have one, as in: arbor prompt math --template.",
        )
    return template_file(name or task.name).read_text(encoding="utf-8").rstrip("\n")
