"""``arbor generate``: the most probable continuations of a text, by token-level beam search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import click

from arbor.budget import Budget
from arbor.cli.command import Command, Integer, option, option_group
from arbor.cli.option_records import read_options
from arbor.cli.options import (
    budget_option,
    deterministic_option,
    loading_options,
    model_option,
    output_options,
    threads_option,
)
from arbor.cli.output import Output
from arbor.cli.signals import ending_at_once
from arbor.model.names import check_device, check_dtype

GENERATE_SCHEMA = "arbor.generate/1"

_options = option_group(
    option(
        "--beams",
        type=Integer(1),
        default=4,
        metavar="N",
        heading="Beam search",
        common=True,
        help="Hypotheses that go on at each token.",
    ),
    option(
        "--max-tokens",
        type=Integer(1),
        default=64,
        metavar="N",
        heading="Beam search",
        common=True,
        help="Tokens of the longest continuation.",
    ),
    option(
        "--best",
        type=Integer(1),
        default=1,
        metavar="N",
        heading="Beam search",
        common=True,
        help="Continuations to print, best first.",
    ),
    option(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="X",
        heading="Beam search",
        help="Exponent of the length that a log probability is divided by; above 0 favours long ones.",
    ),
    option(
        "--early-stopping",
        type=click.Choice(["first", "heuristic", "never"]),
        default="heuristic",
        heading="Beam search",
        help="End once enough are finished (first), or none can become better (heuristic, never).",
    ),
    option(
        "--groups",
        type=Integer(1),
        default=1,
        metavar="N",
        heading="Beam search",
        help="Diverse beam search: groups that the beams are divided into.",
    ),
    option(
        "--diversity",
        type=float,
        default=0.0,
        metavar="X",
        heading="Beam search",
        help="Penalty of a token for each beam of an earlier group that has chosen it.",
    ),
    option(
        "--chat/--no-chat",
        default=True,
        heading="Beam search",
        show_default=False,
        help="Use the model's chat template, if it has one; default: yes.",
    ),
    budget_option,
    model_option,
    loading_options,
    threads_option,
    deterministic_option,
    output_options,
)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of ``arbor generate``, named as on the command line."""

    prompt: str
    beams: int
    max_tokens: int
    best: int
    length_penalty: float
    early_stopping: Literal["first", "heuristic", "never"]
    groups: int
    diversity: float
    chat: bool
    budget: str
    model: str
    revision: str | None
    adapter: str | None
    trust_remote_code: bool
    dtype: str
    kv_dtype: str
    weights: str
    device: str
    backend: str
    cuda_graphs: bool
    threads: int | None
    deterministic: bool


@click.command(cls=Command)
@click.argument("prompt")
@_options
@click.pass_obj
def generate(output: Output, /, **values: Any) -> int:
    """Print the most probable continuations of PROMPT, by token-level beam search.

    \b
      arbor generate "Once upon a time" --beams 8
      arbor generate "Once upon a time" --beams 8 --best 3 --json
      arbor generate "Once upon a time" --groups 4 --diversity 0.5 --best 4
    """
    options = read_options(GenerateOptions, values)
    Budget.parse(options.budget)
    check_device(options.device)
    check_dtype(options.dtype)
    with ending_at_once():
        from arbor.solver import Solver
    with Solver(
        options.model,
        revision=options.revision,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        weights=options.weights,
        device=options.device,
        backend=options.backend,
        threads=options.threads,
        deterministic=options.deterministic,
        cuda_graphs=options.cuda_graphs,
    ) as solver:
        found = solver.generate(
            options.prompt,
            beams=options.beams,
            max_tokens=options.max_tokens,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            groups=options.groups,
            diversity=options.diversity,
            budget=options.budget,
            chat=options.chat,
        )[: options.best]
    if output.json:
        output.document(
            {
                "schema": GENERATE_SCHEMA,
                "prompt": options.prompt,
                "beams": options.beams,
                "continuations": [dataclasses.asdict(each) for each in found],
            }
        )
        return 0
    for each in found:
        output.print(each.text if options.best == 1 else f"{each.score:8.3f}  {each.text!r}")
    return 0
