"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from arbor.cli.command import GENERAL, F, option, option_group
from arbor.cli.configure import take_defaults, take_preset
from arbor.cli.output import LOG_SETTINGS, Output, configure_log
from arbor.run.presets import PRESETS

EXIT_GATE = 7  # a check or a gate failed
# commands validate the path themselves (exit code 4)
TRACE_PATH = click.Path(path_type=Path, readable=False)
COMPLETION = "_ARBOR_COMPLETE"  # set by the shell that asks for completions


def _set_output(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Stores a given setting; one after the command wins over one before it."""
    name = parameter.name or ""
    output = ctx.ensure_object(Output)
    if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
        setattr(output, name, value)
        if name in LOG_SETTINGS:
            configure_log(output)


def _general(*names: str, **settings: Any) -> Callable[[F], F]:
    return option(*names, heading=GENERAL, expose_value=False, callback=_set_output, **settings)


output_options = option_group(
    _general("--json", is_flag=True, common=True, help="Print one JSON document on stdout."),
    _general("-q", "--quiet", is_flag=True, common=True, help="Print only the result and errors."),
    _general("-v", "--verbose", count=True, help="Print more on stderr; -vv prints everything."),
    _general(
        "--display",
        type=click.Choice(["auto", "live", "plain", "none"]),
        default="auto",
        help="Progress on stderr; auto: live on a terminal, else a line every 30 s.",
    ),
    _general(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="Colors; auto follows the terminal, NO_COLOR and FORCE_COLOR.",
    ),
    _general(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Append the whole log to FILE, one JSON object per line.",
    ),
    _general("--debug", is_flag=True, help="Print Python's traceback with every error."),
)

preset_option = option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    heading="Search",
    is_eager=True,
    expose_value=False,
    callback=take_preset,
    help="A paper's search; other options win.",
)

config_option = option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    heading="Output",
    is_eager=True,
    expose_value=False,
    callback=take_defaults,
    help="Defaults from a TOML file; flags and environment variables win.",
)
