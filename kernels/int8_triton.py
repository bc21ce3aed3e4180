"""The Triton kernel that writes 8-bit KV; importing this module imports triton."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from arbor.kernels.int8 import GROUP, MOST_CODE, groups_of

# Added to a number below 2^22 and taken away again, it leaves the nearest whole number, ties to
# even.
ROUNDING = tl.constexpr(3 * 2.0**22)


@triton.jit
def store_kernel(
    x,
    pool,
    slots,
    x_row,
    x_head,
    pool_slot: tl.constexpr,
    pool_head: tl.constexpr,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    MOST: tl.constexpr,
):
    """One head of one row: codes, and the scales of its groups behind them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = tl.arange(0, GROUPS)
    d = group[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    given = tl.load(x + row * x_row + head * x_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    wanted = tl.div_rn(tl.max(tl.abs(given), 1), MOST)
    wanted = tl.where(tl.max((given != given).to(tl.int32), 1) > 0, float("nan"), wanted)
    scale = wanted.to(tl.float16)
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    scale = tl.where(scale.to(tl.float32) < wanted, above, scale)
    divisor = tl.where(scale == 0, 1.0, scale.to(tl.float32))
    code = tl.div_rn(given, tl.broadcast_to(divisor[:, None], (GROUPS, CHANNELS)))
    code = (code + ROUNDING) - ROUNDING
    code = tl.where(code == code, code, 0.0)
    place = pool + tl.load(slots + row) * pool_slot + head * pool_head
    tl.store(place + d, code.to(tl.int8), mask=d < DIM)
    behind = (place + DIM).to(tl.pointer_type(tl.float16))
    tl.store(behind + group, scale, mask=group * CHANNELS < DIM)


def store(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Quantise K or V of one layer into slots; see `arbor.kernels.int8.store`.

    Args:
        pool, slots, x: as there; D is even, as scales begin at even bytes.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, heads, dim = x.shape
    if rows:
        store_kernel[(rows, heads)](
            *(x, pool, slots.contiguous(), *x.stride()[:2], *pool.stride()[:2]),
            *(dim, triton.next_power_of_2(groups_of(dim)), GROUP, float(MOST_CODE)),
            num_warps=1,
        )
