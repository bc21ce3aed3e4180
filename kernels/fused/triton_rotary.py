"""Rotary position embedding and the write of K and V as a Triton kernel; importing it imports
triton.

transformers rotates queries and keys by ten kernels, and storing K and V takes two more; all of it
is one here, with the bits of torch (`arbor.kernels.fused.rotary.rotate_by_torch`).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.fused.rotary import RotaryForm

# Products and sums stay two operations, as they are in torch.
FUSION = {"enable_fp_fusion": False}


@triton.jit
def rotary_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    q_out,
    k_out,
    v_out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    cos_row,
    sin_row,
    k_out_slot,
    k_out_head,
    v_out_slot,
    v_out_head,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_ANGLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """One head of one row: of q to q_out; of k, and of v if WRITES, to a slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dtype: tl.constexpr = q_out.dtype.element_ty
    if head < Q_HEADS:
        x = q + row * q_row + head * q_head
        out = q_out + (row * Q_HEADS + head) * DIM
    else:
        head -= Q_HEADS
        x = k + row * k_row + head * k_head
        place = row
        if WRITES:
            place = tl.load(slots + row)
            column = tl.arange(0, WHOLE_V)
            part = tl.load(v + row * v_row + head * v_head + column, mask=column < DIM_V)
            there = v_out + place * v_out_slot + head * v_out_head
            tl.store(there + column, part, mask=column < DIM_V)
        out = k_out + place * k_out_slot + head * k_out_head
    if ROTATED > 0:
        pair = tl.arange(0, BLOCK)
        inside = pair < ROTATED // 2
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, pair + ROTATED // 2
        if ONE_ANGLE:
            first_angle, second_angle = pair, pair
        else:
            first_angle, second_angle = first, second
        a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
        cosines, sines = cos + row * cos_row, sin + row * sin_row
        cos_a = tl.load(cosines + first_angle, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cosines + second_angle, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(sines + first_angle, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sines + second_angle, mask=inside, other=0.0).to(tl.float32)
        aa, bb, ba, ab = a * cos_a, b * sin_a, b * cos_b, a * sin_b
        if ROUNDS:
            aa, bb = aa.to(dtype).to(tl.float32), bb.to(dtype).to(tl.float32)
            ba, ab = ba.to(dtype).to(tl.float32), ab.to(dtype).to(tl.float32)
        tl.store(out + first, (aa - bb).to(dtype), mask=inside)
        tl.store(out + second, (ba + ab).to(dtype), mask=inside)
    if ROTATED < DIM:
        column = tl.arange(0, WHOLE)
        rest = (column >= ROTATED) & (column < DIM)
        tl.store(out + column, tl.load(x + column, mask=rest), mask=rest)


class TritonRotary:
    """`RotaryOps` on CUDA; where several rows name one slot, any of them remains."""

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm | None
    ) -> tuple[Tensor, Tensor]:
        """See `RotaryOps.rotate`."""
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        self._launch(q, k, k, cos, sin, form, (q_out, k_out, k_out), None)
        return q_out, k_out

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        form: RotaryForm | None,
        pools: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """See `RotaryOps.rotate_and_write`."""
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._launch(q, k, v, cos, sin, form, (q_out, *pools), slots)
        return q_out

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        form: RotaryForm | None,
        into: tuple[Tensor, Tensor, Tensor],
        slots: Tensor | None,
    ) -> None:
        q, k, v, cos, sin = map(_dense, (q, k, v, cos, sin))
        rows, heads, dim = q.shape
        rotated = 0 if form is None else form.rotated(cos)
        assert rotated <= dim and rotated % 2 == 0, "heads and tables that fit"
        assert q.dtype == k.dtype and cos.dtype == sin.dtype, "heads and tables of one dtype each"
        if not rows:
            return
        q_out, k_out, v_out = into
        with torch.cuda.device_of(q):  # Triton launches on the current device
            rotary_kernel[(rows, heads + k.shape[1])](
                *(q, k, v, cos, sin, q if slots is None else slots, q_out, k_out, v_out),
                *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
                *(cos.stride(0), sin.stride(0), *k_out.stride()[:2], *v_out.stride()[:2]),
                Q_HEADS=heads,
                DIM=dim,
                DIM_V=v.shape[2],
                WHOLE=triton.next_power_of_2(dim),
                WHOLE_V=triton.next_power_of_2(v.shape[2]),
                WRITES=slots is not None,
                **constants(form, rotated, rounds=cos.dtype == q.dtype),
            )


def constants(form: RotaryForm | None, rotated: int, *, rounds: bool) -> dict[str, object]:
    """What `rotary_kernel` is compiled for.

    Args:
        form: of the rotation; None: nothing is rotated.
        rotated: numbers of a head that are.
        rounds: whether the tables have the dtype of the heads; else products are of the wider one.
    """
    return {
        "ROTATED": rotated,
        "BLOCK": triton.next_power_of_2(max(1, rotated // 2)),
        "INTERLEAVED": form is not None and form.interleaved,
        "ONE_ANGLE": form is not None and form.one_angle,
        "ROUNDS": form is not None and form.rounds_products and rounds,
        "num_warps": 1,
        **FUSION,
    }


def _dense(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
