"""Attention over cells in which KV heads hold each other's tokens, against attention by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.slow_cases import drawn

from arbor.heads.attention import CellAttention, CellLists, cell_attention, cell_lists
from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
)
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.int8 import decode, encode
from arbor.kernels.native import native_library
from arbor.memory.pool import KVPool, LayerKV

LAYERS, HEADS, GROUP, DIM, SLOTS = 3, 2, 3, 16, 20
SHAPE = AttentionShape(HEADS * GROUP, HEADS, DIM, DIM, scaling=DIM**-0.5)
LENT = (4, 5, 6, 12, 13)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# three rows share slots 4 to 8; then two rows of one request, and one of another
SHARED = CascadeLevel(ints(0, 3), ints(0, 5), ints(4, 5, 6, 7, 8), causal=False)
OWN = CascadeLevel(ints(0, 2, 3), ints(0, 4, 6), ints(12, 13, 2, 3, 10, 11), causal=True)
LAYOUT = CascadeLayout(3, (SHARED, OWN))


def holders(draw: np.random.Generator, across_layers: bool) -> NDArray[np.int16]:
    """Which KV head's tokens lie in each cell, [C, slots]; of a lent slot some other's."""
    total = LAYERS * HEADS
    found = np.tile(np.arange(total, dtype=np.int16)[:, None], SLOTS)
    for slot in LENT:
        if across_layers:
            found[:, slot] = draw.integers(0, total, total)
        else:
            for first in range(0, total, HEADS):
                found[first : first + HEADS, slot] = draw.integers(first, first + HEADS, HEADS)
    return found


def pool_of(dtype: torch.dtype, found: NDArray[np.int16] | None) -> KVPool:
    torch.manual_seed(0)
    pool = KVPool([LayerKV(HEADS, DIM, DIM)] * LAYERS, SLOTS, dtype, torch.device("cpu"))
    for part in (*pool.k, *pool.v):
        drawn = torch.randn(SLOTS + 1, HEADS, DIM)
        part.copy_(encode(drawn) if dtype == torch.int8 else drawn)
    if found is not None:
        pool.holders = lambda slots: found[:, slots]
        pool.cell_attention = cell_attention
    return pool


def lists_of(pool: KVPool, across: bool) -> CellLists:
    """The lists of `LAYOUT`."""
    lists = cell_lists(LAYOUT, pool)
    assert lists is not None and lists.across is across
    assert all(each.rows == 3 * HEADS for each in lists.layouts)
    return lists


def by_hand(
    pool: KVPool,
    found: NDArray[np.int16],
    layer: int,
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    counted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H_q, D] and the mass of each cell [C, slots + 1], head by head."""
    out = torch.zeros(3, HEADS * GROUP, DIM)
    mass = torch.zeros(LAYERS * HEADS, SLOTS + 1)
    reads = {
        0: [4, 5, 6, 7, 8, 12, 13, 2],
        1: [4, 5, 6, 7, 8, 12, 13, 2, 3],
        2: [4, 5, 6, 7, 8, 10, 11],
    }
    for row, slots in reads.items():
        for query in range(HEADS * GROUP):
            holder = layer * HEADS + query // GROUP
            cells = [(c, s) for s in slots for c in range(LAYERS * HEADS) if found[c, s] == holder]
            parts = [
                (pool.k[c // HEADS][s, c % HEADS], pool.v[c // HEADS][s, c % HEADS])
                for c, s in cells
            ]
            keys, values = (torch.stack(each).float() for each in zip(*parts, strict=True))
            if pool.dtype == torch.int8:
                keys, values = (decode(torch.stack(each), DIM) for each in zip(*parts, strict=True))
            logits = keys @ q[row, query] * SHAPE.scaling
            if sinks is not None:
                logits = torch.cat([logits, sinks[query : query + 1]])
            weights = logits.softmax(0)[: len(cells)]
            out[row, query] = weights @ values
            for (cell, slot), weight in zip(cells, weights.tolist(), strict=True):
                mass[cell, slot] += weight * float(counted[row])
    return out, mass


BACKENDS: list[type] = [RowwiseAttention, TorchCascade, NativeCascade]


@pytest.mark.parametrize(
    ("kind", "across_layers", "with_sinks", "dtype"),
    drawn(BACKENDS, [False, True], [False, True], [torch.float32, torch.int8], count=12),
)
def test_each_head_reads_the_cells_that_hold_its_tokens(
    kind: type[AttentionBackend], across_layers: bool, with_sinks: bool, dtype: torch.dtype
) -> None:
    if kind is NativeCascade and native_library() is None:
        pytest.skip("the native kernels are not built")
    found = holders(np.random.default_rng(int(across_layers)), across_layers)
    pool = pool_of(dtype, found)
    attention = CellAttention(lists_of(pool, across_layers), pool, kind())
    q = torch.randn(3, HEADS * GROUP, DIM)
    sinks = torch.randn(HEADS * GROUP) if with_sinks else None
    counted = torch.tensor([True, False, True])
    wanted = torch.zeros(LAYERS * HEADS, SLOTS + 1)
    for layer in range(LAYERS):
        out = attention.run(layer, SHAPE, q, sinks, observe=True, counted=counted)
        expected, received = by_hand(pool, found, layer, q, sinks, counted)
        assert torch.allclose(out, expected, atol=1e-5)
        assert torch.equal(attention.run(layer, SHAPE, q, sinks), out)
        wanted += received
    assert attention.mass is not None
    assert torch.allclose(attention.mass, wanted, atol=1e-5)


@pytest.mark.parametrize("across_layers", [False, True])
def test_rows_that_leave_between_layers_leave_their_mass(across_layers: bool) -> None:
    found = holders(np.random.default_rng(7), across_layers)
    pool = pool_of(torch.float32, found)
    attention = CellAttention(lists_of(pool, across_layers), pool, RowwiseAttention())
    q = torch.randn(3, HEADS * GROUP, DIM)
    wanted = torch.zeros(LAYERS * HEADS, SLOTS + 1)
    alive = torch.tensor([0, 1, 2])
    for layer, staying in enumerate(([0, 1, 2], [1, 2], [2])):
        if layer:
            alive = torch.tensor(staying)
            attention.keep_rows(alive)
        out = attention.run(layer, SHAPE, q[alive], None, observe=True)
        counted = torch.zeros(3, dtype=torch.bool)
        counted[alive] = True
        expected, received = by_hand(pool, found, layer, q, None, counted)
        assert torch.allclose(out, expected[alive], atol=1e-5)
        wanted += received
    assert attention.mass is not None and attention.mass.shape == wanted.shape
    assert torch.allclose(attention.mass, wanted, atol=1e-5)
