"""Click's commands, with options grouped in the help, and groups that import commands on demand."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from arbor.errors import UsageError, did_you_mean

HELP_ALL = "help_all"  # key of a context's `meta`: the help shows every option
SHORT_HELP_END = "--help-all shows every option, the environment variables and the exit codes."
EXIT_CODES = """\b
Every option is an environment variable too:
  ARBOR_SOLVE_BUDGET=0.5 is 'solve --budget 0.5'.
  ARBOR_SOLVE_SET="width=3 'key=a b'" has two values, quoted as in a shell.
Budgets: docs/budget.md   errors: docs/errors.md   traces: docs/trace.md

\b
Exit codes (docs/errors.md):
  0 done   1 bug   2 usage   3 no answer found   4 unreadable input   5 model
  6 memory or budget   7 check failed   8 worker died   130 Ctrl-C   143 SIGTERM
  After either 'serve' lets its requests end, and ends with 0."""

GENERAL = "General"
# read by the package itself, and by its tests
OTHER_VARIABLES = (
    "ARBOR_API_KEYS",
    "ARBOR_CACHE",
    "ARBOR_NATIVE",
    "ARBOR_NATIVE_FILE",
    "ARBOR_NVTX",
    "ARBOR_PLUGINS",
    "ARBOR_TEST_DATA",
    "ARBOR_TEST_MODELS",
)
LAST_HEADINGS = ("Output", GENERAL)  # others come in the order of the options

F = TypeVar("F", bound=Callable[..., Any])


class Option(click.Option):
    """An option with a heading in the help."""

    def __init__(
        self,
        *arguments: Any,
        heading: str = GENERAL,
        common: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.heading = heading
        self.common = common

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """What its variable holds; the words, as a shell splits them, if it may be repeated.

        Raises:
            BadParameter: a quotation mark, or a backslash, has nothing that follows.
        """
        text = self.resolve_envvar_value(ctx)
        if text is None or not self.multiple:
            return super().value_from_envvar(ctx)
        try:
            return shlex.split(text)
        except ValueError as error:
            wrong = f"its environment variable is {text}: {str(error).lower()}."
            raise click.BadParameter(f"{wrong} Quote each word as in a shell.") from error


class DocumentedCommand(click.Command):
    """A command with a short help, and with a long one: ``--help-all``.

    The short help has the options marked `common`; the long one has all, under their headings, and
    ends with the exit codes.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's parameters, ``--help`` and ``--help-all``."""
        return [*super().get_params(ctx), self._help_all]

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """The names of the short help, whatever context asks first: click keeps the option."""
        return ["-h", "--help"]

    @cached_property
    def _help_all(self) -> Option:
        return Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            allow_from_autoenv=False,
            callback=_show_all,
            help="Show every option and exit.",
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the common options, or all of them under their headings."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes where the other options are, or the exit codes."""
        formatter.write_paragraph()
        formatter.write_text(EXIT_CODES if ctx.meta.get(HELP_ALL) else SHORT_HELP_END)


class Command(DocumentedCommand):
    """A command that refuses options of the settings that ``--set`` takes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments.

        Raises:
            UsageError: names the setting of an option or of a variable that does not exist.
        """
        words = [*args]  # the parser takes words away
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for name in self.set_only:
                flag = flag_of(name)
                for each, value in ((flag, _value_of(flag, words)), (f"--no-{flag[2:]}", "false")):
                    if error.option_name == each:
                        raise _is_now(ctx, each, f"--set {name}={value}") from error
            raise
        for name in self.set_only:
            variable = f"{ctx.auto_envvar_prefix}_{name.upper()}"
            if (given := os.environ.get(variable)) and not ctx.resilient_parsing:
                new = _quoted(shlex.quote(f"{name}={given}"))
                raise _is_now(ctx, variable, f"{ctx.auto_envvar_prefix}_SET={new}")
        return rest

    @property
    def set_only(self) -> dict[str, Any]:
        """The settings that ``--set`` takes and that have no option, by name."""
        known = getattr(self.callback, "known", {})
        return {name: each for name, each in known.items() if each.about.shown == "set"}


class Group(DocumentedCommand, click.Group):
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
        """A command by its name; an unknown command's error suggests the closest match."""
        known = self.list_commands(ctx)
        if args and args[0] == "help" and "help" not in known:
            args = args[1:]
            if not args or args[0].startswith("-"):
                ctx.meta[HELP_ALL] = "--help-all" in args
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*args, "--help"]
        mistyped = args and not args[0].startswith("-") and args[0] not in known
        if mistyped and not ctx.resilient_parsing:  # which completion is
            guess = did_you_mean(args[0], known).strip() or f"Commands: {', '.join(known)}."
            ctx.fail(f"No such command '{args[0]}'. {guess}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands and their purposes; imports none."""
        rows = [(name, self._purpose(name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands with this beginning, then options; imports none."""
        begun = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._purpose(name)) for name in begun]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _purpose(self, name: str) -> str:
        known = self.lazy.get(name)
        return known[1] if known else self.commands[name].get_short_help_str(100)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, then the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


def option(*names: str, heading: str, common: bool = False, **settings: Any) -> Callable[[F], F]:
    """`click.option` under a heading, perhaps in the short help too; its default is shown."""
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, cls=Option, heading=heading, common=common, **settings)


def option_group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in the order given."""

    def decorate(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


class WholeNumber(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; the error names the bounds."""
        try:
            if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
                raise click.BadParameter("neither true nor a fraction is a whole number")
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} must be a whole number{_bounds(self)}.", param, ctx)


class Number(click.FloatRange):
    """A number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; the error names the bounds."""
        try:
            if isinstance(value, bool) or value != value:
                raise click.BadParameter("neither true nor nan is a number")
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} must be a number{_bounds(self)}.", param, ctx)

    def _describe_range(self) -> str:
        """click's, for help pages; nothing without bounds."""
        return "" if self.min is None and self.max is None else super()._describe_range()


def _bounds(range_: click.IntRange | click.FloatRange) -> str:
    """`` > 0 and <= 1``."""
    low = [] if range_.min is None else [f" {'>' if range_.min_open else '>='} {range_.min:g}"]
    high = [] if range_.max is None else [f" {'<' if range_.max_open else '<='} {range_.max:g}"]
    return " and".join([*low, *high])


def unknown_variables(root: click.Group) -> list[str]:
    """A warning for every ARBOR_ variable that sets nothing, with the closest name.

    Only the command that a variable names is imported.
    """
    warnings = []
    for variable in sorted(os.environ):
        if not variable.startswith("ARBOR_") or variable in OTHER_VARIABLES:
            continue
        known = _variables(root, "ARBOR", variable)
        if variable not in known:
            guess = did_you_mean(variable, known).strip()
            warnings.append(f"the environment variable {variable} sets nothing. {guess}".rstrip())
    return warnings


def _variables(command: click.Command, prefix: str, variable: str) -> list[str]:
    """Variables of a command's options, and of the subcommand that `variable` names."""
    names = [p.name for p in command.params if p.name and isinstance(p, click.Option)]
    names += getattr(command, "set_only", {})
    found = [f"{prefix}_{name.upper()}" for name in names]
    if isinstance(command, Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = f"{prefix}_{name.upper().replace('-', '_')}"
            if variable.startswith(f"{below}_"):
                subcommand = command.get_command(context, name)
                found += _variables(subcommand, below, variable) if subcommand else []
    return found


def flag_of(name: str) -> str:
    """``max_depth`` -> ``--max-depth``."""
    return f"--{name.replace('_', '-')}"


def _value_of(flag: str, args: list[str]) -> str:
    """The value that a flag was given on the command line; its kind where there is none."""
    for place, word in enumerate(args):
        if word.startswith(f"{flag}="):
            return shlex.quote(word.partition("=")[2])
        if word == flag:
            following = args[place + 1 : place + 2]
            return shlex.quote(following[0]) if following and following[0][:1] != "-" else "true"
    return "VALUE"


def _quoted(words: str) -> str:
    """Quoted words as one word of a shell, in double quotes where they need no more."""
    plain = "'" not in words or any(each in words for each in ('"', "$", "`", "!", r"\\"))
    return shlex.quote(words) if plain else f'"{words}"'


def _is_now(ctx: click.Context, former: str, name: str) -> UsageError:
    return UsageError("usage", f"{former} is now {name}.", f"See '{ctx.command_path} --help-all'.")


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Prints the long help, and ends."""
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _write_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Writes the common options as one list, or all of them under their headings."""
    groups: dict[str, list[tuple[str, str]]] = {}
    everything = ctx.meta.get(HELP_ALL, False)
    for parameter in command.get_params(ctx):
        row = parameter.get_help_record(ctx)
        if row is None or not isinstance(parameter, click.Option):
            continue
        if everything:
            groups.setdefault(getattr(parameter, "heading", GENERAL), []).append(row)
        elif getattr(parameter, "common", False):
            groups.setdefault("Options", []).append(row)
    last = [heading for heading in LAST_HEADINGS if heading in groups]
    for heading in [*(each for each in groups if each not in last), *last]:
        with formatter.section(heading):
            formatter.write_dl(groups[heading])
