"""The command ``arbor``: results on stdout, everything else on stderr, an exit code per outcome.

Nothing here imports torch before the arguments have been checked, and nothing but the standard
library before signals are handled.
"""

from __future__ import annotations

from arbor.cli import signals as _signals

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; a signal while it is imported or ends ends the process with one line."""
    if arguments is None:
        _signals.end_at_once()  # also while the interpreter shuts down
    with _signals.ending_at_once():
        from arbor.cli.app import main as run

        return run(arguments)
