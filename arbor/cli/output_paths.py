"""Checks of output paths before work: writable, distinct, not an input, not there already."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from arbor.cli.output import ClosedStdout
from arbor.errors import UsageError

STDOUT = Path("-")


def refuse_overwriting(outputs: Mapping[str, Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuses an output that is an input, or another output.

    Raises:
        UsageError: names the flag that needs another file.
    """
    taken = {os.path.realpath(path) for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise UsageError(
                "output-is-input",
                f"{path} is an input, or the file of another option.",
                f"Name another file with {flag}.",
            )
        taken.add(os.path.realpath(path))


def refuse_closed_stdout() -> None:
    """Refuses a stdout that the shell has closed, before the result that it would lose.

    Raises:
        UsageError: it is closed.
    """
    if isinstance(sys.stdout, ClosedStdout):
        sys.stdout.write("")


def refuse_unwritable(flag: str, path: Path | None) -> None:
    """Refuses an output that cannot be written.

    Raises:
        UsageError: it is a folder, is not writable, or its folder does not exist.
    """
    if path is None:
        return
    hint = f"name another file with {flag}."
    try:
        target = path.resolve()
        if path.is_dir():
            reason, hint = f"{path} is a folder.", f"name a file with {flag}."
        elif not target.parent.is_dir():
            folder = target.parent if path.is_symlink() else path.parent
            reason, hint = f"the folder {folder} does not exist.", f"create it, or {hint}"
        elif not os.access(target if target.exists() else target.parent, os.W_OK):
            reason = f"{path} is not writable."
        else:
            return
    except (OSError, RuntimeError) as error:  # a name too long, circular links
        reason = f"{path}: {error.strerror if isinstance(error, OSError) else error}."
    raise UsageError("output-nowhere", reason, f"{hint[0].upper()}{hint[1:]}")
