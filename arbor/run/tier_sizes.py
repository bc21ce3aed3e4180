"""TierSizes: how much KV that has left the device the host's memory and a disk may hold."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from arbor.budget import Budget
from arbor.engine.mode_names import ModeSettings
from arbor.errors import UsageError
from arbor.model.checkpoint import ModelSettings
from arbor.support.packed_size import BITS, GROUP, group_bytes, packed_tokens
from arbor.support.setting import setting

if TYPE_CHECKING:
    from arbor.memory.stores import LowerRoom


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the tiers below the device.

    Attributes:
        host: host memory, in tokens or bytes; None: none.
        disk: likewise.
        disk_dir: the folder of the file on disk; None: the system's for temporary files.
        host_bits: of a number in host memory; None: full precision. With a staging buffer a token
            has room there in both forms.
        staging: slots of the budget through which attention reads KV in host memory, in tokens or
            bytes; None: it reads none there.
    """

    host: Budget | None = None
    disk: Budget | None = None
    disk_dir: Path | None = None
    host_bits: int | None = None
    staging: Budget | None = None

    def __bool__(self) -> bool:
        """Whether there is a lower tier."""
        return self.host is not None or self.disk is not None

    @classmethod
    def parse(
        cls,
        host: str | int | Budget | None = None,
        disk: str | int | Budget | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        host_bits: int | None = None,
        staging: str | int | Budget | None = None,
    ) -> TierSizes:
        """Sizes as a user writes them: ``8GiB``, ``20000tok``; None, 0 or ``0`` for none.

        Raises:
            UsageError: not a size, a folder that does not exist, or a folder without a size; bits
                that are not 8 or 4, without host memory, or with a disk; a staging buffer
                without host memory or with a disk.
        """
        sizes = cls(
            _size("host", host),
            _size("disk", disk),
            host_bits=host_bits,
            staging=_size("staging", staging),
        )
        sizes._check_bits()
        sizes._check_staging()
        if disk_dir is None:
            return sizes
        folder = Path(disk_dir)
        if sizes.disk is None:
            raise UsageError(
                "tier-size", f"disk_dir={folder}: no KV goes to disk.", "Give disk=50GiB too."
            )
        if not folder.is_dir():
            raise UsageError(
                "disk-store", f"disk_dir={folder}: there is no such folder.", "Create it first."
            )
        return replace(sizes, disk_dir=folder)

    def _check_bits(self) -> None:
        bits = self.host_bits
        if bits is None:
            return
        if bits not in BITS or not isinstance(bits, int):
            raise UsageError(
                "host-bits", f"host_bits={bits}: KV is packed in 8 or 4 bits.", "Take 8 or 4."
            )
        if self.host is None:
            raise UsageError(
                "host-bits", f"host_bits={bits}: no KV goes to the host.", "Give --host 8GiB too."
            )
        if self.disk is not None:
            raise UsageError(
                "host-bits",
                f"host_bits={bits}: KV on disk is in full precision, and packed KV never is again.",
                "Leave out disk, or host_bits.",
            )

    def _check_staging(self) -> None:
        if self.staging is None:
            return
        for wrong, reason, hint in (
            (self.host is None, "no KV goes to the host", "Give --host 8GiB too"),
            (self.disk is not None, "no KV is read from a disk", "Leave out disk"),
        ):
            if wrong:
                raise UsageError(
                    "staging",
                    f"staging={self.staging}: attention reads KV in host memory; {reason}.",
                    f"{hint}, or leave out staging.",
                )

    def staging_tokens(self, bytes_per_token: int) -> int:
        """Tokens of the staging buffer, at least 1 where there is one; argument as for `tokens`."""
        return 0 if self.staging is None else max(1, _tokens(self.staging, bytes_per_token))

    def tokens(self, bytes_per_token: int, itemsize: int) -> tuple[int, int]:
        """Tokens that host and disk may hold.

        Args:
            bytes_per_token: KV bytes of one token over all layers.
            itemsize: bytes of a number.
        """
        host, disk = self.host, self.disk
        if host is not None and host.unit == "bytes" and self.host_bits is not None:
            numbers = bytes_per_token // itemsize
            size = int(host.amount)
            exact = 0 if self.staging is None else bytes_per_token
            return packed_tokens(size, numbers, itemsize, self.host_bits, exact), 0
        return _tokens(host, bytes_per_token), _tokens(disk, bytes_per_token)

    def room(self, bytes_per_token: int, itemsize: int, *, lossy: bool) -> LowerRoom:
        """The tiers of an engine; the other arguments as for `tokens`.

        Args:
            lossy: the mode; what staging then reads may have been rounded.
        """
        from arbor.memory.stores import LowerRoom

        staging = self.staging_tokens(bytes_per_token)
        return LowerRoom(
            *self.tokens(bytes_per_token, itemsize),
            self.disk_dir,
            self.host_bits,
            staging,
            inexact=bool(staging) and lossy,
        )

    def host_token_bytes(self, bytes_per_token: int, itemsize: int) -> int:
        """Bytes of a token in few bits, scales included; arguments as for `tokens`."""
        if self.host_bits is None:
            return bytes_per_token
        return -(-group_bytes(bytes_per_token // itemsize, self.host_bits) // GROUP)


def _size(name: str, given: str | int | Budget | None) -> Budget | None:
    if given is None or given in (0, "0"):
        return None
    size = Budget.absolute(given, "tokens", "bytes")
    if size is None:
        raise UsageError(
            "tier-size", f"{name}={given}: not a size.", "Write 8GiB or 20000tok, or 0 for none."
        )
    return size


def _tokens(size: Budget | None, bytes_per_token: int) -> int:
    if size is None:
        return 0
    amount = int(size.amount)
    return amount if size.unit == "tokens" else amount // bytes_per_token


@dataclass(frozen=True, kw_only=True)
class TierSettings(ModelSettings, ModeSettings):
    """The tiers below the device.

    Attributes:
        host: host memory for KV that has left the device, ``8GiB`` or ``20000tok``: what comes back
            from there is copied, not computed again (docs/tiers.md). By default none.
        host_bits: of a number there, 8 or 4; by default those of the model. Only in lossy mode.
        staging: size of a buffer in the budget through which attention reads KV in host memory
            where it is, ``64tok`` or ``1MiB``: a path may then be longer than the budget. Nothing
            is shared between prompts and siblings then. By default KV is copied back before it is
            read.
        disk: room on disk for what the host has no room for, likewise.
        disk_dir: the folder of that file; by default the system's for temporary files.
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
    )
    staging: Budget | None = setting(
        None,
        "Read the host's KV where it is, through a buffer of this size (64tok).",
        shown="set",
        metavar="SIZE",
        read=partial(_size, "staging"),
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
        recorded="never",
    )

    @cached_property
    def lower(self) -> TierSizes:
        """The sizes of the tiers.

        Raises:
            UsageError: see `TierSizes.parse`.
        """
        return TierSizes.parse(self.host, self.disk, self.disk_dir, self.host_bits, self.staging)

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
        tiers = bool(self.lower)
        if self.staged and self.rehydrate != ("selective" if self.mode == "lossless" else "off"):
            raise UsageError(
                "staging",
                "attention reads KV in host memory in lossless mode with selective rehydration, and "
                "in lossy mode with none.",
                "Leave out staging, or rehydrate.",
            )
        if self.host_bits is not None and self.mode == "lossless":
            raise UsageError(
                "host-bits",
                f"host_bits={self.host_bits} rounds KV, and lossless mode promises exact KV.",
                "Leave it out, or take mode=lossy with rehydrate=selective or staging.",
            )
        if self.host_bits is not None and self.kv_dtype != "auto":
            raise UsageError(
                "host-bits",
                f"host_bits={self.host_bits} quantises KV in full precision, and it is "
                f"{self.kv_dtype}.",
                "Leave out host_bits, or kv_dtype.",
            )
        if tiers and not self.staged and self.rehydrate == "off":
            raise UsageError(
                "tier-unused",
                "KV that leaves the device never comes back in this mode.",
                "Leave out host and disk, or take rehydrate=selective.",
            )
