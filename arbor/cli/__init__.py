"""The command ``arbor``: results on stdout, everything else on stderr, an exit code per outcome.

Nothing here imports torch before the arguments have been checked.
"""

from arbor.cli.app import main

__all__ = ["main"]
