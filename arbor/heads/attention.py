"""CellAttention: attention where KV heads hold tokens in each other's cells of a slot."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    ObservingBackend,
    apply_sinks,
)
from arbor.memory.pool import KVPool
from arbor.model.plan import select_rows
from arbor.model.sharing import indptr_of


class CellAttention:
    """The attention of one forward over the cells of a pool, each of which holds one KV head's K
    and V of a token (`HeadTable`).

    To the backend, each KV head of a row is a row of its own with one KV head: its keys are the
    cells that hold the head's tokens, in whichever layer or head they lie. FlashInfer's batched
    wrappers, torch and the native kernels run that as it is.

    Args:
        lists: which cells each layer reads.
        pool: whose layers are alike.
        backend: runs the attention; a layer is planned right before it runs, since all have one
            shape, of which a backend keeps one plan.
    """

    def __init__(self, lists: CellLists, pool: KVPool, backend: AttentionBackend) -> None:
        self._lists = lists
        self._all_lists = lists.layouts  # of all rows
        self._pool = pool
        self._backend = backend
        self._received: list[Tensor] = []  # of each layer so far
        self._sum: Tensor | None = None

    @property
    def mass(self) -> Tensor | None:
        """The attention mass of each cell of the layers observed, all of them, float32
        [C, slots + 1]; None: none was."""
        if self._sum is not None:
            layers, heads = len(self._pool.layers), self._pool.layers[0].num_kv_heads
            each = self._sum.view(layers, self._pool.slots + 1, heads)
            return each.transpose(1, 2).flatten(0, 1)
        return torch.cat(self._received) if self._received else None

    def run(
        self,
        layer: int,
        shape: AttentionShape,
        q: Tensor,
        sinks: Tensor | None,
        *,
        observe: bool = False,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Attention of a layer.

        Args:
            q: [T, H_q, D_k], position-encoded.
            sinks: see `AttentionBackend.run`.
            observe: add to `mass`.
            counted: bool [T], rows whose attention counts; None: all.

        Returns:
            [T, H_q, D_v].
        """
        heads, backend = shape.num_kv_heads, self._backend
        single = replace(shape, num_qo_heads=shape.group, num_kv_heads=1)
        plan = backend.plan(self._lists.layouts[layer], single)
        pools = self._cells_of(layer)
        rows = _by_head(q, heads)
        mask = None if counted is None else counted.repeat(heads)
        if observe and sinks is None and isinstance(backend, ObservingBackend):
            out, _, mass = backend.run_observed(plan, rows, *pools, None, mask)
            self._add(mass)
            return _by_row(out, heads)
        out, lse = backend.run(plan, rows, *pools, None)
        out = _by_row(out, heads)
        if sinks is not None:
            of_rows = _by_row(lse[..., None], heads)[..., 0]
            out, of_rows = apply_sinks(out, of_rows, sinks)
            lse = _by_head(of_rows[..., None], heads)[..., 0]
        if observe:
            if mask is not None:
                lse = lse.masked_fill(~mask.to(lse.device)[:, None], math.inf)
            self._add(backend.mass(plan, rows, pools[0], lse))
        return out

    def keep_rows(self, alive: Tensor) -> None:
        """From the next layer on only these rows of the batch run (int64 [T'], increasing)."""
        every = self._all_lists[0].rows
        count = every // self._pool.layers[0].num_kv_heads
        rows = torch.cat([alive + begin for begin in range(0, every, count)])
        self._lists = replace(
            self._lists, layouts=[select_rows(each, rows, None) for each in self._all_lists]
        )

    def _cells_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the cells that the lists of a layer number."""
        if self._lists.across:
            return self._pool.cells()
        k, v = self._pool.k[layer], self._pool.v[layer]
        return k.view(-1, 1, k.shape[2]), v.view(-1, 1, v.shape[2])

    def _add(self, mass: Tensor) -> None:
        if not self._lists.across:
            heads = self._pool.layers[0].num_kv_heads
            self._received.append(mass.view(-1, heads).T)
        else:
            self._sum = mass if self._sum is None else self._sum.add_(mass)


@dataclass(frozen=True, slots=True)
class CellLists:
    """Which cells the KV heads of each layer read.

    Attributes:
        layouts: of each layer, with H_kv rows for each of the batch's T: row h * T + r reads for KV
            head h what row r reads.
        across: cells are numbered through all layers, since some hold tokens of other layers'
            heads (`KVPool.cells`); else within their layer: slot s has cells s * H_kv and on.
    """

    layouts: list[CascadeLayout]
    across: bool


def cell_attention(
    layout: CascadeLayout, pool: KVPool, backend: AttentionBackend
) -> CellAttention | None:
    """The attention of a batch which reads the slots of a layout; None: every head reads its own
    cells. See `KVPool.cell_attention`."""
    lists = cell_lists(layout, pool)
    return None if lists is None else CellAttention(lists, pool, backend)


def cell_lists(layout: CascadeLayout, pool: KVPool) -> CellLists | None:
    """The cells that a batch reads which reads the slots of a layout.

    Args:
        layout: without a window.

    Returns:
        None: every head reads its own cells, so that `layout` serves all.
    """
    if pool.holders is None:
        return None
    heads = pool.layers[0].num_kv_heads
    keys = [level.kv_indices.numpy() for level in layout.levels]
    holders = [pool.holders(each) for each in keys]
    if all(each is None for each in holders):
        return None
    layer = np.arange(len(pool.layers) * heads)[:, None] // heads
    across = any(each is not None and (each // heads != layer).any() for each in holders)
    levels = [
        _levels(level, layout.rows, slots, holder, pool, across)
        for level, slots, holder in zip(layout.levels, keys, holders, strict=True)
    ]
    rows = layout.rows * heads
    return CellLists([CascadeLayout(rows, each) for each in zip(*levels, strict=True)], across)


def _levels(
    level: CascadeLevel,
    rows: int,
    slots: NDArray[np.int32],
    holders: NDArray[np.integer] | None,
    pool: KVPool,
    across: bool,
) -> list[CascadeLevel]:
    """The level of each layer.

    Args:
        slots: int32 [N], its keys.
        holders: [C, N], see `HeadTable.holders`; None: each head holds its own.
        across: see `CellLists`.
    """
    layers, heads = len(pool.layers), pool.layers[0].num_kv_heads
    count, total = len(slots), layers * heads
    begins = level.qo_indptr.numpy()
    qo = np.append((rows * np.arange(heads)[:, None] + begins[:-1]).ravel(), rows * heads)
    qo_indptr = torch.from_numpy(qo.astype(np.int32))
    lengths = np.diff(level.kv_indptr.numpy())
    cell = np.arange(total)
    first = cell % heads + (cell // heads * (pool.slots + 1) * heads if across else 0)  # of slot 0
    if holders is None:
        addresses = (first[:, None] + slots.astype(np.int64) * heads).ravel()
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
