"""Writes a file as a whole: whoever reads it finds the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

from arbor.errors import UsageError

NAME_A_FILE = "Name a file in a folder that exists and may be written."


def write_whole(path: Path, data: str | bytes, hint: str = NAME_A_FILE) -> None:
    """Writes a file in one go; what there is stays as it is until the new one is complete.

    A link stays a link, and a device or a pipe is written to and not replaced.

    Args:
        path: of the file, in a folder that exists.
        data: bytes, or text, which becomes UTF-8; what UTF-8 cannot hold becomes an escape.
        hint: for the error.

    Raises:
        UsageError: it cannot be written.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                stream.write(data)
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        raise UsageError(
            "output-unwritable",
            f"{path} cannot be written: {error.strerror}.",
            hint,
            path=str(path),
        ) from error


def _replace(target: Path, data: bytes) -> None:
    """Puts a new file, with the old one's permissions, in the place of a file."""
    draft = target.with_name(f".arbor-{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_bytes(data)
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
