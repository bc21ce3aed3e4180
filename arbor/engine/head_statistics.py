"""HeadStatistics: the attention that what each KV head holds in a slot has received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.memory.head_table import HeadMoves
from arbor.memory.memory import KVMemory
from arbor.retention.token_statistics import FADING, AttentionColumns, TokenStatistics
from arbor.tree import NO_SLOT

# figures of each token, as in `AttentionColumns`, but of every KV head
_NAMES = ("mass", "latest", "queries", "activated", "recurrence", "lately")
_WHOLE = ("queries", "activated", "recurrence")


class HeadStatistics:
    """Figures of each cell of each slot (`HeadTable`), as tensors [C, slots] on the pool's device.

    They are those of `TokenStatistics`, of one head instead of the mean over all, and belong to
    slots: where a head moves what it holds, they move along (`move`), and a token that gets a slot
    begins with the figures that it has as a whole, so that one that comes back is not new.

    Args:
        memory: whose slots.
        whole: figures of whole tokens.
    """

    def __init__(self, memory: KVMemory, whole: TokenStatistics) -> None:
        self._memory = memory
        self._whole = whole
        size = (len(memory.heads), memory.slots)
        device = memory.pool.device
        self._columns = {
            name: torch.zeros(
                size, dtype=torch.int32 if name in _WHOLE else torch.float32, device=device
            )
            for name in _NAMES
        }
        # what each slot held when its figures were last looked at
        self._owner = np.full(memory.slots, NO_SLOT, np.int32)
        self._position = np.full(memory.slots, NO_SLOT, np.int32)
        self._mixed = np.zeros(memory.slots, np.bool_)

    def observe(self, slots: NDArray[np.int64], mass: Tensor, queries: NDArray[np.int64]) -> None:
        """Add the attention of one forward, before `TokenStatistics` does.

        Args:
            slots: int64 [S], distinct, increasing.
            mass: float32 [C, slots of the pool], attention each received, summed over the rows that
                could see it; the mean over the query heads of a KV head.
            queries: int64 [S], number of these rows, >= 1.
        """
        self._follow()
        within = slots < self._memory.slots
        slots, queries = slots[within], queries[within]
        if not len(slots):
            return
        # all slots up to the last one, as products with masks cost less than selections
        end = int(slots[-1]) + 1
        seen = np.zeros(end, np.int32)
        seen[slots] = queries
        added = torch.from_numpy(seen).to(mass.device)
        some = added > 0
        columns = {name: column[:, :end] for name, column in self._columns.items()}
        mass = mass[:, :end] * some
        written = columns["queries"] == 0
        total = columns["queries"].add_(added)
        columns["mass"].add_(mass)
        columns["lately"].mul_(FADING**added).add_(mass)
        latest = mass / added.clamp_min(1)
        columns["latest"].copy_(torch.where(some, latest, columns["latest"]))
        active = (latest >= self._whole.threshold) & some
        activated, longest = columns["activated"], columns["recurrence"]
        since = (total - activated) * (active & ~written)
        torch.maximum(longest, since, out=longest)
        activated.copy_(torch.where(active | (written & some), total, activated))

    def move(self, moves: HeadMoves) -> None:
        """Let figures follow what KV heads have moved; after the memory has done so."""
        numbers = np.stack([moves.cell, moves.source, moves.into, moves.target]).astype(np.int64)
        at, old, into, new = torch.from_numpy(numbers).to(self._memory.pool.device)
        for column in self._columns.values():
            column[into, new] = column[at, old]
        self._mixed[moves.target] = True

    def makers(self, slots: NDArray[np.int64]) -> dict[str, Callable[[Any], NDArray[Any]]]:
        """Columns of some slots by head, [C * n], each by a function, for `Columns.when_read`."""
        self._follow()
        index = torch.from_numpy(slots).to(self._memory.pool.device)

        def read(name: str) -> Callable[[Any], NDArray[Any]]:
            return lambda _: self._columns[name].index_select(1, index).flatten().cpu().numpy()

        return {name: read(name) for name in _NAMES}

    def _follow(self) -> None:
        """Begin anew where a slot holds something else than before."""
        table = self._memory.table
        stale = np.flatnonzero(
            (table.owner != self._owner)
            | (table.position != self._position)
            | (table.mixed != self._mixed)
        )
        if not len(stale):
            return
        owner, position = table.owner[stale], table.position[stale]
        self._owner[stale], self._position[stale] = owner, position
        self._mixed[stale] = table.mixed[stale]
        index = torch.from_numpy(stale).to(self._memory.pool.device)
        known = torch.from_numpy(owner >= 0).to(index.device)
        figures = self._figures(owner, position)
        for name, column in self._columns.items():
            column[:, index] = torch.from_numpy(getattr(figures, name)).to(column) * known

    def _figures(self, owner: NDArray[np.int32], position: NDArray[np.int32]) -> AttentionColumns:
        """Figures of whole tokens; those of no block have anything."""
        known = owner >= 0
        rows = np.where(known, owner, 0)
        starts = np.zeros(len(owner), np.int64)
        if known.any():
            each, which = np.unique(rows[known], return_inverse=True)
            nodes = self._memory.forest.nodes(each.tolist())
            starts[known] = np.array([node.start for node in nodes])[which]
        return self._whole.view(rows, np.maximum(position - starts, 0))
