"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from arbor import registry
from arbor.cli.command import option, option_group
from arbor.cli.configure import take_defaults, take_preset
from arbor.cli.output import LOG_LEVELS, LOG_SETTINGS, Output, configure_log
from arbor.events import Detail
from arbor.run.presets import PRESETS

EXIT_GATE = 7  # a check or a gate failed
# commands validate the path themselves (exit code 4)
TRACE_PATH = click.Path(path_type=Path, readable=False)
COMPLETION = "_ARBOR_COMPLETE"  # set by the shell that asks for completions


def _set_output(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keeps a setting that was given; the one after the command wins over the one before it."""
    name = parameter.name or ""
    output = ctx.ensure_object(Output)
    if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
        setattr(output, name, value)
        if name in LOG_SETTINGS:
            configure_log(output)


def names_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completes the names of a kind, plugins' included; imports none of them."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        return [name for name in registry.names(kind) if name.startswith(begun)]

    return complete


_OUTPUT_OPTION: dict[str, Any] = {
    "heading": "Output",
    "expose_value": False,
    "callback": _set_output,
}

output_options = option_group(
    option("--json", is_flag=True, help="One JSON document on stdout.", **_OUTPUT_OPTION),
    option(
        "-q", "--quiet", is_flag=True, help="Nothing but the result and errors.", **_OUTPUT_OPTION
    ),
    option(
        "-v", "--verbose", count=True, help="More on stderr; -vv for everything.", **_OUTPUT_OPTION
    ),
    option(
        "--display",
        type=click.Choice(["auto", "live", "plain", "none"]),
        default="auto",
        help="Progress on stderr: auto is live on a terminal, elsewhere a line each 30 s.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="auto follows the terminal, NO_COLOR and FORCE_COLOR.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        help="What of the log is shown; warning without -q and -v.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help="Append the whole log to FILE, one JSON object a line.",
        **_OUTPUT_OPTION,
    ),
    option("--debug", is_flag=True, help="Python's traceback with every error.", **_OUTPUT_OPTION),
)

revision_option = option(
    "--revision",
    metavar="NAME",
    heading="Model",
    help="Branch, tag or commit on the Hub; by default its main branch.",
)
trust_option = option(
    "--trust-remote-code",
    is_flag=True,
    heading="Model",
    help="Run Python code that lies beside the weights; only if you have read it.",
)

# The groups that commands are made of; `arbor bench` takes several budgets and policies.

search_shape_options = option_group(
    option(
        "--preset",
        type=click.Choice(sorted(PRESETS)),
        heading="Search",
        is_eager=True,
        expose_value=False,
        callback=lambda ctx, parameter, name: take_preset(ctx, parameter, name),
        help="ArborKV's search shapes; options given beside it win.",
    ),
    option(
        "--task",
        default="game24",
        metavar="NAME",
        heading="Search",
        shell_complete=names_of("task"),
        help="Kind of problem; see 'arbor list tasks'.",
    ),
    option(
        "--controller",
        default="tot",
        metavar="NAME",
        heading="Search",
        shell_complete=names_of("controller"),
        help="Chooses which leaves grow: chain, beam, tot, ...",
    ),
    option(
        "--verifier",
        default="self",
        metavar="NAME",
        heading="Search",
        shell_complete=names_of("verifier"),
        help="Judges thoughts: self (asks the model), exact.",
    ),
    option(
        "--max-depth",
        type=click.IntRange(1),
        metavar="N",
        heading="Search",
        help="Thoughts on one path.",
    ),
    option(
        "--step-tokens",
        type=click.IntRange(1),
        metavar="N",
        heading="Search",
        help="Tokens per thought.",
    ),
    option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        heading="Search",
        help="A setting of controller, verifier, task, policy or sampling; may be repeated.",
    ),
)

budget_option = option(
    "--budget",
    default="full",
    metavar="X",
    heading="KV budget",
    help="The part of full retention's KV that is kept, in (0, 1]; or 8192tok, 6GiB.",
)

policy_option = option(
    "--policy",
    default="reentry",
    metavar="NAME[,KEY=VALUE]",
    heading="KV budget",
    shell_complete=names_of("policy"),
    help="What blocks off the running paths keep; see 'arbor list policies'.",
)

retention_options = option_group(
    option(
        "--mode",
        type=click.Choice(["lossless", "lossy"]),
        default="lossless",
        heading="KV budget",
        help="lossless: the same answer at any budget; lossy: running paths lose tokens too.",
    ),
    option(
        "--rehydrate",
        type=click.Choice(["selective", "span", "off"]),
        heading="KV budget",
        help="What comes back: missing tokens, whole blocks, or nothing (lossy).",
    ),
    option(
        "--msve",
        metavar="FILE",
        heading="KV budget",
        help="Block values, from 'arbor calibrate msve'; by default those of the model.",
    ),
)

loading_options = option_group(
    revision_option,
    option(
        "--dtype",
        default="auto",
        metavar="NAME",
        heading="Model",
        help="auto is the dtype of the weights.",
    ),
    option(
        "--device",
        default="auto",
        metavar="NAME",
        heading="Model",
        help="auto is CUDA where there is one.",
    ),
    option(
        "--backend",
        default="auto",
        metavar="NAME",
        heading="Model",
        shell_complete=names_of("backend"),
        help="What computes attention: auto, flashinfer, torch, rowwise, reference.",
    ),
    trust_option,
)

search_options = option_group(
    search_shape_options, budget_option, policy_option, retention_options, loading_options
)

model_option = option(
    "--model",
    default="builtin:sapling",
    metavar="NAME|DIR",
    heading="Model",
    help="Built in, a directory, or a Hub id.",
)

sampling_options = option_group(
    option(
        "--temperature",
        type=click.FloatRange(0),
        metavar="X",
        heading="Sampling",
        help="0 is greedy.",
    ),
    option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="X",
        heading="Sampling",
        help="Nucleus; 1 is off.",
    ),
    option("--top-k", type=click.IntRange(0), metavar="N", heading="Sampling", help="0 is off."),
    option(
        "--seed",
        type=click.IntRange(0),
        metavar="N",
        default=0,
        heading="Sampling",
        help="Of every random stream.",
    ),
    option(
        "--deterministic",
        is_flag=True,
        heading="Sampling",
        help="Bitwise the same whatever else is in a batch (CPU, no experts; slower).",
    ),
)

max_expansions_option = option(
    "--max-expansions",
    type=click.IntRange(1),
    metavar="N",
    heading="Limits",
    help="Leaves grown.",
)

limit_options = option_group(
    max_expansions_option,
    option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="S",
        heading="Limits",
        help="Seconds; then the best so far.",
    ),
    option(
        "--threads",
        type=click.IntRange(1),
        metavar="N",
        heading="Limits",
        help="Of torch on the CPU; one for small models.",
    ),
    option(
        "--max-tokens",
        type=click.IntRange(1),
        metavar="N",
        heading="Limits",
        help="Tokens of finished thoughts; then the best so far.",
    ),
)

trace_detail_options = option_group(
    option(
        "--trace-level",
        type=click.Choice(get_args(Detail)),
        default="events",
        heading="Output",
        help="Of decoding: a line for all steps at once, one for each, and each one's tokens too.",
    ),
    option(
        "--trace-text",
        type=click.Choice(["full", "none"]),
        default="full",
        heading="Output",
        help="none leaves the words of problem, thoughts and answer out of the trace.",
    ),
)

config_option = option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    heading="Output",
    is_eager=True,
    expose_value=False,
    callback=take_defaults,
    help="Defaults from a TOML file; flags and the environment win.",
)
