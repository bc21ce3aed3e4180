"""Tiers: where KV that has left the device is kept: host memory, a disk, a folder of prompts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arbor.budget import Budget
from arbor.engine.mode_names import SIMILAR, ModeSettings
from arbor.errors import UsageError
from arbor.model.checkpoint import Checkpoint, ModelSettings
from arbor.support.packed_size import BITS, GROUP, group_bytes, packed_tokens
from arbor.support.setting import setting

if TYPE_CHECKING:
    from arbor.memory.prompt_files import PromptFiles
    from arbor.memory.stores import LowerRoom

logger = logging.getLogger(__name__)

MOST_TOKENS = 2**31 - 1  # of a tier: records have 32-bit numbers


def _size(name: str, given: str | int | Budget | None) -> Budget | None:
    """A size as a user writes it; None for none.

    Raises:
        UsageError: not a size.
    """
    if given is None or given in (0, "0"):
        return None
    size = Budget.absolute(given, "tokens", "bytes")
    if size is None:
        raise UsageError(
            "tier-size", f"{name}={given}: not a size.", "Write 8GiB or 20000tok, or 0 for none."
        )
    return size


def _bytes(size: str | int | Budget) -> Budget:
    parsed = Budget.absolute(size, "bytes")
    if parsed is None:
        raise UsageError(
            "keep-kv", f"keep_kv_size={size}: not a size in bytes.", "Write 4GiB or 512MiB."
        )
    return parsed


def _folder(given: str | os.PathLike[str]) -> Path:
    """A folder, or the place for one.

    Raises:
        UsageError: a path that is not a folder.
    """
    name = os.fspath(given)
    reason = "not a folder"
    try:
        path = Path(name).expanduser()
        if name and (path.is_dir() or not path.exists()):
            return path
    except (OSError, RuntimeError, ValueError) as error:  # unreadable, no such user, not a path
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    raise UsageError("keep-kv", f"keep_kv={name}: {reason}.", "Name a folder.")


def _tokens(name: str, size: Budget | None, bytes_per_token: int) -> int:
    """Tokens of a tier; errors as for `_fewer`."""
    if size is None:
        return 0
    amount = int(size.amount)
    return _fewer(name, size, amount if size.unit == "tokens" else amount // bytes_per_token)


def _fewer(name: str, size: Budget, tokens: int) -> int:
    """The tokens of a tier.

    Raises:
        UsageError: more than there may be.
    """
    if tokens > MOST_TOKENS:
        raise UsageError(
            "tier-size",
            f"{name}={size}: that is {tokens:,} tokens.",
            f"Take at most {MOST_TOKENS}tok.",
        )
    return tokens


@dataclass(frozen=True, kw_only=True)
class TierSettings(ModelSettings, ModeSettings):
    """The tiers below the device.

    Attributes:
        host: host memory for KV that has left the device, ``8GiB`` or ``20000tok``: what comes back
            from there is copied, not computed again (docs/tiers.md). By default none.
        host_bits: of a number there, 8 or 4; by default those of the model. Only in lossy mode.
            With a staging buffer a token has room there in both forms.
        staging: size of a buffer in the budget through which attention reads KV in host memory
            where it is, ``64tok`` or ``1MiB``: a path may then be longer than the budget. Nothing
            is shared between prompts and siblings then. By default KV is copied back before it is
            read.
        disk: room on disk for what the host has no room for, likewise.
        disk_dir: the folder of that file; by default the system's for temporary files.
        keep_kv: a folder in which the KV of prompts outlives the run, so that later runs with this
            model load the beginnings they have in common instead of computing them (docs/tiers.md).
        keep_kv_size: most bytes in that folder; what was used least recently goes first.
    """

    HEADING = "KV budget"

    host: Budget | None = setting(
        None,
        "Host memory for KV that left the device (8GiB, 20000tok): it is copied back.",
        metavar="SIZE",
        read=partial(_size, "host"),
    )
    host_bits: int | None = setting(
        None,
        "Bits of a number in host memory (8, 4); default: the model's. Lossy mode.",
        shown="set",
        metavar="BITS",
        needs="host",
    )
    staging: Budget | None = setting(
        None,
        "Read the host's KV where it is, through a buffer of this size (64tok).",
        shown="set",
        metavar="SIZE",
        read=partial(_size, "staging"),
        needs="host",
    )
    disk: Budget | None = setting(
        None,
        "Room on disk for what the host has no room for (50GiB).",
        shown="set",
        metavar="SIZE",
        read=partial(_size, "disk"),
    )
    disk_dir: str | os.PathLike[str] | None = setting(
        None,
        "Folder of that file; default: the system's for temporary files.",
        shown="set",
        metavar="DIR",
        read=Path,
        recorded="never",
        needs="disk",
    )
    keep_kv: str | os.PathLike[str] | None = setting(
        None,
        "Keep the KV of prompts in a folder, for later runs that begin alike.",
        shown="set",
        metavar="DIR",
        read=_folder,
        recorded="never",
    )
    keep_kv_size: Budget = setting(
        "4GiB",
        "Most bytes in that folder; the least recently used go first.",
        shown="set",
        metavar="SIZE",
        read=_bytes,
        recorded="never",
        needs="keep_kv",
    )

    @property
    def tiered(self) -> bool:
        """Whether there is a tier below the device."""
        return self.host is not None or self.disk is not None

    @property
    def staged(self) -> bool:
        """Whether attention reads KV in host memory."""
        return self.staging is not None

    def check_tiers(self) -> None:
        """Refuses lower tiers where nothing comes back from them, and packed ones where they would
        break a promise.

        Raises:
            UsageError: these settings contradict each other.
        """
        disk, bits, folder = self.disk, self.host_bits, self.disk_dir
        packed = bits is not None
        reads = f"staging={self.staging}: attention reads KV in host memory;"
        back = "selective" if self.mode == "lossless" else "off"
        if packed and bits not in BITS:
            raise UsageError(
                "host-bits", f"host_bits={bits}: KV is packed in 8 or 4 bits.", "Take 8 or 4."
            )
        if packed and disk is not None:
            raise UsageError(
                "host-bits",
                f"host_bits={bits}: KV on disk is in full precision, and packed KV never is again.",
                "Leave out disk, or host_bits.",
            )
        if self.staged and disk is not None:
            raise UsageError(
                "staging",
                f"{reads} no KV is read from a disk.",
                "Leave out disk, or leave out staging.",
            )
        if self.staged and self.share in SIMILAR:
            raise UsageError(
                "staging",
                f"{reads} no prompt is read there for another, as share={self.share} asks.",
                "Leave out share, or leave out staging.",
            )
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(
                "disk-store", f"disk_dir={folder}: there is no such folder.", "Create it first."
            )
        if self.staged and self.rehydrate != back:
            raise UsageError(
                "staging",
                "attention reads KV in host memory in lossless mode with selective rehydration, and "
                "in lossy mode with none.",
                "Leave out staging, or rehydrate.",
            )
        if packed and self.mode == "lossless":
            raise UsageError(
                "host-bits",
                f"host_bits={bits} rounds KV, and lossless mode promises exact KV.",
                "Leave it out, or take mode=lossy with rehydrate=selective or staging.",
            )
        if packed and self.kv_dtype != "auto":
            raise UsageError(
                "host-bits",
                f"host_bits={bits} quantises KV in full precision, and it is {self.kv_dtype}.",
                "Leave out host_bits, or kv_dtype.",
            )
        if self.tiered and not self.staged and self.rehydrate == "off":
            raise UsageError(
                "tier-unused",
                "KV that leaves the device never comes back in this mode.",
                "Leave out host and disk, or take rehydrate=selective.",
            )
        if self.keep_kv is not None and self.mode != "lossless":
            raise UsageError(
                "keep-kv",
                f"keep_kv={self.keep_kv}: KV of a lossy search is not exact.",
                "Leave it out, or choose mode=lossless.",
            )
        if self.keep_kv is not None and self.staged:
            raise UsageError(
                "staging",
                "a prompt that is loaded from keep_kv has to fit on the device as a whole.",
                "Leave out staging, or keep_kv.",
            )

    def staging_tokens(self, bytes_per_token: int) -> int:
        """Tokens of the staging buffer, at least 1 where there is one; argument as for
        `tier_tokens`."""
        return max(1, _tokens("staging", self.staging, bytes_per_token)) if self.staged else 0

    def tier_tokens(self, bytes_per_token: int, itemsize: int) -> tuple[int, int]:
        """Tokens that host and disk may hold.

        Args:
            bytes_per_token: KV bytes of one token over all layers.
            itemsize: bytes of a number.

        Raises:
            UsageError: more than `MOST_TOKENS`.
        """
        host = self.host
        if host is not None and host.unit == "bytes" and self.host_bits is not None:
            numbers = bytes_per_token // itemsize
            exact = bytes_per_token if self.staged else 0
            packed = packed_tokens(int(host.amount), numbers, itemsize, self.host_bits, exact)
            return _fewer("host", host, packed), 0
        return (
            _tokens("host", host, bytes_per_token),
            _tokens("disk", self.disk, bytes_per_token),
        )

    def tier_room(self, bytes_per_token: int, itemsize: int) -> LowerRoom:
        """The tiers of an engine; arguments as for `tier_tokens`."""
        from arbor.memory.stores import LowerRoom

        return LowerRoom(
            *self.tier_tokens(bytes_per_token, itemsize),
            None if self.disk_dir is None else Path(self.disk_dir),
            self.host_bits,
            self.staging_tokens(bytes_per_token),
            inexact=self.staged and self.mode == "lossy",
        )

    def host_token_bytes(self, bytes_per_token: int, itemsize: int) -> int:
        """Bytes of a token in few bits, scales included; arguments as for `tier_tokens`."""
        if self.host_bits is None:
            return bytes_per_token
        return -(-group_bytes(bytes_per_token // itemsize, self.host_bits) // GROUP)

    def prompt_files(self, checkpoint: Checkpoint) -> PromptFiles | None:
        """The KV of earlier prompts of a loaded model; None where none is kept, or its commit is
        not known."""
        if self.keep_kv is None:
            return None
        from arbor.memory.prompt_files import PromptFiles
        from arbor.model.kv_identity import kv_identity

        weights, source = checkpoint.load(), checkpoint.source
        identity = kv_identity(
            weights.runner,
            source,
            weights.backend,
            deterministic=checkpoint.deterministic,
            updated=checkpoint.updated,
        )
        if identity is None:
            logger.warning("no KV is kept: the commit of %s is not known", source.label)
            return None
        return PromptFiles(Path(self.keep_kv), identity, int(self.keep_kv_size.amount))
