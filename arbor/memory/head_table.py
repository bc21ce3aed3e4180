"""HeadTable: the token that each KV head holds in a slot, where the heads hold different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.memory.pool import LayerKV
from arbor.memory.slots import SlotTable


@dataclass(frozen=True, slots=True)
class HeadMoves:
    """K and V that single KV heads take from slots that are about to be freed to slots that stay.

    Attributes:
        head: whole numbers [m], those of KV heads, non-decreasing; see `HeadTable`.
        source: int32 [m], slots.
        target: int32 [m], slots of the same blocks, none of them a source.
    """

    head: NDArray[np.integer]
    source: NDArray[np.int32]
    target: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.head)


class HeadTable:
    """What KV heads hold in *mixed* slots, those in which they hold different tokens of a block.

    The KV heads of all layers are numbered through, layer after layer; C in all. A slot that is not
    mixed holds its own token (`SlotTable.token`) in every head. In a mixed one each head holds that
    token or an earlier one of the same block, and no head holds a token twice, so a slot that is
    freed is a token less in every head.

    Attributes:
        layer: int64 [C], the layer of each KV head.
        head: int64 [C], its place in that layer.
    """

    def __init__(self, layers: Sequence[LayerKV], slots: int) -> None:
        heads = [layer.num_kv_heads for layer in layers]
        self.layer = np.repeat(np.arange(len(heads)), heads)
        self.head = np.concatenate([np.arange(count) for count in heads])
        self._slots = slots
        self._position = np.empty((len(self.head), 0), np.int32)  # made when a slot is mixed

    def __len__(self) -> int:
        return len(self.head)

    def positions(self, table: SlotTable, slots: NDArray[np.integer]) -> NDArray[np.int32]:
        """Positions of the tokens that each head holds in some slots, int32 [C, n]."""
        own = np.broadcast_to(table.position[slots], (len(self), len(slots)))
        mixed = table.mixed[slots]
        if not mixed.any():
            return own
        return np.where(mixed, self._position[:, slots], own)

    def move(self, table: SlotTable, moves: HeadMoves) -> None:
        """Record moves; their targets are mixed then, and their sources are to be freed."""
        if not self._position.size:
            self._position = np.zeros((len(self), self._slots), np.int32)
        named = np.unique(np.concatenate([moves.source, moves.target]))
        fresh = named[~table.mixed[named]]
        self._position[:, fresh] = table.position[fresh]
        self._position[moves.head, moves.target] = self._position[moves.head, moves.source]
        table.mixed[moves.target] = True

    def check(self, table: SlotTable) -> None:
        """Assert that each head holds tokens at or before the slots' own, and none twice."""
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
        named = np.sort(owner * width + self.positions(table, blocks), axis=1)
        assert (named[:, 1:] != named[:, :-1]).all(), "a head holds a token twice"
