"""The tensors that hold K and V, one slot per token, in every layer."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.int8 import store, stored_width
from arbor.memory.out_of_memory import kv_too_large
from arbor.support.shortage import is_out_of_memory

if TYPE_CHECKING:
    from arbor.heads.table import HeadMoves, HeadTable


AT_ONCE = 1 << 16  # cells whose K or V are copied at once


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer stores per token: `num_kv_heads` keys of `head_dim_qk` and values of
    `head_dim_vo`."""

    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int

    def numbers(self, dtype: torch.dtype) -> int:
        """Numbers stored per token in a pool of this dtype."""
        return self.num_kv_heads * sum(
            head_width(dim, dtype) for dim in (self.head_dim_qk, self.head_dim_vo)
        )


def head_width(dim: int, dtype: torch.dtype) -> int:
    """Numbers that a head of `dim` channels takes in a pool of this dtype: in 8 bits its codes and
    the scales of groups of them (`arbor.kernels.int8`)."""
    return stored_width(dim) if dtype == torch.int8 else dim


class KVPool:
    """K and V of every layer with page size 1, plus one trash slot for rows whose K/V nobody keeps.

    k[l]: [slots + 1, H_kv, D_k], v[l]: [slots + 1, H_kv, D_v]; zero-initialised, in one
    allocation (on a CPU a page takes memory when a slot on it is first written to).
    In 8-bit KV a head is as wide as its codes and scales, see `arbor.kernels.int8`.
    Slot `trash` is the last one; no key list ever names it.

    Attributes:
        reader: copies KV in host memory to the staging slots while attention runs; None: attention
            reads slots only.
        holders: says which KV heads' K and V lie in the cells of slots, see `HeadTable.holders`;
            None: always their own.
        cell_attention: makes the attention that reads them, see `arbor.heads.attention`; None:
            every head reads its own.

    Args:
        layers: what each layer stores per token.
        slots: without the trash slot.
        staging: the last of them, which belong to no block: see `StagingBuffer`.
        dtype: of the tensors: the model's, or int8 for 8-bit KV.
        device: of the tensors.
        weight_bytes: of the model, which the error names; 0 = not known.

    Raises:
        OutOfMemory: the machine has less memory than that; names what would fit.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_bytes: int = 0,
        staging: int = 0,
    ) -> None:
        self.layers = tuple(layers)
        self.slots = slots
        self.staging = staging
        self.reader: Any = None
        self.holders: Callable[[NDArray[np.int32]], NDArray[np.integer] | None] | None = None
        self.cell_attention: Any = None
        self.dtype = dtype
        self.device = device
        self._weight_bytes = weight_bytes
        self._store, self.k, self.v = self._allocate(slots)

    def _allocate(self, slots: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The tensors for so many slots and the trash slot: all of them, and K and V by layer."""
        layers = self.layers
        dims = [(each.num_kv_heads, each.head_dim_qk) for each in layers]
        dims += [(each.num_kv_heads, each.head_dim_vo) for each in layers]
        widths = [(heads, head_width(dim, self.dtype)) for heads, dim in dims]
        sizes = [(slots + 1) * heads * width for heads, width in widths]
        try:
            # whatever the caller's mode, slots can be written in any
            with torch.inference_mode(False):
                store = _zeros(sum(sizes), self.dtype, self.device)
        except (RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise kv_too_large(
                self.device, slots, self.bytes_per_token, self._weight_bytes
            ) from error
        parts = [
            part.view(slots + 1, *width)
            for part, width in zip(store.split(sizes), widths, strict=True)
        ]
        return store, parts[: len(layers)], parts[len(layers) :]

    def grow(self, slots: int) -> None:
        """Have more slots; what the slots hold stays in them.

        The tensors are others afterwards, so CUDA graphs are captured again (`DecodeGraphs`).

        Raises:
            OutOfMemory: the machine has no memory for both.
        """
        assert not self.staging, "a staging buffer is the end of a pool of one size"
        store, k, v = self._allocate(slots)
        with torch.inference_mode():
            for before, after in zip((*self.k, *self.v), (*k, *v), strict=True):
                after[: self.slots].copy_(before[: self.slots])
        self._store, self.k, self.v, self.slots = store, k, v, slots

    @property
    def trash(self) -> int:
        """The slot that takes K/V nobody will read."""
        return self.slots

    @property
    def bytes_per_token(self) -> int:
        """Bytes one slot holds over all layers, K and V."""
        return bytes_per_token(self.layers, self.dtype)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new K/V of one layer.

        Args:
            slots: int64 [T]; several rows may name the trash slot.
            k: [T, H_kv, D_k], in the model's dtype.
            v: [T, H_kv, D_v], likewise.
        """
        for pool, x in ((self.k[layer], k), (self.v[layer], v)):
            if (
                self.dtype == torch.int8
            ):  # quantised once; what is read or moved later are the codes
                store(pool, slots, x)
            else:
                pool.index_copy_(0, slots, x)

    def gather(self, slots: NDArray[np.int32]) -> Tensor:
        """K and V of slots as one row per token: every layer's K, then every layer's V, as stored.

        Args:
            slots: int32 [n].

        Returns:
            [n, numbers], a copy on the pool's device.
        """
        index = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        parts = [part.index_select(0, index).flatten(1) for part in (*self.k, *self.v)]
        return torch.cat(parts, dim=1)

    def scatter(self, slots: NDArray[np.int32], rows: Tensor) -> None:
        """Store what `gather` gave.

        Args:
            slots: int32 [n], distinct.
            rows: [n, numbers] on the pool's device, in its dtype.
        """
        index = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        parts = (*self.k, *self.v)
        widths = [part[0].numel() for part in parts]
        for part, columns in zip(parts, rows.split(widths, dim=1), strict=True):
            part.index_copy_(0, index, columns.reshape(-1, *part.shape[1:]))

    @property
    def alike(self) -> bool:
        """Whether K and V are as wide in all layers, so that a cell may hold those of any head."""
        return len(set(self.layers)) == 1

    def cells(self) -> tuple[Tensor, Tensor]:
        """K and V of every cell, one KV head each; of layers that are alike.

        Returns:
            k [L * (slots + 1) * H_kv, 1, D_k] and v [.., 1, D_v], views of `k` and `v`: cell
            (l * (slots + 1) + s) * H_kv + h is that of head h in slot s of layer l.
        """
        assert self.alike, "checked by `check_layers`"
        k, v = self.k[0], self.v[0]
        wide = len(self.k) * k.numel()
        assert wide // k.shape[2] < 1 << 31, "key lists number cells in 32 bits"
        return (
            self._store[:wide].view(-1, 1, k.shape[2]),
            self._store[wide:].view(-1, 1, v.shape[2]),
        )

    def copy_heads(self, moves: HeadMoves, table: HeadTable) -> Callable[[], None]:
        """A call that copies K and V of single heads from slots to others.

        What the copy needs in addition to the pool is allocated now: K and V of `AT_ONCE` cells at
        most. Of layers that differ it is allocated when the call is made, K or V of the moves of
        one layer.
        """
        if not self.alike:
            return partial(self._copy_by_layer, moves, table)
        heads = self.layers[0].num_kv_heads
        both = ((moves.cell, moves.source), (moves.into, moves.target))
        addresses = [
            (table.layer[cell] * (self.slots + 1) + slot) * heads + table.head[cell]
            for cell, slot in both
        ]
        source, target = torch.from_numpy(np.stack(addresses)).to(self.device)
        with torch.inference_mode(False):
            parts = [
                (cells[:, 0], torch.empty_like(cells[: min(len(moves), AT_ONCE), 0]))
                for cells in self.cells()
            ]

        def copy() -> None:
            for cells, taken in parts:
                for begin in range(0, len(source), AT_ONCE):
                    some = source[begin : begin + AT_ONCE]
                    torch.index_select(cells, 0, some, out=taken[: len(some)])
                    cells.index_copy_(0, target[begin : begin + AT_ONCE], taken[: len(some)])

        return copy

    def _copy_by_layer(self, moves: HeadMoves, table: HeadTable) -> None:
        """The same where layers differ; every token stays in a cell of its own head."""
        assert moves.into is moves.cell, "checked by `check_layers`"
        numbers = np.stack([table.head[moves.cell], moves.source, moves.target])
        head, source, target = torch.from_numpy(numbers).to(self.device)
        layers = table.layer[moves.cell]
        ends = np.searchsorted(layers, np.arange(len(self.k)), side="right").tolist()
        begin = 0
        for layer, end in enumerate(ends):
            mine = slice(begin, end)
            for part in (self.k[layer], self.v[layer]) if begin < end else ():
                part[target[mine], head[mine]] = part[source[mine], head[mine]]
            begin = end

    def columns(self, layer: int) -> tuple[slice, slice]:
        """Where K and V of a layer lie in a row of `gather`."""
        ends = np.cumsum([0, *(part[0].numel() for part in (*self.k, *self.v))]).tolist()
        places = layer, len(self.k) + layer
        first, second = (slice(ends[place], ends[place + 1]) for place in places)
        return first, second

    @property
    def numbers(self) -> int:
        """Numbers one slot holds over all layers, K and V."""
        return sum(layer.numbers(self.dtype) for layer in self.layers)

    def poison(self, slots: NDArray[np.int32]) -> None:
        """Overwrite freed slots with NaN, so that a reader that should not be there is seen (debug
        mode)."""
        index = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        blank = -1 if self.dtype == torch.int8 else torch.nan  # all bits set: scales of NaN
        for part in (*self.k, *self.v):
            part[index] = blank


def bytes_per_token(layers: Sequence[LayerKV], dtype: torch.dtype) -> int:
    """KV bytes of one token over all layers, scales included.

    Args:
        layers: what each layer stores.
        dtype: of the pool, see `KVPool`.

    Example:
        A layer of 8 heads of 128 channels, in half precision and in 8 bits:

        >>> [bytes_per_token([LayerKV(8, 128, 128)], x) for x in (torch.bfloat16, torch.int8)]
        [4096, 2176]
    """
    return sum(layer.numbers(dtype) for layer in layers) * dtype.itemsize


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU a page takes memory when it is first written to."""
    anonymous = getattr(mmap, "MAP_ANONYMOUS", None)  # Windows has none
    if device.type != "cpu" or anonymous is None or not count:
        return torch.zeros(count, dtype=dtype, device=device)
    size = min(count * dtype.itemsize, sys.maxsize)  # no address is larger: there is no memory
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | anonymous)
    return torch.frombuffer(pages, dtype=dtype)
