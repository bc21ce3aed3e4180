"""Stores: where KV lies that has left the device, one record per token."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.errors import UsageError
from arbor.memory.host_copies import HostCopies, HostCopy
from arbor.memory.out_of_memory import lower_tier
from arbor.memory.packed_store import PackedStore
from arbor.memory.pool import KVPool
from arbor.memory.records import Records
from arbor.tree import Tier

logger = logging.getLogger(__name__)

MOST_COPIES = 4  # whose rows are still on the device


class Store(Protocol):
    """KV of tokens by record number. It does not know whose they are (`LowerTiers` does).

    Attributes:
        tier: which it is.
        records: how many it can hold.
        keeps: a rounded record that is read stays, and its token returns to it when it leaves the
            device.
        group: records that are free only together.
    """

    tier: Tier
    records: int
    keeps: bool
    group: int

    def write(self, records: Records, rows: Tensor) -> NDArray[np.bool_]:
        """Store KV.

        Args:
            records: int32 [n], distinct.
            rows: [n, numbers] as `KVPool.gather` gives them, on any device.

        Returns:
            bool [n], whether each was stored.
        """
        ...

    def read(self, records: Records, device: torch.device) -> tuple[Tensor, NDArray[np.bool_]]:
        """KV as it was written, bit for bit but for `rounded` records.

        Args:
            records: int32 [n], written before.
            device: where the result lies.

        Returns:
            [n, numbers], and bool [n], whether each is intact.
        """
        ...

    def rounded(self, records: Records) -> NDArray[np.bool_]:
        """Which records have other numbers than were written, bool [n]."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class HostStore:
    """KV in host memory.

    A record is contiguous, so that a transfer is one gather on the device, one copy, and one
    scatter into the records. With `copies` the device goes on meanwhile: what leaves it reaches the
    records when these are next needed, or `MOST_COPIES` writes later.

    Args:
        records: how many it can hold.
        numbers: numbers per token, `KVPool.numbers`.
        dtype: of the pool.
        copies: from a device that does not wait for them; None: the pool is in host memory too.

    Raises:
        UsageError: the machine has less memory than that.
    """

    tier = Tier.HOST
    keeps = False
    group = 1

    def __init__(
        self, records: int, numbers: int, dtype: torch.dtype, copies: HostCopies | None = None
    ) -> None:
        self.records = records
        self._copies = copies
        self._due: deque[tuple[Tensor, HostCopy]] = deque()
        with lower_tier(records * numbers * dtype.itemsize), torch.inference_mode(False):
            self._rows = torch.empty(records, numbers, dtype=dtype)

    def write(self, records: Records, rows: Tensor) -> NDArray[np.bool_]:
        """See `Store`; always succeeds."""
        if self._copies is None:
            self._rows[_index(records)] = rows.to("cpu")
        else:
            self._take_in(MOST_COPIES - 1)
            self._due.append((_index(records), self._copies.down(rows)))
        return np.ones(len(records), np.bool_)

    def read(self, records: Records, device: torch.device) -> tuple[Tensor, NDArray[np.bool_]]:
        """See `Store`; always intact."""
        rows, _ = self.part(_index(records), slice(None), device)
        return rows, np.ones(len(records), np.bool_)

    def part(self, index: Tensor, columns: slice, device: torch.device) -> tuple[Tensor, int]:
        """See `ReadInPlace`."""
        self._take_in(0)
        held = self._rows[:, columns]
        if self._copies is None:
            rows = held.index_select(0, index)
        else:
            rows = self._copies.up(held, index, device)
        return rows, rows.nbytes

    def _take_in(self, most: int) -> None:
        """Put what has come into its records; wait where more than so many copies are under way."""
        while self._due and (len(self._due) > most or self._due[0][1].done()):
            index, copy = self._due.popleft()
            self._rows[index] = copy.rows()

    def rounded(self, records: Records) -> NDArray[np.bool_]:
        """See `Store`; none."""
        return np.zeros(len(records), np.bool_)

    def close(self) -> None:
        """See `Store`."""
        self._take_in(0)
        self._rows = self._rows[:0]


class DiskStore:
    """KV in a file that has no name: the system removes it when the process ends, however it ends.

    A record is written and read by position rather than mapped, because a write into a mapped file
    on a full disk kills the process, while `os.pwrite` reports it. Each record has a checksum in
    memory, so a torn or flipped one is found when it is read. The first failure is logged.

    Args:
        records: how many it can hold.
        numbers: numbers per token, `KVPool.numbers`.
        dtype: of the pool.
        folder: where the file lies; by default the system's folder for temporary files.

    Raises:
        UsageError: the machine has no memory for its checksums, or the folder cannot be written.
    """

    tier = Tier.DISK
    keeps = False
    group = 1

    def __init__(
        self, records: int, numbers: int, dtype: torch.dtype, *, folder: Path | None = None
    ) -> None:
        self.records = records
        self._dtype = dtype
        self._bytes = numbers * dtype.itemsize
        self._failed = False
        with lower_tier(records * np.dtype(np.uint32).itemsize):
            self._checksums = np.zeros(records, np.uint32)
        try:
            with tempfile.TemporaryFile(prefix="arbor-kv-", dir=folder) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            place = folder or tempfile.gettempdir()
            raise UsageError(
                "disk-store",
                f"no KV can be written to {place}: {error.strerror}.",
                "Choose another folder with disk_dir.",
            ) from error
        self._closed = weakref.finalize(self, os.close, self._file)

    def write(self, records: Records, rows: Tensor) -> NDArray[np.bool_]:
        """See `Store`; a full disk or an error of the device leaves the rest unwritten."""
        stored = np.zeros(len(records), np.bool_)
        data = rows.to("cpu").contiguous().view(torch.uint8).numpy()
        for place, (record, row) in enumerate(zip(records.tolist(), data, strict=True)):
            try:
                written = os.pwrite(self._file, row, record * self._bytes)
                if written < self._bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._report(error)
                break
            self._checksums[record] = zlib.crc32(row)
            stored[place] = True
        return stored

    def read(self, records: Records, device: torch.device) -> tuple[Tensor, NDArray[np.bool_]]:
        """See `Store`; a record that cannot be read, or whose checksum differs, is not intact."""
        data = np.zeros((len(records), self._bytes), np.uint8)
        intact = np.zeros(len(records), np.bool_)
        for place, record in enumerate(records.tolist()):
            try:
                got = os.preadv(self._file, [data[place]], record * self._bytes)
            except OSError as error:
                self._report(error)
                continue
            whole = got == self._bytes
            intact[place] = whole and zlib.crc32(data[place]) == self._checksums[record]
        rows = torch.from_numpy(data).view(self._dtype)
        return rows.to(device), intact

    def rounded(self, records: Records) -> NDArray[np.bool_]:
        """See `Store`; none."""
        return np.zeros(len(records), np.bool_)

    def _report(self, error: OSError) -> None:
        """Log the first failure."""
        if not self._failed:
            logger.warning("KV on disk: %s; what is lost is computed again", error.strerror)
        self._failed = True

    def close(self) -> None:
        """See `Store`; the file is gone."""
        self._closed()


@dataclass(frozen=True, slots=True)
class LowerRoom:
    """Room for KV that has left the device.

    Attributes:
        host, disk: tokens that each tier may hold; 0: no such tier.
        folder: of the file on disk; None: the system's for temporary files.
        host_bits: of a number in host memory, see `PackedStore`; None: those of the pool. With a
            staging buffer, of a second store there, which holds as many tokens as the first.
        staging: slots of the budget through which attention reads the host's KV where it lies, see
            `StagingBuffer`; 0: KV is copied back before it is read.
        inexact: whether the host takes KV that was computed over gaps as well; with such a buffer
            only.
    """

    host: int = 0
    disk: int = 0
    folder: Path | None = None
    host_bits: int | None = None
    staging: int = 0
    inexact: bool = False

    def __post_init__(self) -> None:
        assert self.staging or not self.inexact, "what comes back has to be exact"
        assert not self.staging or (self.host and not self.disk), "attention reads no disk"
        assert not self.staging or self.inexact or self.host_bits is None, "packed KV is rounded"

    def stores(self, pool: KVPool) -> list[Store]:
        """The stores below a pool, the first one first.

        Raises:
            UsageError: the machine has less memory than that, or the folder cannot be written.
        """
        stores: list[Store] = []
        if self.host and (self.host_bits is None or self.staging):
            copies = HostCopies(pool.device) if pool.device.type == "cuda" else None
            stores.append(HostStore(self.host, pool.numbers, pool.dtype, copies))
        if self.host and self.host_bits is not None:
            keys = sum(part[0].numel() for part in pool.k)
            stores.append(PackedStore(self.host, keys, pool.numbers, pool.dtype, self.host_bits))
        if self.disk:
            stores.append(DiskStore(self.disk, pool.numbers, pool.dtype, folder=self.folder))
        return stores


NO_ROOM = LowerRoom()


def _index(records: Records) -> Tensor:
    return torch.from_numpy(records.astype(np.int64))
