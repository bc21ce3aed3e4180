"""The native attention kernels on random cascade layouts, against the reference.

A case is a layout of any kind (decode, prefill, rehydration, up to three shared levels, windows)
with random heads, dimensions, soft caps, sinks, strides and dtype, all drawn from its number.
``ARBOR_FUZZ_CASES=100000 python -m pytest -m slow tests/fuzz/test_native_layouts.py`` runs as many
in tests of 2,500; a failure names its case.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from test_kernels import POOL_SLOTS, TOLERANCE, Case, random_layout
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, apply_sinks
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.native import native_library

FEW = 200
NOISE = 1 << 22
DTYPES = (torch.float32, torch.bfloat16)
DIMS = (16, 16, 32, 32, 48, 64, 64, 80, 96, 112, 128, 144, 176, 208, 240, 256)

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library is not built")


@functools.cache
def noise(dtype: torch.dtype) -> Tensor:
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).to(dtype)


def drawn_case(number: int) -> Case:
    """A case whose tensors are pieces of the same noise: a number at a wrong place shows."""
    draw = random.Random(number)
    kv_heads, group = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4, 7])
    dim = draw.choice(DIMS)
    windowed = draw.random() < 0.3
    shape = AttentionShape(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=draw.choice([dim, dim, draw.choice(DIMS)]),
        scaling=dim**-0.5,
        window=draw.choice([1, 4, 30, 1000]) if windowed else None,
        softcap=draw.choice([None, None, 2.0]),
    )
    levels = random_layout(draw, windowed)
    rows = int(levels[0].qo_indptr[-1])
    source = noise(draw.choice(DTYPES))

    def piece(count: int, heads: int, width: int) -> Tensor:
        head, slot = width, heads * width
        if draw.random() < 0.3:  # with gaps, heads first or slots first
            head = width + draw.choice([0, 1, 16])
            slot = heads * head + draw.choice([0, 3, 32])
            if draw.random() < 0.5:
                slot, head = head, head * count
        spread = (count - 1) * slot + (heads - 1) * head + width
        begin = draw.randrange(NOISE - spread)
        return source.as_strided((count, heads, width), (slot, head, 1), begin)

    return Case(
        CascadeLayout(rows, tuple(levels)),
        shape,
        piece(rows, shape.num_qo_heads, dim),
        piece(POOL_SLOTS, kv_heads, dim),
        piece(POOL_SLOTS, kv_heads, shape.head_dim_vo),
        torch.randn(shape.num_qo_heads, generator=torch.Generator().manual_seed(number))
        if draw.random() < 0.3
        else None,
    )


def by_one_product(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and mass as `RowwiseAttention` defines them, of all rows and heads at once."""
    shape = case.shape
    lists = RowwiseAttention().plan(case.layout, shape).keys
    slots = torch.unique(torch.cat(lists))
    reads = torch.zeros(len(lists), len(slots), dtype=torch.bool)
    for row, each in enumerate(lists):
        reads[row, torch.searchsorted(slots, each)] = True
    heads = (shape.num_kv_heads, shape.group)
    q, k, v = case.q.float(), case.k_pool[slots].float(), case.v_pool[slots].float()
    logits = torch.einsum("rhgd,shd->rhgs", q.unflatten(1, heads), k) * shape.scaling
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    logits = logits.masked_fill(~reads[:, None, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("rhgs,shd->rhgd", (logits - lse[..., None]).exp().nan_to_num(0.0), v)
    flat_out, flat_lse = out.flatten(1, 2), lse.flatten(1, 2)
    if case.sinks is not None:
        flat_out, flat_lse = apply_sinks(flat_out, flat_lse, case.sinks)
    weights = (logits - flat_lse.unflatten(1, heads)[..., None]).exp().nan_to_num(0.0)
    mass = torch.zeros(POOL_SLOTS).index_add_(0, slots, weights.sum((0, 1, 2)))
    return flat_out.to(case.q.dtype), flat_lse, mass


def compare(numbers: range) -> int:
    """Compare cases with the reference; how many were compared."""
    backend = NativeCascade()
    done = 0
    for number in numbers:
        case = drawn_case(number)
        plan = backend.plan(case.layout, case.shape)
        assert plan.job is not None, "computed by the kernels"
        found = backend.run_observed(plan, case.q, case.k_pool, case.v_pool, case.sinks)
        tolerance, lse_tolerance = TOLERANCE[case.q.dtype]
        bounds = (tolerance, lse_tolerance, 10 * lse_tolerance)
        for name, one, other, bound in zip(
            ("out", "lse", "mass"), found, by_one_product(case), bounds, strict=True
        ):
            label = f"case {number}, {name}: {{}}".format
            torch.testing.assert_close(one, other, atol=bound, rtol=bound, msg=label)
        done += 1
    return done


@pytest.mark.parametrize("number", range(12))
def test_one_product_is_the_reference(number: int) -> None:
    case = drawn_case(number)
    reference = RowwiseAttention()
    plan = reference.plan(case.layout, case.shape)
    out, lse = reference.run(plan, case.q, case.k_pool, case.v_pool, case.sinks)
    mass = reference.mass(plan, case.q, case.k_pool, lse)

    found = by_one_product(case)

    bound = 1e-4 if case.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, (out, lse, mass), atol=bound, rtol=bound)


def test_a_few_random_layouts_agree_with_the_reference() -> None:
    assert compare(range(FEW)) == FEW
