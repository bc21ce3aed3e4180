"""KeepKV: the folder in which KV of prompts outlives a run, and how large it may become."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arbor.budget import Budget
from arbor.engine.mode_names import ModeSettings
from arbor.errors import UsageError
from arbor.support.setting import setting

if TYPE_CHECKING:
    from arbor.memory.prompt_files import PromptFiles
    from arbor.model.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


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
                f"keep_kv={path}: KV of a lossy search is not exact.",
                "Leave it out, or choose mode=lossless.",
            )
        return cls(path, limit)

    def files(self, checkpoint: Checkpoint) -> PromptFiles | None:
        """The KV of earlier prompts of a loaded model; None where its commit is not known."""
        from arbor.memory.prompt_files import PromptFiles
        from arbor.model.kv_identity import kv_identity

        weights, source = checkpoint.load(), checkpoint.source
        identity = kv_identity(
            weights.runner, source, weights.backend, deterministic=checkpoint.deterministic
        )
        if identity is None:
            logger.warning("no KV is kept: the commit of %s is not known", source.label)
            return None
        return PromptFiles(self.folder, identity, self.limit)


def _folder(given: str | os.PathLike[str]) -> Path:
    name = os.fspath(given)
    reason = "not a folder"
    try:
        path = Path(name).expanduser()
        if name and (path.is_dir() or not path.exists()):
            return path
    except (OSError, RuntimeError, ValueError) as error:  # unreadable, no such user, not a path
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    raise UsageError("keep-kv", f"keep_kv={name}: {reason}.", "Name a folder.")


def _bytes(size: str | int) -> int:
    parsed = Budget.absolute(size, "bytes")
    if parsed is None:
        raise UsageError(
            "keep-kv", f"keep_kv_size={size}: not a size in bytes.", "Write 4GiB or 512MiB."
        )
    return int(parsed.amount)


@dataclass(frozen=True, kw_only=True)
class KeepKVSettings(ModeSettings):
    """The folder of a solver.

    Attributes:
        keep_kv: a folder in which the KV of prompts outlives the run, so that later runs with this
            model load the beginnings they have in common instead of computing them (docs/tiers.md).
        keep_kv_size: most bytes in that folder; what was used least recently goes first.
    """

    HEADING = "KV budget"

    keep_kv: str | os.PathLike[str] | None = setting(
        None,
        "Keep the KV of prompts in a folder, for later runs that begin alike.",
        shown="set",
        metavar="DIR",
        recorded="never",
    )
    keep_kv_size: str | int = setting(
        "4GiB",
        "Most bytes in that folder; the least recently used go first.",
        shown="set",
        metavar="SIZE",
        recorded="never",
    )

    @property
    def kept_prompts(self) -> KeepKV | None:
        """The folder, checked; None: nothing is kept.

        Raises:
            UsageError: see `KeepKV.parse`.
        """
        return KeepKV.parse(self.keep_kv, self.keep_kv_size, self.mode)
