"""Options that commands share, and a help page that groups them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from arbor import registry
from arbor.cli.configure import take_defaults, take_preset
from arbor.cli.output import LOG_LEVELS, LOG_SETTINGS, Output, listen_to_the_log
from arbor.errors import did_you_mean
from arbor.events import Detail
from arbor.run.presets import PRESETS

EXIT_GATE = 7  # a check or a gate failed
# whoever reads it says what is wrong with it, and exits as for unreadable input
TRACE_PATH = click.Path(path_type=Path, readable=False)
EXIT_CODES = """\b
Every option is an environment variable too: ARBOR_SOLVE_BUDGET=0.5 is 'solve --budget 0.5'.
Budgets: docs/budget.md   errors: docs/errors.md   traces: docs/trace.md

\b
Exit codes (docs/exit-codes.md):
  0 done   1 bug   2 usage   3 no answer found   4 unreadable input   5 model
  6 memory or budget   7 check failed   130 Ctrl-C   143 SIGTERM"""

COMPLETION = "_ARBOR_COMPLETE"  # set by the shell that asks for completions
LAST_HEADINGS = ("Output", "Options")

F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *arguments: Any, heading: str = "Options", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.heading = heading


def _write_groups(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        row = parameter.get_help_record(ctx)
        if row is not None and isinstance(parameter, click.Option):
            groups.setdefault(getattr(parameter, "heading", "Options"), []).append(row)
    for heading in sorted(groups, key=lambda name: name in LAST_HEADINGS):
        with formatter.section(heading):
            formatter.write_dl(groups[heading])


class Command(click.Command):
    """A command whose help groups its options and ends with the exit codes."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options under their headings."""
        _write_groups(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the exit codes."""
        formatter.write_paragraph()
        formatter.write_text(EXIT_CODES)


class Group(click.Group):
    """A group of such commands, in the order they were added."""

    command_class = Command
    group_class = type

    def __init__(
        self, *arguments: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.lazy = dict(lazy or {})  # name -> (module:command, its first line of help)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names, imported or not."""
        return list(dict.fromkeys([*self.lazy, *self.commands]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name; imports it now."""
        if cmd_name in self.lazy and cmd_name not in self.commands:
            module, _, attribute = self.lazy[cmd_name][0].partition(":")
            self.add_command(getattr(importlib.import_module(module), attribute), cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A command by its name; the error for one that there is not names the nearest."""
        known = self.list_commands(ctx)
        mistyped = args and not args[0].startswith("-") and args[0] not in known
        if mistyped and not ctx.resilient_parsing:  # which completion is
            guess = did_you_mean(args[0], known).strip() or f"Commands: {', '.join(known)}."
            ctx.fail(f"No such command '{args[0]}'. {guess}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands and what they are for; imports none."""
        told = [(name, self._purpose(name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(told)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, then options; imports none."""
        begun = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._purpose(name)) for name in begun]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _purpose(self, name: str) -> str:
        known = self.lazy.get(name)
        return known[1] if known else self.commands[name].get_short_help_str(100)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, then the options under their headings."""
        self.format_commands(ctx, formatter)
        _write_groups(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the exit codes."""
        formatter.write_paragraph()
        formatter.write_text(EXIT_CODES)


def option(*names: str, heading: str, **settings: Any) -> Callable[[F], F]:
    """`click.option` under a heading; its default is shown."""
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, cls=Option, heading=heading, **settings)


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in the order given."""

    def decorate(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def _set(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keeps a setting that was given; the one after the command wins over the one before it."""
    name = parameter.name or ""
    voice = ctx.ensure_object(Output)
    if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
        setattr(voice, name, value)
        if name in LOG_SETTINGS:
            listen_to_the_log(voice)


def names_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completes the names of a kind, plugins' included; imports none of them."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        return [name for name in registry.names(kind) if name.startswith(begun)]

    return complete


_SHARED: dict[str, Any] = {"heading": "Output", "expose_value": False, "callback": _set}

output_options = together(
    option("--json", is_flag=True, help="One JSON document on stdout.", **_SHARED),
    option("-q", "--quiet", is_flag=True, help="Nothing but the result and errors.", **_SHARED),
    option("-v", "--verbose", count=True, help="More on stderr; -vv for everything.", **_SHARED),
    option(
        "--display",
        type=click.Choice(["auto", "live", "plain", "none"]),
        default="auto",
        help="Progress on stderr: auto is live on a terminal, elsewhere a line each 30 s.",
        **_SHARED,
    ),
    option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="auto follows the terminal, NO_COLOR and FORCE_COLOR.",
        **_SHARED,
    ),
    option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        help="What of the log is shown; warning without -q and -v.",
        **_SHARED,
    ),
    option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help="Append the whole log to FILE, one JSON object a line.",
        **_SHARED,
    ),
    option("--debug", is_flag=True, help="Python's traceback with every error.", **_SHARED),
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

search_shape_options = together(
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
        "--depth",
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

retention_options = together(
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

loading_options = together(
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
        "--attn",
        default="auto",
        metavar="NAME",
        heading="Model",
        shell_complete=names_of("backend"),
        help="What computes attention: auto, flashinfer, torch, rowwise, reference.",
    ),
    trust_option,
)

search_options = together(
    search_shape_options, budget_option, policy_option, retention_options, loading_options
)

model_option = option(
    "--model",
    default="builtin:sapling",
    metavar="NAME|DIR",
    heading="Model",
    help="Built in, a directory, or a Hub id.",
)

sampling_options = together(
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

limit_options = together(
    option(
        "--max-expansions",
        type=click.IntRange(1),
        metavar="N",
        heading="Limits",
        help="Leaves grown.",
    ),
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

trace_detail_options = together(
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
