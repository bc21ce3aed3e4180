"""KeepKV: the folder in which KV of prompts outlives a run, and how large it may become."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from arbor.budget import Budget
from arbor.errors import UsageError

DEFAULT_SIZE = "4GiB"


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Where KV of prompts is kept for later runs.

    Attributes:
        folder: created when it is first written.
        limit: bytes of all files in it.
    """

    folder: Path
    limit: int

    @classmethod
    def parse(
        cls, folder: str | os.PathLike[str] | None, size: str | int, mode: str
    ) -> KeepKV | None:
        """The settings of a solver, checked; None: nothing is kept.

        Args:
            folder: None for none.
            size: as a user writes it, ``4GiB``.
            mode: of the search.

        Raises:
            UsageError: not a size in bytes, a path that is not a folder, or lossy mode, whose KV is
                not what later runs would compute.
        """
        limit = _bytes(size)
        if folder is None:
            return None
        path = _folder(folder)
        if mode != "lossless":
            raise UsageError(
                "keep-kv",
                f"--keep-kv {path}: KV of a lossy search is not exact.",
                "Leave it out, or choose --mode lossless.",
            )
        return cls(path, limit)


def _folder(given: str | os.PathLike[str]) -> Path:
    name = os.fspath(given)
    reason = "not a folder"
    try:
        path = Path(name).expanduser()
        if name and (path.is_dir() or not path.exists()):
            return path
    except (OSError, RuntimeError, ValueError) as error:  # unreadable, no such user, not a path
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    raise UsageError("keep-kv", f"--keep-kv {name}: {reason}.", "Name a folder.")


def _bytes(size: str | int) -> int:
    parsed = Budget.absolute(size, "bytes")
    if parsed is None:
        raise UsageError(
            "keep-kv", f"--keep-kv-size {size}: not a size in bytes.", "Write 4GiB or 512MiB."
        )
    return int(parsed.amount)
