"""Atomic writes: a reader finds the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from pathlib import Path

from arbor.errors import UsageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # also a quota, and a limit of the process
FREE_SPACE = "Free some space first."

# names of open streams, whatever is behind them
STREAMS = re.compile(r"/dev/(stdin|stdout|stderr|fd/.*)|/proc/[^/]+/fd/.*")


def write_atomically(path: Path, data: str | bytes) -> None:
    """Writes a file; an existing one is unchanged until the new one is complete.

    A link stays a link. Devices, pipes and ``/dev/stdout`` are appended to, not replaced.

    Args:
        path: a file in an existing folder.
        data: bytes, or text, encoded as UTF-8 with escapes for lone surrogates.

    Raises:
        UsageError: the file cannot be written; an existing one is as it was.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    try:
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
        else:
            _replace(path.resolve(), data)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        full = isinstance(error, OSError) and error.errno in DISK_FULL
        raise UsageError(
            "output-unwritable",
            f"{path} cannot be written: {reason}.",
            FREE_SPACE if full else "Name a file in a folder that exists and may be written.",
            path=str(path),
        ) from error


def _is_stream(path: Path) -> bool:
    mode = _mode(path)
    named = STREAMS.fullmatch(path.absolute().as_posix())
    return named is not None or (mode is not None and not stat.S_ISREG(mode))


def _mode(path: Path) -> int | None:
    """What a path is, and its permissions; None: nothing is there, as far as can be seen."""
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _replace(target: Path, data: bytes) -> None:
    """Replaces a file, keeping its permissions; overwrites it if its folder is not writable.

    Another process may delete it meanwhile.

    Raises:
        OSError: no space, or no permission.
    """
    mode = _mode(target)
    if mode is not None and not os.access(target, os.W_OK) and target.exists():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    if mode is not None and not os.access(target.parent, os.W_OK):
        _overwrite(target, data)
        return
    draft = target.with_name(f".arbor-{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_bytes(data)
        if mode is not None:
            draft.chmod(stat.S_IMODE(mode))
        draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _overwrite(target: Path, data: bytes) -> None:
    """Overwrites a file where it is; writes the old bytes back if the new ones do not fit.

    Raises:
        OSError: no space.
    """
    old = target.read_bytes() if os.access(target, os.R_OK) else None
    try:
        target.write_bytes(data)
    except OSError:
        if old is not None:
            with contextlib.suppress(OSError):
                target.write_bytes(old)
        raise
