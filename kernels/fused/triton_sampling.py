"""Sums of exponentials of rows of logits as two Triton kernels; importing it imports triton.

Choosing a token takes a row's largest logit, and the sums that its probabilities are divided by. In
torch these are softmaxes, one of them over a float64 copy of the logits; here the logits are read
once. The order of a row's sum does not depend on the other rows.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton has no types, and its kernels are not Python functions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # logits of a part of a row
WARPS = 8
FUSION = {"enable_fp_fusion": False}


@triton.jit
def part_sums_kernel(
    logits,
    row_stride,
    temperature,
    highest,
    sums,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TEMPERED: tl.constexpr,
):
    """highest [rows, PARTS] float32: the largest logit of each part of a row; sums [2, rows, PARTS]
    float64: of exp(logit - largest), and, if TEMPERED, of exp((logit - largest) / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    x = tl.load(
        logits + row * row_stride + column, mask=column < VOCABULARY, other=float("-inf")
    ).to(tl.float32)
    top = tl.max(x, 0)
    # of a part of impossible tokens, whose sum is 0
    base = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    below = x.to(tl.float64) - base
    at = row * PARTS + part
    tl.store(highest + at, top)
    tl.store(sums + at, tl.sum(tl.exp(below), 0))
    if TEMPERED:
        rows = tl.num_programs(0).to(tl.int64)
        tempered = tl.exp(below / tl.load(temperature))
        tl.store(sums + rows * PARTS + at, tl.sum(tempered, 0))


@triton.jit
def row_sums_kernel(
    temperature,
    highest,
    sums,
    out,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    TEMPERED: tl.constexpr,
):
    """out [3, rows] float64 of one row's parts, see `row_sums`."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    known = part < PARTS
    tops = tl.load(highest + row * PARTS + part, mask=known, other=float("-inf"))
    top = tl.max(tops, 0).to(tl.float64)
    below = tops.to(tl.float64) - top  # NaN of a row without a possible token
    own = tl.load(sums + row * PARTS + part, mask=known, other=0.0)
    total = tl.sum(tl.where(known, own * tl.exp(below), 0.0), 0)
    tempered = total
    if TEMPERED:
        own = tl.load(sums + (rows + row) * PARTS + part, mask=known, other=0.0)
        scale = tl.exp(below / tl.load(temperature))
        tempered = tl.sum(tl.where(known, own * scale, 0.0), 0)
    tl.store(out + row, top)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, tempered)


def row_sums(logits: Tensor, temperature: float) -> Tensor:
    """What the probabilities of each row follow from.

    Args:
        logits: [n, V] float32, float16 or bfloat16, values of a row next to each other.
        temperature: above 0.

    Returns:
        [3, n] float64: the largest logit; the sum of exp(logit - largest); that of
        exp((logit - largest) / temperature). The sums of a row with logits that are NaN or +inf, or
        all -inf, are NaN.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    tempered = temperature != 1
    highest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    sums = torch.empty(2, rows, parts, dtype=torch.float64, device=logits.device)
    out = torch.empty(3, rows, dtype=torch.float64, device=logits.device)
    if not rows:
        return out
    # as a number it would be passed in float32
    divisor = torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    sizes = {"PARTS": parts, "TEMPERED": tempered, **FUSION}
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        part_sums_kernel[(rows, parts)](
            *(logits, logits.stride(0), divisor, highest, sums),
            VOCABULARY=vocabulary,
            PART=PART,
            num_warps=WARPS,
            **sizes,
        )
        row_sums_kernel[(rows,)](
            *(divisor, highest, sums, out),
            PADDED=triton.next_power_of_2(parts),
            num_warps=1,
            **sizes,
        )
    return out
