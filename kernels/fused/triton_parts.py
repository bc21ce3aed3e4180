"""RMS norms and gated activations as Triton kernels; importing this module imports triton.

A norm of transformers is six to eight kernels that read and write a float32 copy of the hidden
states, a gated activation is two; each is one here. Rounding is transformers': results differ from
it only where the order of a sum or an exponential does.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.fused.parts import Activation, NormForm

# Values of one program of `gated_kernel`, at most.
GATED_BLOCK = 1024
# Values of a row per warp: 16 per thread, so that a row of 4,096 has eight warps.
VALUES_PER_WARP = 512
MOST_WARPS = 16
# Products and sums become one operation, in every version of Triton.
FUSION = {"enable_fp_fusion": True}


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """out [rows, WIDTH] = the weighted norm of x; a program a row, which stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 0) / WIDTH
    value = value * tl.rsqrt(mean + eps)
    if ROUNDS_FIRST:
        value = value.to(dtype).to(tl.float32)
    value = value * (factor + OFFSET)
    tl.store(out + row * WIDTH + column, value.to(dtype), mask=inside)


@triton.jit
def gated_kernel(
    gate,
    up,
    out,
    gate_row,
    up_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """out [rows, WIDTH] = activation(gate) * up; a program for a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value = value / (1.0 + tl.exp(-value))
    else:  # (1 + tanh(u)) / 2 = sigmoid(2u) for u = sqrt(2 / pi) * (x + 0.044715 x^3)
        twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-twice))
    value = value.to(dtype).to(tl.float32) * factor
    tl.store(out + row * WIDTH + column, value.to(dtype), mask=inside)


def norm_launch(width: int) -> dict[str, Any]:
    """Block and warps of `rms_norm_kernel` for rows of a width."""
    block = triton.next_power_of_2(width)
    warps = min(MOST_WARPS, max(1, block // VALUES_PER_WARP))
    return {"BLOCK": block, "num_warps": warps, **FUSION}


def gated_launch(width: int) -> dict[str, Any]:
    """Block and warps of `gated_kernel` for rows of a width."""
    return {"BLOCK": min(GATED_BLOCK, triton.next_power_of_2(width)), "num_warps": 4, **FUSION}


class TritonFusedOps:
    """`FusedOps` on CUDA."""

    row_invariant = False  # the order of a row's sum is the compiler's

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """See `FusedOps.rms_norm`."""
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        count, width = rows.shape
        if count:
            with torch.cuda.device_of(x):  # Triton launches on the current device
                rms_norm_kernel[(count,)](
                    rows,
                    weight,
                    out,
                    rows.stride(0),
                    eps,
                    WIDTH=width,
                    OFFSET=form.offset,
                    ROUNDS_FIRST=form.rounds_first,
                    **norm_launch(width),
                )
        return out

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """See `FusedOps.gated`."""
        gates, ups = _rows(gate), _rows(up)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        count, width = gates.shape
        if count:
            launch = gated_launch(width)
            with torch.cuda.device_of(gate):
                gated_kernel[(count, triton.cdiv(width, launch["BLOCK"]))](
                    gates,
                    ups,
                    out,
                    gates.stride(0),
                    ups.stride(0),
                    WIDTH=width,
                    ACTIVATION=activation,
                    **launch,
                )
        return out


def _rows(x: Tensor) -> Tensor:
    """[rows, width], values of a row next to each other; copied only if that takes a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
