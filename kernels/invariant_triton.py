"""Triton kernels whose rows do not depend on the batch: products, row sums, attention over slots.

Every tile has one size for a layer, whatever the number of rows; a row's sums run over its numbers
in one order and are never split by the size of the batch. Rows of padding are zeros that no other
row reads. What depends on the batch (numbers of rows, addresses) never selects another compiled
kernel, as Triton would by default for numbers divisible by 16.

Needs Triton, which torch brings along on CUDA; import this module only where it is needed.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape

# Addresses that pass for aligned with Triton, which reads 16 bytes at once.
ALIGNMENT_BYTES = 16
SUM_BLOCK = 1024
# Products and sums become one operation, in every version of Triton.
FUSION = {"enable_fp_fusion": True}
# Keys of a path that are attended to in one part; the parts are merged in the order of the path.
CHUNK_KEYS = 256
BLOCK_KEYS = 64
MERGED, MERGE_WARPS = 8, 1  # parts at a time


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [rows, COLUMNS] = x [rows, DEPTH] @ weight [COLUMNS, DEPTH].T + bias, one tile each."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    left = x + m[:, None].to(tl.int64) * DEPTH + ks[None, :]
    right = weight + n[None, :].to(tl.int64) * DEPTH + ks[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        inside = start + ks < DEPTH
        a = tl.load(left + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=(n < COLUMNS)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < COLUMNS, other=0.0).to(tl.float32)[None, :]
    place = out + m[:, None].to(tl.int64) * COLUMNS + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < COLUMNS)[None])


@triton.jit
def row_sum_kernel(x, out, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows] float32 = the sum of x [rows, DEPTH] over its last dimension; a program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, DEPTH, BLOCK):
        given = tl.load(x + row * DEPTH + start + columns, mask=start + columns < DEPTH, other=0.0)
        total += given.to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["width"])
def attention_kernel(
    q,
    k_pool,
    v_pool,
    keys,
    lengths,
    first_parts,
    items,
    part_out,
    part_lse,
    width,
    k_slot,
    k_head,
    v_slot,
    v_head,
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
    CHUNK: tl.constexpr,
):
    """One chunk of the paths of neighbouring rows that share its slots, for one KV head.

    items [n, 3]: first row, rows, chunk. The last row of an item has the longest list of keys.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(items + item * 3)
    count = tl.load(items + item * 3 + 1)
    chunk = tl.load(items + item * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    present = m < count * GROUP
    row = first_row + tl.where(present, m // GROUP, 0)
    head = kv_head * GROUP + m % GROUP
    own = tl.load(lengths + row) - chunk * CHUNK
    last_row = first_row + count - 1
    longest = tl.load(lengths + last_row) - chunk * CHUNK
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
    for start in range(0, CHUNK, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        held = n < longest
        place = last_row.to(tl.int64) * width + chunk * CHUNK + n
        slots = tl.load(keys + place, mask=held, other=0).to(tl.int64)
        k = tl.load(
            k_pool + slots[None, :] * k_slot + kv_head * k_head + d_qk[:, None],
            mask=held[None, :] & (d_qk < DIM_QK)[:, None],
            other=0.0,
        )
        logits = tl.dot(queries, k, input_precision="ieee") * scaling
        if softcap > 0:
            logits = softcap * (2 * tl.sigmoid(2 * (logits / softcap)) - 1)
        logits = tl.where(n[None, :] < own[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        kept = tl.exp(top - new_top)
        weights = tl.exp(logits - new_top[:, None])
        v = tl.load(
            v_pool + slots[:, None] * v_slot + kv_head * v_head + d_vo[None, :],
            mask=held[:, None] & (d_vo < DIM_VO)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        state = state * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    part = (tl.load(first_parts + row) + chunk).to(tl.int64) * HEADS + head
    tl.store(
        part_out + part[:, None] * DIM_VO + d_vo[None, :],
        state / total[:, None],
        mask=present[:, None] & (d_vo < DIM_VO)[None, :],
    )
    tl.store(part_lse + part, top + tl.log(total), mask=present)


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    first_parts,
    out,
    lse,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's parts for one head, merged BLOCK at a time; the next row's follow them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, PADDED)
    part = tl.load(first_parts + row).to(tl.int64) + tl.arange(0, BLOCK)
    end = tl.load(first_parts + row + 1).to(tl.int64)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    state = tl.zeros((PADDED,), tl.float32)
    for _ in range(tl.cdiv(end - tl.load(first_parts + row), BLOCK)):
        own = tl.load(part_lse + part * HEADS + head, mask=part < end, other=float("-inf"))
        held = (part < end)[:, None] & (d < DIM)[None, :]
        place = (part * HEADS + head)[:, None] * DIM + d[None, :]
        read = tl.load(part_out + place, mask=held, other=0.0)
        new_top = tl.maximum(top, tl.max(own, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # of parts without a key
        kept = tl.exp(top - base)
        weights = tl.exp(own - base)
        state = state * kept + tl.sum(read * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = new_top
        part += BLOCK
    value = state / total
    tl.store(out + (row * HEADS + head) * DIM + d, value.to(out.dtype.element_ty), mask=d < DIM)
    tl.store(lse + row * HEADS + head, top + tl.log(total))


def merge(
    part_out: Tensor, part_lse: Tensor, first_parts: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Merge the parts of each row by their logsumexp.

    Args:
        part_out: [parts, heads, D_v] float32; part_lse: [parts, heads] float32.
        first_parts: int32 [rows + 1], where each row's parts begin, and where the last ones end;
            a row has one at least, and one of them a key.
        out: [rows, heads, D_v], contiguous; lse: [rows, heads] float32, contiguous.
    """
    rows, heads, dim = out.shape
    padded = max(16, triton.next_power_of_2(dim))
    merge_kernel[(rows, heads)](
        *(part_out, part_lse, first_parts, out, lse, heads, dim, padded, MERGED),
        num_warps=MERGE_WARPS,
        **FUSION,
    )


def linear_tile(columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options of `linear_kernel` for a layer; the rows have no say.

    Narrow layers get narrow tiles, so that enough of them run at once without splitting sums.
    """
    if dtype == torch.float32:
        tile = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
        return tile | FUSION
    width = 16 if columns <= 2048 else 32 if columns <= 8192 else 64
    tile = {"BLOCK_M": 64, "BLOCK_N": width, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    return tile | FUSION


def attention_tile(shape: AttentionShape, dtype: torch.dtype) -> dict[str, Any]:
    """Constants and launch options of `attention_kernel` for a layer; the rows have no say."""
    group = triton.next_power_of_2(shape.group)
    widest = max(shape.head_dim_qk, shape.head_dim_vo)
    rows = max(16, group) if dtype == torch.float32 or widest > 256 else max(64, group)
    return {
        "scaling": shape.scaling,
        "softcap": shape.softcap or 0.0,
        "HEADS": shape.num_qo_heads,
        "GROUP": shape.group,
        "DIM_QK": shape.head_dim_qk,
        "DIM_VO": shape.head_dim_vo,
        "PADDED_QK": max(16, triton.next_power_of_2(shape.head_dim_qk)),
        "PADDED_VO": max(16, triton.next_power_of_2(shape.head_dim_vo)),
        "BLOCK_M": rows,
        "BLOCK_N": 16 if dtype == torch.float32 else BLOCK_KEYS,
        "CHUNK": CHUNK_KEYS,
        "num_warps": 4 if widest <= 128 else 8,
        "num_stages": 2,
        **FUSION,
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` up to rounding; a row's bits depend on the row, the weight and the bias alone.

    Args:
        x: [rows, in] float32, float16 or bfloat16; sums are float32.
        weight: [out, in] of the same dtype.
        bias: [out].
    """
    x, weight = _addressed(x), _addressed(weight)
    rows, depth = x.shape
    columns = weight.shape[0]
    out = x.new_empty(rows, columns)
    if rows:
        tile = linear_tile(columns, x.dtype)
        grid = (triton.cdiv(columns, tile["BLOCK_N"]), triton.cdiv(rows, tile["BLOCK_M"]))
        given = weight if bias is None else _addressed(bias)
        linear_kernel[grid](x, weight, given, out, rows, columns, depth, bias is not None, **tile)
    return out


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension in float32; a row's bits depend on the row alone."""
    rows = _addressed(x.reshape(-1, x.shape[-1]))
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if len(out):
        row_sum_kernel[(len(out),)](rows, out, x.shape[-1], SUM_BLOCK, num_warps=4, **FUSION)
    return out.view(x.shape[:-1])


def _addressed(x: Tensor) -> Tensor:
    """Contiguous, at an aligned address: Triton compiles another kernel for other addresses."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


def attend(
    launch: Any,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: dict[str, Any],
) -> None:
    """Attention of some rows, into `out` and `lse`.

    Args:
        launch: a `Launch` of `arbor.kernels.attention.invariant_cascade`.
        q: [rows, heads, D_k]; k_pool, v_pool: as in `AttentionBackend.run`.
        out: [rows, heads, D_v], contiguous; lse: [rows, heads] float32, contiguous.
        tile: `attention_tile` of the layer.
    """
    heads, dim = out.shape[1:]
    part_out = torch.empty(launch.parts, heads, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(launch.parts, heads, dtype=torch.float32, device=q.device)
    attention_kernel[(len(launch.items), heads // tile["GROUP"])](
        _addressed(q),
        k_pool,
        v_pool,
        launch.keys,
        launch.lengths,
        launch.first_parts,
        launch.items,
        part_out,
        part_lse,
        launch.keys.shape[1],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        **tile,
    )
    merged, sums = torch.empty_like(out), torch.empty_like(lse)
    merge(part_out, part_lse, launch.first_parts, merged, sums)
    out.copy_(merged)
    lse.copy_(sums)
