"""The rich console of the command."""

from __future__ import annotations

from rich.console import Console


class PipedConsole(Console):
    """A console that raises BrokenPipeError for a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Raises the error again instead of ending the process."""
        raise
