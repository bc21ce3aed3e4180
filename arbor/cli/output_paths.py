"""Where commands write: never over what they read, and never where it turns out too late that they cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from arbor.errors import UsageError

STDOUT = Path("-")


def refuse_overwriting(outputs: Mapping[str, Path | None], inputs: Iterable[Path | None]) -> None:
    """Before any work: an output that is an input, or that another one goes to as well.

    Args:
        outputs: by the flag that names each; None where it was not given.
        inputs: files that are read; None where there is none.

    Raises:
        UsageError: says which flag to give another file.
    """
    taken = {os.path.realpath(path) for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise UsageError(
                "output-is-input",
                f"{path} is read, or written by another option.",
                f"Name another file with {flag}.",
            )
        taken.add(os.path.realpath(path))


def refuse_unwritable(flag: str, path: Path | None) -> None:
    """Before any work: an output that cannot be a file.

    Raises:
        UsageError: it is a folder, may not be written, or is in a folder that is not there.
    """
    if path is None:
        return
    try:
        is_folder, target = path.is_dir(), path.resolve()
        missing = not target.parent.is_dir()
        allowed = missing or os.access(target if target.exists() else target.parent, os.W_OK)
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            "output-nowhere", f"{path}: {reason}.", f"Name another file with {flag}."
        ) from error
    if is_folder:
        raise UsageError("output-nowhere", f"{path} is a folder.", f"Name a file with {flag}.")
    if missing:
        raise UsageError(
            "output-nowhere",
            f"there is no folder {target.parent if path.is_symlink() else path.parent}.",
            f"Make it, or name another file with {flag}.",
        )
    if not allowed:
        raise UsageError(
            "output-nowhere", f"{path} may not be written.", f"Name another file with {flag}."
        )
