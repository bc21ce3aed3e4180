"""``arbor generate``: the most probable continuations of a text, by token-level beam search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import click

from arbor.cli.build import build_solver
from arbor.cli.command import Command
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.cli.problem_text import ProblemOptions
from arbor.cli.record_options import SolverOptions, options_of, read_options
from arbor.errors import UsageError, unknown_setting
from arbor.model.checkpoint import ModelSettings
from arbor.support.setting import setting, settings_of

GENERATE_SCHEMA = "arbor.generate/1"
# settings of searches, which this command does not make
NOT_OF_MODELS = SolverOptions.known().keys() - settings_of(ModelSettings) - {"budget", "threads"}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of ``arbor generate``, named as on the command line."""

    HEADING = "Beam search"

    prompt: str
    beams: int = setting(4, "Hypotheses that go on at each token.", shown="short", least=1)
    max_tokens: int = setting(64, "Tokens of the longest continuation.", shown="short", least=1)
    best: int = setting(1, "Continuations to print, best first.", shown="short", least=1)
    length_penalty: float = setting(
        1.0,
        "Exponent of the length that a log probability is divided by; above 0 favours long ones.",
    )
    early_stopping: Literal["first", "heuristic", "never"] = setting(
        "heuristic",
        "End once enough are finished (first), or none can become better (heuristic, never).",
    )
    groups: int = setting(
        1, "Diverse beam search: groups that the beams are divided into.", least=1
    )
    diversity: float = setting(
        0.0, "Penalty of a token for each beam of an earlier group that has chosen it.", least=0
    )
    chat: bool = setting(True, "Use the model's chat template, if it has one; default: yes.")
    solver: SolverOptions


@click.command(cls=Command)
@click.argument("prompt")
@options_of(GenerateOptions, without=NOT_OF_MODELS)
@output_options
@click.pass_obj
def generate(output: Output, /, **values: Any) -> int:
    """Print the most probable continuations of PROMPT, by token-level beam search.

    '-' reads it from stdin, without its last newline.

    \b
      arbor generate "Once upon a time" --beams 8
      arbor generate "Once upon a time" --beams 8 --best 3 --json
      arbor generate "Once upon a time" --groups 4 --diversity 0.5 --best 4
    """
    options = read_options(GenerateOptions, values)
    for text in options.solver.set:
        names = [name for name in SolverOptions.known() if name not in NOT_OF_MODELS]
        raise unknown_setting("there is", text.partition("=")[0], names)
    if options.best > options.beams:
        raise UsageError(
            "beams",
            f"--best {options.best} is more than the {options.beams} beams.",
            f"Give --beams {options.best}.",
        )
    prompt = options.prompt
    if prompt == "-":
        prompt = ProblemOptions(problem=prompt).read().removesuffix("\n")
    with build_solver(options.solver) as solver:
        found = solver.generate(
            prompt,
            beams=options.beams,
            max_tokens=options.max_tokens,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            groups=options.groups,
            diversity=options.diversity,
            chat=options.chat,
        )[: options.best]
    if output.json:
        output.document(
            {
                "schema": GENERATE_SCHEMA,
                "prompt": prompt,
                "beams": options.beams,
                "continuations": [dataclasses.asdict(each) for each in found],
            }
        )
        return 0
    for each in found:
        output.print(each.text if options.best == 1 else f"{each.score:8.3f}  {each.text!r}")
    return 0
