"""TierSizes: how much KV that has left the device the host's memory and a disk may hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from arbor.budget import Budget
from arbor.errors import UsageError


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the tiers below the device.

    Attributes:
        host: host memory, in tokens or bytes; None: none.
        disk: likewise.
        disk_dir: the folder of the file on disk; None: the system's for temporary files.
    """

    host: Budget | None = None
    disk: Budget | None = None
    disk_dir: Path | None = None

    def __bool__(self) -> bool:
        """Whether there is a lower tier."""
        return self.host is not None or self.disk is not None

    @classmethod
    def parse(
        cls,
        host: str | int | Budget | None = None,
        disk: str | int | Budget | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
    ) -> TierSizes:
        """Sizes as a user writes them: ``8GiB``, ``20000tok``; None, 0 or ``0`` for none.

        Raises:
            UsageError: not a size, a folder that does not exist, or a folder without a size.
        """
        sizes = cls(_size("host", host), _size("disk", disk))
        if disk_dir is None:
            return sizes
        folder = Path(disk_dir)
        if sizes.disk is None:
            raise UsageError(
                "tier-size", f"--disk-dir {folder}: no KV goes to disk.", "Give --disk 50GiB too."
            )
        if not folder.is_dir():
            raise UsageError(
                "disk-store", f"--disk-dir {folder}: there is no such folder.", "Create it first."
            )
        return cls(sizes.host, sizes.disk, folder)

    def tokens(self, bytes_per_token: int) -> tuple[int, int]:
        """Tokens that host and disk may hold.

        Args:
            bytes_per_token: KV bytes of one token over all layers.
        """
        return _tokens(self.host, bytes_per_token), _tokens(self.disk, bytes_per_token)


def _size(name: str, given: str | int | Budget | None) -> Budget | None:
    if given is None or given in (0, "0"):
        return None
    size = Budget.absolute(given, "tokens", "bytes")
    if size is None:
        raise UsageError(
            "tier-size", f"--{name} {given}: not a size.", "Write 8GiB or 20000tok, or 0 for none."
        )
    return size


def _tokens(size: Budget | None, bytes_per_token: int) -> int:
    if size is None:
        return 0
    amount = int(size.amount)
    return amount if size.unit == "tokens" else amount // bytes_per_token
