"""The entry point: signals are handled before anything else is imported."""

from __future__ import annotations

from collections.abc import Sequence

from arbor.cli.signals import end_at_once, ending_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; a signal while it is imported or ends ends the process with one line.

    Args:
        arguments: instead of the process's own.

    Returns:
        The exit code.
    """
    if arguments is None:
        end_at_once()  # also while the interpreter shuts down
    with ending_at_once():
        from arbor.cli.app import main as run

        return run(arguments)
