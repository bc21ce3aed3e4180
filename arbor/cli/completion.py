"""``arbor completion``: shell scripts that complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from arbor.cli.command import Command
from arbor.cli.options import COMPLETION, output_options
from arbor.cli.output import Output

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
