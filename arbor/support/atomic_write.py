"""Writes a file as a whole: whoever reads it finds the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
from pathlib import Path

from arbor.errors import UsageError

# names of streams that are open already, whatever they lead to
STREAMS = re.compile(r"/dev/(stdin|stdout|stderr|fd/.*)|/proc/[^/]+/fd/.*")


def write_atomically(path: Path, data: str | bytes) -> None:
    """Writes a file in one go; what there is stays as it is until the new one is complete.

    A link stays a link. A device, a pipe, and whatever lies behind ``/dev/stdout``, is added to and not replaced.

    Args:
        path: of the file, in a folder that exists.
        data: bytes, or text, which becomes UTF-8; what UTF-8 cannot hold becomes an escape.

    Raises:
        UsageError: it cannot be written.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    try:
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
        else:
            _replace(path.resolve(), data)
    except (OSError, RuntimeError) as error:  # the latter for links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            "output-unwritable",
            f"{path} cannot be written: {reason}.",
            "Name a file in a folder that exists and may be written.",
            path=str(path),
        ) from error


def _is_stream(path: Path) -> bool:
    named = STREAMS.fullmatch(path.absolute().as_posix())
    return named is not None or (path.exists() and not path.is_file())


def _replace(target: Path, data: bytes) -> None:
    """Puts a new file, with the old one's permissions, in the place of a file; in a folder that takes no new one, writes
    to the old one.

    Raises:
        OSError: there is no room, or the file or the folder may not be written.
    """
    there = target.exists()
    if there and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    if there and not os.access(target.parent, os.W_OK):
        target.write_bytes(data)
        return
    draft = target.with_name(f".arbor-{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_bytes(data)
        if there:
            shutil.copymode(target, draft)
        draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
