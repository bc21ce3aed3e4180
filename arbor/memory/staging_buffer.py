"""StagingBuffer: slots of the pool through which attention reads KV in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.memory.pool import KVPool
from arbor.memory.records import Records
from arbor.tree import NO_SLOT, Tier


class ReadInPlace(Protocol):
    """A store in host memory whose records attention reads where they are.

    Attributes:
        tier: which it is.
        records: how many it can hold.
    """

    tier: Tier
    records: int

    def part(self, index: Tensor, columns: slice, device: torch.device) -> tuple[Tensor, int]:
        """Some numbers of records.

        Args:
            columns: those of K or V of a layer, see `KVPool.columns`.
            device: where they are wanted.

        Returns:
            [n, columns] in the pool's dtype, and the bytes that were copied there for it: codes and
            scales where it is packed.
        """
        ...


class StagingBuffer:
    """The last slots of a pool, into which KV in host memory is copied a layer and a chunk at a
    time, decoded there where it is packed.

    The pool has no other room for it, so that the KV on the device never exceeds the slots of
    blocks and this buffer.

    Args:
        pool: has `staging` slots beyond those of blocks.
        stores: hold the KV.

    Attributes:
        tokens: how many it holds at a time.
        slots: int32 [tokens], its slots.
        records_from: the address of the first record in key lists, beyond all slots; the records of
            a store follow those of the one before it.
        firsts: int32 [tiers], by tier the address of its first record; `NO_SLOT` without.
        addresses: how many addresses there are: slots, the trash slot, records.
        peak: most tokens it ever held.
        moved_bytes: copied into it so far.
    """

    def __init__(self, pool: KVPool, stores: Sequence[ReadInPlace]) -> None:
        self._pool = pool
        self._stores = list(stores)
        self._columns = [pool.columns(layer) for layer in range(len(pool.layers))]
        self.tokens = pool.staging
        self._first = pool.slots - pool.staging
        self.slots = np.arange(self._first, pool.slots, dtype=np.int32)
        self.records_from = pool.trash + 1
        self._ends = np.cumsum([store.records for store in self._stores])
        self.firsts = np.full(len(Tier), NO_SLOT, np.int32)
        for store, end in zip(self._stores, self._ends.tolist(), strict=True):
            self.firsts[store.tier] = self.records_from + end - store.records
        self.addresses = self.records_from + int(self._ends[-1])
        self.peak = 0
        self.moved_bytes = 0

    def tiers_of(self, places: NDArray[np.int64]) -> list[tuple[Tier, NDArray[np.int64], Records]]:
        """Which tiers hold records, and where.

        Args:
            places: int64 [n], addresses minus `records_from`.

        Returns:
            for each tier: it, which of the n it holds, and their records.
        """
        of = np.searchsorted(self._ends, places, side="right")
        result = []
        for number, store in enumerate(self._stores):
            mine = np.flatnonzero(of == number)
            begin = int(self._ends[number]) - store.records
            result.append((store.tier, mine, (places[mine] - begin).astype(np.int32)))
        return result

    def load(self, layer: int, records: Records, *, values: bool = True) -> None:
        """Copy a layer's K and V of records to the first of its slots; what was there is gone.

        Args:
            records: int32 [n], increasing, addresses minus `records_from`; no more than it holds.
            values: whether V is read as well.
        """
        count = len(records)
        if not count:
            return
        assert count <= self.tokens, (
            f"{count} tokens for a staging buffer of {self.tokens}: the device would hold more KV "
            "than its budget"
        )
        pools = (self._pool.k[layer], self._pool.v[layer])[: 1 + values]
        stored = self.tiers_of(records.astype(np.int64))
        for store, (_, mine, own) in zip(self._stores, stored, strict=True):
            if not len(mine):
                continue
            index = torch.from_numpy(own.astype(np.int64))
            here = slice(self._first + int(mine[0]), self._first + int(mine[-1]) + 1)
            for pool, columns in zip(pools, self._columns[layer], strict=False):
                rows, moved = store.part(index, columns, self._pool.device)
                pool[here].copy_(rows.view(len(mine), *pool.shape[1:]))
                self.moved_bytes += moved
        self.peak = max(self.peak, count)
