"""``arbor prompt``: what a model reads of a problem, as text and as tokens; needs no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from arbor import components
from arbor.cli.command import Command, option, option_group
from arbor.cli.component_settings import settings_by_part
from arbor.cli.encoding import decoded
from arbor.cli.option_records import read_options
from arbor.cli.options import model_option, names_of, output_options, revision_option, trust_option
from arbor.cli.output import Output
from arbor.errors import InputError, UsageError
from arbor.model.description_cache import light_tokenizer
from arbor.model.loading import locate_model
from arbor.run.component_checks import resolve_component
from arbor.run.planning import encode_problem, fitted, parse_problem
from arbor.run.plugin_answers import checked_task
from arbor.tasks.base import Task
from arbor.tasks.prompt_template import template_file

PROMPT_SCHEMA = "arbor.prompt/1"

_options = option_group(
    option(
        "--file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        heading="Problem",
        help="Read the problem from a file.",
    ),
    option(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        heading="Problem",
        help="Encoding of the file.",
    ),
    option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        heading="Problem",
        common=True,
        help="Setting of the task, as in shots=2, template=FILE or chat=off; may be repeated.",
    ),
    option(
        "--template",
        is_flag=True,
        heading="Problem",
        common=True,
        help="Print the task's template instead, to copy and change.",
    ),
    model_option,
    revision_option,
    trust_option,
    output_options,
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of ``arbor prompt``, named as on the command line."""

    task: str
    problem: str | None
    file: Path | None
    encoding: str
    set: tuple[str, ...]
    template: bool
    model: str
    revision: str | None
    trust_remote_code: bool


@click.command(cls=Command)
@click.argument("task", shell_complete=names_of("task"))
@click.argument("problem", required=False)
@_options
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
    problem = parse_problem(checked_task(task), problem_text(options, task))
    source = locate_model(options.model, options.revision, options.trust_remote_code)
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


def problem_text(options: PromptOptions, task: Task) -> str:
    """The problem from the command line or a file, else the task's example.

    Raises:
        UsageError: two problems.
        InputError: the file cannot be read.
    """
    if options.file is None:
        return task.example if options.problem is None else options.problem
    if options.problem is not None:
        raise UsageError("usage", "PROBLEM and --file exclude each other.", "Leave one out.")
    try:
        data = options.file.read_bytes()
    except OSError as error:
        raise InputError(
            "problem-unreadable",
            f"{options.file} cannot be read: {error.strerror}.",
            path=str(options.file),
        ) from error
    return decoded(data, options.encoding, str(options.file))
