"""The command ``arbor``: results on stdout, everything else on stderr, an exit code per outcome.

Nothing here imports torch before the arguments have been checked, and nothing but the standard
library before signals are handled.
"""

from arbor.cli.entry import main

__all__ = ["main"]
