"""The rich console that the command writes with."""

from __future__ import annotations

from rich.console import Console


class PipedConsole(Console):
    """A console that leaves a closed pipe to its caller, as everything else that writes does."""

    def on_broken_pipe(self) -> None:
        """Raises the error again instead of ending the process."""
        raise
