"""``arbor man``: the manual page of the command, from the help of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

from arbor._version import __version__
from arbor.cli.command import EXIT_CODES, LAST_HEADINGS, Command
from arbor.cli.options import COMPLETION, output_options
from arbor.cli.output import Output

VERBATIM = "\b"  # click's mark of a paragraph whose lines stay as they are


@click.command(cls=Command)
@output_options
@click.pass_context
def man(ctx: click.Context) -> int:
    """Print the manual page, in the format of man.

    \b
      arbor man | less
      arbor man > ~/.local/share/man/man1/arbor.1
      arbor man | gzip > arbor.1.gz
    """
    ctx.ensure_object(Output).print("\n".join(man_page(ctx.find_root())))
    return 0


def man_page(root: click.Context) -> Iterator[str]:
    """The lines of the page.

    Args:
        root: the context of ``arbor``.
    """
    command = root.command
    assert isinstance(command, click.Group), "arbor is a group of commands"
    yield f'.TH ARBOR 1 "" "arbor {__version__}"'
    yield ".SH NAME"
    yield _plain("arbor - tree search for language models, within a KV budget")
    yield ".SH SYNOPSIS"
    yield f".B arbor\n{_plain('COMMAND [OPTIONS] ...')}"
    yield ".SH DESCRIPTION"
    yield from _paragraphs(command.help or "")
    yield ".SH COMMANDS"
    for name in command.list_commands(root):
        yield from _command(command, name, root, "arbor")
    yield ".SH OPTIONS OF EVERY COMMAND"
    for param in command.get_params(root):
        record = param.get_help_record(root)
        if record is not None:
            yield from _entry(*record)
    yield ".SH ENVIRONMENT AND EXIT CODES"
    yield from _paragraphs(EXIT_CODES)


def _command(group: click.Group, name: str, above: click.Context, path: str) -> Iterator[str]:
    command = group.get_command(above, name)
    assert command is not None, f"the group lists {name}"
    ctx = click.Context(command, parent=above, info_name=name)
    words = " ".join(command.collect_usage_pieces(ctx))
    yield f".SS {_plain(f'{path} {name} {words}')}"
    yield from _paragraphs(command.help or "")
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and record[1] and getattr(param, "heading", "") not in LAST_HEADINGS:
            yield from _entry(*record)
    if isinstance(command, click.Group):
        for each in command.list_commands(ctx):
            yield from _command(command, each, ctx, f"{path} {name}")


def _entry(names: str, text: str) -> Iterator[str]:
    """An option and what it does."""
    yield f".TP\n.B {_plain(names)}\n{_plain(text)}"


def _paragraphs(text: str) -> Iterator[str]:
    """A help text: paragraphs, some of them line by line."""
    for part in text.strip().split("\n\n"):
        lines = [line for line in part.splitlines() if line.strip() != VERBATIM]
        if not lines:
            continue
        yield ".PP"
        if len(lines) < len(part.splitlines()):
            yield from (".nf", *(_plain(line) for line in lines), ".fi")
        else:
            yield _plain(" ".join(line.strip() for line in lines))


def _plain(text: str) -> str:
    """Text that man takes as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
@output_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print a script that completes commands, options and names on TAB.

    \b
      arbor completion bash >> ~/.bashrc
      arbor completion zsh >> ~/.zshrc
      arbor completion fish > ~/.config/fish/completions/arbor.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click completes for {shell}"
    script = kind(ctx.find_root().command, {}, "arbor", COMPLETION).source()
    ctx.ensure_object(Output).print(script.rstrip())
    return 0
