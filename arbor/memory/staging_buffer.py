"""StagingBuffer: slots of the pool through which attention reads KV in host memory."""

from __future__ import annotations

import numpy as np
import torch

from arbor.memory.pool import KVPool
from arbor.memory.records import Records
from arbor.memory.stores import HostStore


class StagingBuffer:
    """The last slots of a pool, into which KV in host memory is copied a layer and a chunk at a
    time.

    The pool has no other room for it, so that the KV on the device never exceeds the slots of
    blocks and this buffer.

    Args:
        pool: has `staging` slots beyond those of blocks.
        store: holds the KV.

    Attributes:
        tokens: how many it holds at a time.
        slots: int32 [tokens], its slots.
        records_from: the address of the store's first record in key lists, beyond all slots.
        addresses: how many addresses there are: slots, the trash slot, records.
        peak: most tokens it ever held.
        moved_bytes: copied into it so far.
    """

    def __init__(self, pool: KVPool, store: HostStore) -> None:
        self._pool = pool
        self._store = store
        self._columns = [pool.columns(layer) for layer in range(len(pool.layers))]
        self.tokens = pool.staging
        self._first = pool.slots - pool.staging
        self.slots = np.arange(self._first, pool.slots, dtype=np.int32)
        self.records_from = pool.trash + 1
        self.addresses = self.records_from + store.records
        self.peak = 0
        self.moved_bytes = 0

    def load(self, layer: int, records: Records, *, values: bool = True) -> None:
        """Copy a layer's K and V of records to the first of its slots; what was there is gone.

        Args:
            layer: layer index.
            records: int32 [n], distinct; no more than it holds.
            values: whether V is read as well.
        """
        count = len(records)
        if not count:
            return
        assert count <= self.tokens, (
            f"{count} tokens for a staging buffer of {self.tokens}: the device would hold more KV "
            "than its budget"
        )
        index = torch.from_numpy(records.astype(np.int64))
        here = slice(self._first, self._first + count)
        pools = (self._pool.k[layer], self._pool.v[layer])[: 1 + values]
        for pool, columns in zip(pools, self._columns[layer], strict=False):
            rows = self._store.part(index, columns)
            pool[here].copy_(rows.view(count, *pool.shape[1:]))
            self.moved_bytes += rows.nbytes
        self.peak = max(self.peak, count)
