"""HeadTable: the token that each KV head holds in a slot, where the heads hold different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.memory.slots import SlotTable


@dataclass(frozen=True, slots=True)
class HeadMoves:
    """K and V of single KV heads that are copied from slots about to be freed to slots that stay.

    Attributes:
        cell: whole numbers [m], cells of the sources, see `HeadTable`.
        source: int32 [m], slots.
        into: whole numbers [m], cells of the targets; the same array as `cell` where every token
            stays in a cell of its own head, and non-decreasing then.
        target: int32 [m], slots of the same blocks, none of them a source.
    """

    cell: NDArray[np.integer]
    source: NDArray[np.int32]
    into: NDArray[np.integer]
    target: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.cell)


class HeadTable:
    """What KV heads hold in *mixed* slots, those in which they hold different tokens of a block.

    The KV heads of all layers are numbered through, layer after layer; C in all. A slot has a cell
    for each of them. One that is not mixed holds its own token (`SlotTable.token`) in every cell.
    In a mixed one each cell holds that token or an earlier one of the same block: K and V of its
    own head or, in a *lent* slot, of any head whose K and V are as wide. No head holds a token
    twice, and no cell is empty, so a slot that is freed is C cells less.

    Args:
        heads: KV heads of each layer.
        slots: of the pool.

    Attributes:
        layer: int64 [C], the layer of each KV head.
        head: int64 [C], its place in that layer.
    """

    def __init__(self, heads: Sequence[int], slots: int) -> None:
        self.layer = np.repeat(np.arange(len(heads)), heads)
        self.head = np.concatenate([np.arange(count) for count in heads])
        self._slots = slots
        self._position = np.empty((len(self.head), 0), np.int32)  # made when a slot is mixed
        count = len(self.head)
        # 16 bits where they do: such numbers are sorted in O(n)
        self._own = np.arange(count).astype(np.int16 if count < 1 << 15 else np.int32)[:, None]
        self._holder = np.empty((count, 0), self._own.dtype)  # made when a slot is lent

    def __len__(self) -> int:
        return len(self.head)

    def positions(self, table: SlotTable, slots: NDArray[np.integer]) -> NDArray[np.int32]:
        """Positions of the tokens that lie in each cell of some slots, int32 [C, n]."""
        own = np.broadcast_to(table.position[slots], (len(self), len(slots)))
        mixed = table.mixed[slots]
        if not mixed.any():
            return own
        return np.where(mixed, self._position[:, slots], own)

    def holders(self, table: SlotTable, slots: NDArray[np.integer]) -> NDArray[np.integer] | None:
        """The KV head whose K and V lie in each cell of some slots, [C, n]; None: its own in
        each."""
        if not self._holder.size:
            return None
        lent = table.lent[slots]
        if not lent.any():
            return None
        return np.where(lent, self._holder[:, slots], self._own)

    def move(self, table: SlotTable, moves: HeadMoves) -> None:
        """Record moves; their targets are mixed then, and their sources are to be freed."""
        if not self._position.size:
            self._position = np.zeros((len(self), self._slots), np.int32)
        named = np.unique(np.concatenate([moves.source, moves.target]))
        fresh = named[~table.mixed[named]]
        self._position[:, fresh] = table.position[fresh]
        if moves.into is not moves.cell:
            if not self._holder.size:
                self._holder = np.zeros((len(self), self._slots), self._own.dtype)
            self._holder[:, named[~table.lent[named]]] = self._own
            self._holder[moves.into, moves.target] = self._holder[moves.cell, moves.source]
            targets = np.unique(moves.target)
            table.lent[targets] = (self._holder[:, targets] != self._own).any(0)
        self._position[moves.into, moves.target] = self._position[moves.cell, moves.source]
        table.mixed[moves.target] = True

    def check(self, table: SlotTable) -> None:
        """Assert that each cell holds a token at or before its slot's own, and no head one
        twice."""
        assert (table.mixed | ~table.lent).all(), "a slot is lent and not mixed"
        slots = np.flatnonzero(table.mixed)
        if not len(slots):
            return
        assert (table.references[slots] == 1).all(), "a mixed slot is free or shared"
        assert (table.owner[slots] >= 0).all(), "a mixed slot is of no block"
        held = self.positions(table, slots)
        assert (held <= table.position[slots]).all(), "a head holds a later token than its slot's"
        blocks = np.flatnonzero(np.isin(table.owner, table.owner[slots]) & (table.references > 0))
        owner = table.owner[blocks].astype(np.int64)
        width = int(table.position.max()) + 1
        holders = self.holders(table, blocks)
        head = np.arange(len(self))[:, None] if holders is None else holders.astype(np.int64)
        named = head * (int(owner.max()) + 1) * width + owner * width
        named = np.sort((named + self.positions(table, blocks)).ravel())
        assert (named[1:] != named[:-1]).all(), "a head holds a token twice"
