"""Rotary position embedding: the kernels have torch's bits, and write where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.slow_cases import drawn
from test_invariant_triton import run_check
from torch import Tensor

from arbor.kernels.fused.rotary import (
    ROTARY_FORMS,
    RotaryForm,
    RotaryOps,
    rotary_ops,
    rotate_by_torch,
)
from arbor.kernels.native import native_library

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# of a head, and of its rotated part: all, some, none; ends within vectors
SIZES = ((64, 64), (8, 4), (50, 50), (80, 32), (128, 100), (256, 256), (16, 0))

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")


def native_rotary() -> RotaryOps:
    ops = rotary_ops(CPU)
    assert ops is not None
    return ops


def tables(rows: int, rotated: int, form: RotaryForm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of any numbers, so that a number at a wrong place shows."""
    cos, sin = torch.randn(2, rows, rotated // (2 if form.half_table else 1)).to(dtype)
    return cos, sin


@needs_native
@pytest.mark.parametrize(("size", "dtype", "form"), drawn(SIZES, DTYPES, ROTARY_FORMS, count=14))
def test_the_kernel_has_the_bits_of_torch(
    form: RotaryForm, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    dim, rotated = size
    both = torch.randn(5, 7, dim).to(dtype)
    q, k = both[:, :4], both[:, 4:]  # rows with a stride
    for table_dtype in (dtype,) if form.rounds_products else DTYPES:
        cos, sin = tables(5, rotated, form, table_dtype)

        found_q, found_k = native_rotary().rotate(q, k, cos, sin, form)

        assert torch.equal(found_q, rotate_by_torch(q, cos, sin, form))
        assert torch.equal(found_k, rotate_by_torch(k, cos, sin, form))
        alone = native_rotary().rotate(q[3:4], k[3:4], cos[3:4], sin[3:4], form)
        assert torch.equal(alone[0], found_q[3:4]) and torch.equal(alone[1], found_k[3:4])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [ROTARY_FORMS[0], None], ids=["rotated", "as_they_are"])
def test_keys_and_values_are_written_to_their_slots_alone(
    form: RotaryForm | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(4, 3 + 2 + 2, 32).to(dtype)
    q, k, v = qkv.split((3, 2, 2), dim=1)
    cos, sin = tables(4, 32, ROTARY_FORMS[0], dtype)
    store = torch.full((2, 10, 2, 40), torch.nan, dtype=dtype)
    pools = store[0][..., :32], store[1][..., 4:36]  # slots with a stride
    slots = torch.tensor([7, 9, 2, 9])  # the last row of a slot remains

    found = native_rotary().rotate_and_write(q, k, v, cos, sin, form, pools, slots)

    wanted_q, wanted_k = native_rotary().rotate(q, k, cos, sin, form)
    assert torch.equal(found, wanted_q)
    if form is None:
        assert torch.equal(wanted_q, q) and torch.equal(wanted_k, k)
    for row, slot in ((0, 7), (2, 2), (3, 9)):
        assert torch.equal(pools[0][slot], wanted_k[row])
        assert torch.equal(pools[1][slot], v[row])
    others = [slot for slot in range(10) if slot not in (7, 9, 2)]
    assert store[:, others].isnan().all()
    assert store[0][..., 32:].isnan().all() and store[1][..., :4].isnan().all()
    assert store[1][..., 36:].isnan().all()


@pytest.mark.slow
def test_the_triton_kernel_has_the_bits_of_torch_and_writes_to_its_slots_alone() -> None:
    run_check("rotary", interpreted=True)


@pytest.mark.slow
def test_the_triton_kernel_compiles_for_hopper_and_rounds_as_torch() -> None:
    run_check("rotary_hopper", interpreted=False)
