"""The Triton kernel of tree attention; importing this module imports triton."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.tree_work import NARROW, wide_tile
from arbor.kernels.int8 import GROUP
from arbor.kernels.invariant_triton import merge

ITEM = tl.constexpr(8)  # numbers of an item
CHANNELS = tl.constexpr(GROUP)  # that share a scale in 8-bit KV
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decoded(codes, scales, like, BEFORE: tl.constexpr, DIM: tl.constexpr, AFTER: tl.constexpr):
    """Numbers of 8-bit codes [BEFORE, DIM, AFTER] and the scales of their groups of channels."""
    groups: tl.constexpr = scales.shape[1]
    parts = tl.reshape(codes, (BEFORE, groups, DIM // groups, AFTER)).to(tl.float32)
    parts *= tl.reshape(scales, (BEFORE, groups, 1, AFTER)).to(tl.float32)
    return parts.to(like.dtype)


@triton.jit
def read_k(pool, places, held, like, DIM: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr):
    """K of N slots that begin at `places`, [PADDED, N]: numbers, or 8-bit codes times scales."""
    d = tl.arange(0, PADDED)
    mask = held[None, :] & (d < DIM)[:, None]
    found = tl.load(pool + places[None, :] + d[:, None], mask=mask, other=0)
    if pool.dtype.element_ty == tl.int8:
        groups: tl.constexpr = (PADDED + CHANNELS - 1) // CHANNELS
        g = tl.arange(0, groups)
        scales = (pool + places[None, :] + DIM).to(tl.pointer_type(tl.float16)) + g[:, None]
        mask = held[None, :] & (g * CHANNELS < DIM)[:, None]
        scale = tl.load(scales, mask=mask, other=0)[None]
        found = tl.reshape(decoded(found, scale, like, 1, PADDED, N), (PADDED, N))
    return found


@triton.jit
def read_v(pool, places, held, like, DIM: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr):
    """V of N slots, [N, PADDED]; see `read_k`."""
    d = tl.arange(0, PADDED)
    mask = held[:, None] & (d < DIM)[None, :]
    found = tl.load(pool + places[:, None] + d[None, :], mask=mask, other=0)
    if pool.dtype.element_ty == tl.int8:
        groups: tl.constexpr = (PADDED + CHANNELS - 1) // CHANNELS
        g = tl.arange(0, groups)
        scales = (pool + places[:, None] + DIM).to(tl.pointer_type(tl.float16)) + g[None, :]
        mask = held[:, None] & (g * CHANNELS < DIM)[None, :]
        scale = tl.load(scales, mask=mask, other=0)
        found = tl.reshape(decoded(found, scale, like, N, PADDED, 1), (N, PADDED))
    return found


@triton.jit
def attend_tile(
    q,
    k_pool,
    v_pool,
    slots,
    places,
    part_out,
    part_lse,
    first_row,
    end_row,
    first_key,
    end_key,
    offset,
    span,
    first_place,
    kv_head,
    k_slot: tl.constexpr,
    k_head: tl.constexpr,
    v_slot: tl.constexpr,
    v_head: tl.constexpr,
    scaling: tl.constexpr,
    softcap: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """An item in a tile of BLOCK_M pairs of a row and a query head of one group.

    Logits are of base 2.
    """
    m = tl.arange(0, BLOCK_M)
    number = m // GROUP
    present = number < end_row - first_row
    row = first_row + number
    head = kv_head * GROUP + m % GROUP
    d_qk = tl.arange(0, PADDED_QK)
    d_vo = tl.arange(0, PADDED_VO)
    row_head = row.to(tl.int64) * HEADS + head
    queries = tl.load(
        q + row_head[:, None] * DIM_QK + d_qk[None, :],
        mask=present[:, None] & (d_qk < DIM_QK)[None, :],
        other=0.0,
    )
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    state = tl.zeros((BLOCK_M, PADDED_VO), tl.float32)
    for start in range(first_key, end_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        listed = key < end_key
        slot = tl.load(slots + key, mask=listed, other=0).to(tl.int64)
        place = slot * k_slot + kv_head * k_head
        k = read_k(k_pool, place, listed, queries, DIM_QK, PADDED_QK, BLOCK_N)
        logits = tl.dot(queries, k, input_precision="ieee")
        if softcap > 0:
            capped = 2 * tl.sigmoid(2 * (logits * (scaling / softcap))) - 1
            logits = capped * (softcap * LOG2_E)
        else:
            logits *= scaling * LOG2_E
        distance = (row + offset)[:, None] - key[None, :]
        seen = (distance >= 0) & (distance < span) & listed[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # of rows that have read no key yet
        kept = tl.exp2(top - base)
        weights = tl.exp2(logits - base[:, None])
        place = slot * v_slot + kv_head * v_head
        v = read_v(v_pool, place, listed, queries, DIM_VO, PADDED_VO, BLOCK_N)
        total = total * kept + tl.sum(weights, 1)
        state = state * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    total = tl.where(present, total, 1.0)
    place = tl.load(places + first_place + number, mask=present, other=0)
    part = place.to(tl.int64) * HEADS + head
    tl.store(
        part_out + part[:, None] * DIM_VO + d_vo[None, :],
        state / total[:, None],
        mask=present[:, None] & (d_vo < DIM_VO)[None, :],
    )
    tl.store(part_lse + part, top * LN_2 + tl.log(total), mask=present)


@triton.jit
def tree_kernel(
    q,
    k_pool,
    v_pool,
    slots,
    items,
    places,
    grown,
    part_out,
    part_lse,
    k_slot: tl.constexpr,
    k_head: tl.constexpr,
    v_slot: tl.constexpr,
    v_head: tl.constexpr,
    scaling: tl.constexpr,
    softcap: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One item for one KV head; an item without rows is room that is not used."""
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM
    first_row = tl.load(item)
    end_row = tl.load(item + 1)
    first_key = tl.load(item + 2)
    end_key = tl.load(item + 3)
    offset = tl.load(item + 4)
    span = tl.load(item + 5)
    first_place = tl.load(item + 6)
    more = tl.load(item + 7) * tl.load(grown)  # keys at the end of a list that grows
    end_key += more
    offset += more
    pairs = (end_row - first_row) * GROUP
    if pairs > NARROW:
        attend_tile(
            *(q, k_pool, v_pool, slots, places, part_out, part_lse),
            *(first_row, end_row, first_key, end_key, offset, span, first_place, kv_head),
            *(k_slot, k_head, v_slot, v_head, scaling, softcap),
            *(HEADS, GROUP, DIM_QK, DIM_VO, PADDED_QK, PADDED_VO, WIDE, BLOCK_N),
        )
    elif pairs > 0:
        attend_tile(
            *(q, k_pool, v_pool, slots, places, part_out, part_lse),
            *(first_row, end_row, first_key, end_key, offset, span, first_place, kv_head),
            *(k_slot, k_head, v_slot, v_head, scaling, softcap),
            *(HEADS, GROUP, DIM_QK, DIM_VO, PADDED_QK, PADDED_VO, NARROW, BLOCK_N),
        )


def tile(shape: AttentionShape, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and launch options of `tree_kernel` for a layer."""
    widest = max(shape.head_dim_qk, shape.head_dim_vo)
    wide = wide_tile(shape)
    return {
        "scaling": shape.scaling,
        "softcap": shape.softcap or 0.0,
        "HEADS": shape.num_qo_heads,
        "GROUP": shape.group,
        "DIM_QK": shape.head_dim_qk,
        "DIM_VO": shape.head_dim_vo,
        "PADDED_QK": max(16, triton.next_power_of_2(shape.head_dim_qk)),
        "PADDED_VO": max(16, triton.next_power_of_2(shape.head_dim_vo)),
        "WIDE": wide,
        "NARROW": NARROW,
        "BLOCK_N": 16 if dtype == torch.float32 else 32,
        "num_warps": 4 if widest <= 128 else 8,
        "num_stages": 2 if dtype == torch.float32 else 3,
    }


def attend(
    shape: AttentionShape,
    items: Tensor,
    places: Tensor,
    ends: Tensor,
    slots: Tensor,
    grown: Tensor,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention over a tree in two launches; see `AttentionBackend.run`.

    Args:
        shape: of the layer.
        items, places, ends, slots, grown: of a `TreeWork`, on the device; there may be room after
            them, where items are zeros.
        q, k_pool, v_pool: as in `AttentionBackend.run`.
    """
    q = q.contiguous()
    rows, heads = q.shape[:2]
    dim = shape.head_dim_vo
    part_out = torch.empty(len(places), heads, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(len(places), heads, dtype=torch.float32, device=q.device)
    out = q.new_empty(rows, heads, dim)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        tree_kernel[(shape.num_kv_heads, len(items))](
            *(q, k_pool, v_pool, slots, items, places, grown, part_out, part_lse),
            *(*k_pool.stride()[:2], *v_pool.stride()[:2]),
            **tile(shape, q.dtype),
        )
        merge(part_out, part_lse, ends, out, lse)
    return out, lse
