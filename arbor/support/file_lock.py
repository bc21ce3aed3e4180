"""The lock of an open file: one process, or one open file of a process, has it at a time."""

from __future__ import annotations

import contextlib
from io import IOBase


def locked(file: IOBase) -> bool:
    """Lock a file until `unlock`; whether no other has it, as far as the system knows locks.

    Args:
        file: open for writing.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def unlock(file: IOBase) -> None:
    """Close a locked file; its lock ends here even if a fork of this process has the file open."""
    if not file.closed:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
