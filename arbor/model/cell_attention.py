"""CellAttention: attention where KV heads hold tokens in each other's cells of a slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    ObservingBackend,
    apply_sinks,
)
from arbor.memory.pool import KVPool
from arbor.model.sharing import indptr_of


class CellAttention:
    """The attention of one forward over the cells of a pool, each of which holds one KV head's K
    and V of a token (`HeadTable`).

    To the backend, each KV head of a row is a row of its own with one KV head: its keys are the
    cells that hold the head's tokens, in whichever layer or head they lie. FlashInfer's batched
    wrappers, torch and the native kernels run that as it is.

    Args:
        layouts: of each layer, see `cell_layouts`.
        pool: whose layers are alike.
        backend: runs the attention.
    """

    def __init__(
        self, layouts: Sequence[CascadeLayout], pool: KVPool, backend: AttentionBackend
    ) -> None:
        self._layouts = layouts
        self._pool = pool
        self._cells = pool.cells()
        self._backend = backend

    def run(self, layer: int, shape: AttentionShape, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of a layer.

        Args:
            layer: its number.
            shape: of it.
            q: [T, H_q, D_k], position-encoded.
            sinks: see `AttentionBackend.run`.

        Returns:
            [T, H_q, D_v].
        """
        return self._attend(layer, shape, q, sinks)[0]

    def run_observed(
        self,
        layer: int,
        shape: AttentionShape,
        q: Tensor,
        sinks: Tensor | None,
        counted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The same, and the attention mass of each cell.

        Args:
            layer, shape, q, sinks: see `run`.
            counted: bool [T], rows whose attention counts; None: all.

        Returns:
            [T, H_q, D_v], and float32 [cells], summed over rows and query heads.
        """
        heads = shape.num_kv_heads
        mask = None if counted is None else counted.repeat(heads)
        if sinks is None and isinstance(self._backend, ObservingBackend):
            plan = self._plan(layer, shape)
            out, _, mass = self._backend.run_observed(
                plan, _by_head(q, heads), *self._cells, None, mask
            )
            return _by_row(out, heads), mass
        out, lse, plan = self._attend(layer, shape, q, sinks)
        lse = _by_head(lse[..., None], heads)[..., 0]
        if mask is not None:
            lse = lse.masked_fill(~mask.to(lse.device)[:, None], math.inf)
        return out, self._backend.mass(plan, _by_head(q, heads), self._cells[0], lse)

    def by_slot(self, mass: Tensor) -> Tensor:
        """The attention mass of cells [cells] as [C, slots + 1], cell after cell of a slot."""
        layers, heads = len(self._pool.layers), self._pool.layers[0].num_kv_heads
        return mass.view(layers, self._pool.slots + 1, heads).transpose(1, 2).flatten(0, 1)

    def _plan(self, layer: int, shape: AttentionShape) -> Any:
        """The backend's plan of a layer, in which a row has one KV head."""
        single = replace(shape, num_qo_heads=shape.group, num_kv_heads=1)
        return self._backend.plan(self._layouts[layer], single)

    def _attend(
        self, layer: int, shape: AttentionShape, q: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Any]:
        """The output [T, H_q, D_v], lse [T, H_q] and the backend's plan."""
        heads = shape.num_kv_heads
        plan = self._plan(layer, shape)
        out, lse = self._backend.run(plan, _by_head(q, heads), *self._cells, None)
        out, lse = _by_row(out, heads), _by_row(lse[..., None], heads)[..., 0]
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out, lse, plan


def cell_layouts(layout: CascadeLayout, pool: KVPool) -> list[CascadeLayout] | None:
    """Which cells the KV heads of each layer read, where a batch reads the slots of a layout.

    Args:
        layout: without a window.
        pool: whose slots they are.

    Returns:
        a layout of each layer with H_kv rows for each of the batch's T: row h * T + r reads for KV
        head h what row r reads. None: every head reads its own cells, so that `layout` serves all.
    """
    if pool.holders is None:
        return None
    keys = [level.kv_indices.numpy() for level in layout.levels]
    holders = [pool.holders(each) for each in keys]
    if all(each is None for each in holders):
        return None
    levels = [
        _levels(level, layout.rows, slots, holder, pool)
        for level, slots, holder in zip(layout.levels, keys, holders, strict=True)
    ]
    rows = layout.rows * pool.layers[0].num_kv_heads
    return [CascadeLayout(rows, each) for each in zip(*levels, strict=True)]


def _levels(
    level: CascadeLevel,
    rows: int,
    slots: NDArray[np.int32],
    holders: NDArray[np.integer] | None,
    pool: KVPool,
) -> list[CascadeLevel]:
    """The level of each layer.

    Args:
        level: of all layers.
        rows: of the batch.
        slots: int32 [N], its keys.
        holders: [C, N], see `HeadTable.holders`; None: each head holds its own.
        pool: whose slots they are.
    """
    layers, heads = len(pool.layers), pool.layers[0].num_kv_heads
    count, total = len(slots), layers * heads
    begins = level.qo_indptr.numpy()
    qo = np.append((rows * np.arange(heads)[:, None] + begins[:-1]).ravel(), rows * heads)
    qo_indptr = torch.from_numpy(qo.astype(np.int32))
    lengths = np.diff(level.kv_indptr.numpy())
    cell = np.arange(total)
    first = cell // heads * (pool.slots + 1) * heads + cell % heads  # of slot 0
    if holders is None:
        addresses = (first[:, None] + slots * heads).ravel()
        each = np.broadcast_to(lengths, (total, len(lengths)))
        bounds = count * np.arange(0, total + 1, heads)
    else:
        flat = np.ascontiguousarray(holders.T).ravel()
        ordered = np.argsort(flat, kind="stable")  # by head, then in order of the keys
        key, cell = np.divmod(ordered, total)
        addresses = first[cell] + slots[key].astype(np.int64) * heads
        request = np.repeat(np.arange(len(lengths)), lengths)
        numbers = flat[ordered].astype(np.int64) * len(lengths) + request[key]
        each = np.bincount(numbers, minlength=total * len(lengths)).reshape(total, -1)
        bounds = np.append(0, np.cumsum(each.sum(1)))[::heads]
    addresses = addresses.astype(np.int32)
    return [
        CascadeLevel(
            qo_indptr,
            indptr_of(each[layer * heads : (layer + 1) * heads].ravel()),
            torch.from_numpy(addresses[bounds[layer] : bounds[layer + 1]]),
            causal=level.causal,
        )
        for layer in range(layers)
    ]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[T, H_q, D] as [H_kv * T, H_q / H_kv, D], the rows of the first KV head first."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def _by_row(x: Tensor, heads: int) -> Tensor:
    """[H_kv * T, g, D] as [T, H_kv * g, D]."""
    return x.unflatten(0, (heads, -1)).transpose(0, 1).flatten(1, 2).contiguous()
