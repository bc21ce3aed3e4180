"""Attention mass as a Triton kernel; importing this module imports triton.

Keys are read once per KV head, nothing is written but the sums. For Llama 8B shapes (32 heads over
8 of 128, bfloat16) and 64 leaves with 1,024 shared and 300 own keys each, a layer's keys are 41 MB:
12 us at 3.3 TB/s. Products (3 GFLOP with padding), exponentials (10 million) and atomic additions
(160,000) take less and overlap with that. Over all 32 layers this is 0.4 ms, 5 % of a step of 8 ms.
By arithmetic, not measured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.attention.mass_work import ITEM_KEYS, MassWork

WARPS = 4
SMALLEST_DOT = 16  # values of a head that one product takes, at least


@triton.jit  # type: ignore[untyped-decorator]
def mass_kernel(  # type: ignore[no-untyped-def]
    q,
    k_pool,
    lse,
    mass,
    slots,
    items,
    count,
    heads,
    q_row,
    q_head,
    k_slot,
    k_head,
    lse_row,
    lse_head,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program per item and KV head; see `triton_mass`."""
    item = tl.program_id(0)
    if item < tl.load(count):
        first_row = tl.load(items + item * 6)
        end_row = tl.load(items + item * 6 + 1)
        first_key = tl.load(items + item * 6 + 2)
        end_key = tl.load(items + item * 6 + 3)
        offset = tl.load(items + item * 6 + 4)
        span = tl.load(items + item * 6 + 5)
        kv_head = tl.load(heads + tl.program_id(1))

        dims = tl.arange(0, PADDED_DIM)
        key = first_key + tl.arange(0, KEYS)
        listed = key < end_key
        slot = tl.load(slots + key, mask=listed, other=0).to(tl.int64)
        keys = tl.load(
            k_pool + slot[:, None] * k_slot + kv_head * k_head + dims[None, :],
            mask=listed[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )

        received = tl.zeros((TILE, KEYS), tl.float32)
        pairs = (end_row - first_row) * GROUP  # the query heads of a group are rows too
        for first in range(0, pairs, TILE):
            pair = first + tl.arange(0, TILE)
            row = first_row + pair // GROUP
            head = kv_head * GROUP + pair % GROUP
            real = pair < pairs
            wide_row = row.to(tl.int64)
            queries = tl.load(
                q + (wide_row * q_row + head * q_head)[:, None] + dims[None, :],
                mask=real[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            total = tl.load(lse + wide_row * lse_row + head * lse_head, mask=real, other=0.0)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
            if CAPPED:  # tanh(x) = (1 - e^(-2|x|)) / (1 + e^(-2|x|)), with the sign of x
                small = tl.exp(-2.0 * tl.abs(logits) / softcap)
                bound = softcap * (1.0 - small) / (1.0 + small)
                logits = tl.where(logits < 0, -bound, bound)
            distance = row[:, None] + offset - key[None, :]
            read = (distance >= 0) & (distance < span) & real[:, None] & listed[None, :]
            received += tl.where(read, tl.exp(logits - total[:, None]), 0.0)
        tl.atomic_add(mass + slot, tl.sum(received, 0), mask=listed, sem="relaxed")


def launch_options(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Warps, stages of the pipeline (fewer where tiles are large), fused multiply-add as ever."""
    stages = 3 if head_dim * dtype.itemsize <= 256 else 2
    return {"num_warps": WARPS, "num_stages": stages, "enable_fp_fusion": True}


def constants(work: MassWork) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    shape = work.shape
    return {
        "GROUP": shape.group,
        "DIM": shape.head_dim_qk,
        "PADDED_DIM": max(SMALLEST_DOT, triton.next_power_of_2(shape.head_dim_qk)),
        "TILE": work.tile,
        "KEYS": ITEM_KEYS,
        "CAPPED": shape.softcap is not None,
    }


def triton_mass(
    work: MassWork, q: Tensor, k_pool: Tensor, lse: Tensor, heads: Tensor | None = None
) -> Tensor:
    """Attention mass of each slot; see `AttentionBackend.mass`.

    Equal to `TorchCascade.mass` up to rounding: products are summed in float32, and float32 ones
    are not rounded to TF32. Sums of different programs are added in any order, so that results
    differ in their last bits from call to call.

    Args:
        work: from `mass_work`, on q's device.
        q: [T, H_q, D_k] float32, float16 or bfloat16.
        k_pool: [slots, H_kv, D_k], of q's dtype.
        lse: [T, H_q] float32.
        heads: int64 [n] KV heads to count on the same device; None = all.

    Returns:
        [slots] float32.
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    mass = torch.zeros(k_pool.shape[0], dtype=torch.float32, device=q.device)
    counted = work.heads if heads is None else heads
    grid = (len(work.items), len(counted))
    if 0 in grid:
        return mass
    shape = work.shape
    mass_kernel[grid](
        q,
        k_pool,
        lse,
        mass,
        work.slots,
        work.items,
        work.count,
        counted,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        lse.stride(0),
        lse.stride(1),
        shape.scaling,
        shape.softcap or 1.0,
        **constants(work),
        **launch_options(shape.head_dim_qk, q.dtype),
    )
    return mass
