"""8-bit KV: the error of a group is bounded, and every backend reads what was stored."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.slow_cases import every
from test_kernels import TOLERANCE, Case, cases, make_case, make_level, make_shape, random_layout

from arbor.kernels import native
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.int8 import GROUP, MOST_CODE, decode, encode, groups_of, store, stored_width
from arbor.kernels.native import SETS, native_library

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")
BACKENDS = [
    pytest.param(RowwiseAttention, id="rowwise"),
    pytest.param(TorchCascade, id="torch"),
    pytest.param(NativeCascade, id="native", marks=needs_native),
]
Make = Callable[[], AttentionBackend]

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


# Codes and scales


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 16, 31, 32, 33, 64, 80, 128]),
    st.integers(-24, 17),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_number_changes_by_at_most_half_the_scale_of_its_group(
    seed: int, dim: int, exponent: int, dtype: torch.dtype
) -> None:
    """Scales from below the smallest normal float16 to near the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, dim, generator=generator)
    x = (x * x.abs() * 2.0 ** (exponent if dtype != torch.float16 else min(exponent, 8))).to(dtype)

    stored = encode(x)
    back = decode(stored, dim)

    assert stored.dtype == torch.int8 and stored.shape == (3, 2, stored_width(dim))
    assert back.dtype == torch.float32
    x = x.float()
    for group in range(groups_of(dim)):
        part = slice(group * GROUP, min(dim, (group + 1) * GROUP))
        most = x[..., part].abs().amax(-1, keepdim=True)
        scale = torch.maximum(most / MOST_CODE * (1 + 2**-10), most / MOST_CODE + 2.0**-24)
        assert ((back[..., part] - x[..., part]).abs() <= scale / 2 * (1 + 1e-6)).all()


# Backends


def stored_case(case: Case) -> tuple[Case, Case]:
    """A case over 8-bit pools, and over the numbers that are in them."""
    pools = encode(case.k_pool), encode(case.v_pool)
    dims = case.shape.head_dim_qk, case.shape.head_dim_vo
    numbers = [decode(pool, dim) for pool, dim in zip(pools, dims, strict=True)]
    work = torch.promote_types(case.q.dtype, torch.float32)
    wide = replace(case, q=case.q.to(work), k_pool=numbers[0].to(work), v_pool=numbers[1].to(work))
    return replace(case, k_pool=pools[0], v_pool=pools[1]), wide


def assert_reads_what_is_stored(case: Case, backend: AttentionBackend) -> None:
    """`run` and `mass` equal the reference's over the decoded numbers."""
    stored, wide = stored_case(case)
    reference = RowwiseAttention()
    plan = reference.plan(wide.layout, wide.shape)
    expected, expected_lse = reference.run(plan, wide.q, wide.k_pool, wide.v_pool, wide.sinks)
    mine = backend.plan(stored.layout, stored.shape)
    rounding = TOLERANCE[case.q.dtype][0] / 4 if case.q.dtype.itemsize == 2 else 2e-5
    for _ in range(2):  # the second layer meets the plan of the first
        out, lse = backend.run(mine, stored.q, stored.k_pool, stored.v_pool, stored.sinks)
        assert out.dtype == stored.q.dtype and lse.dtype == torch.float32
        assert out.isfinite().all(), "an unowned slot was read"
        torch.testing.assert_close(out.to(expected.dtype), expected, atol=rounding, rtol=rounding)
        torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)
    heads = torch.arange(case.shape.num_kv_heads)[::2] if case.sinks is not None else None
    expected_mass = reference.mass(plan, wide.q, wide.k_pool, expected_lse, heads)
    mass = backend.mass(mine, stored.q, stored.k_pool, expected_lse, heads)
    torch.testing.assert_close(mass, expected_mass, atol=2e-4, rtol=2e-4)
    expected_mass = reference.mass(plan, wide.q, wide.k_pool, expected_lse, heads, by_head=True)
    mass = backend.mass(mine, stored.q, stored.k_pool, expected_lse, heads, by_head=True)
    torch.testing.assert_close(mass, expected_mass, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("backend", every(2, BACKENDS))
@given(cases())
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW)
def test_every_backend_reads_what_is_stored(backend: Make, case: Case) -> None:
    assert_reads_what_is_stored(case, backend())


@pytest.mark.parametrize("seed", range(6))
def test_a_row_of_8_bit_kv_has_the_same_bits_in_every_batch_if_rowwise(seed: int) -> None:
    case, _ = stored_case(make_case(random_layout(random.Random(seed), False), make_shape()))
    backend = RowwiseAttention()
    plan = backend.plan(case.layout, case.shape)
    together, _ = backend.run(plan, case.q, case.k_pool, case.v_pool)

    for row, keys in enumerate(plan.keys):
        level = make_level([(1, keys.tolist())], causal=True)
        alone = backend.plan(replace(case.layout, rows=1, levels=(level,)), case.shape)
        out, _ = backend.run(alone, case.q[row : row + 1], case.k_pool, case.v_pool)
        assert torch.equal(out[0], together[row])


# Native kernels


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 128, 256])
def test_the_native_kernel_stores_the_bits_of_torch(dim: int, dtype: torch.dtype) -> None:
    """Any magnitude, strided numbers, and slots in any order."""
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(3, 60, 2, dim, generator=generator)
    wide *= 2.0 ** torch.randint(-40, 20, (3, 60, 2, 1), generator=generator)
    wide[0, 3, 0, : dim // 2] = 0.0
    x = wide[:, :, 1].transpose(0, 1).to(dtype)
    slots = torch.randperm(90, generator=generator)[:60]
    pool = torch.zeros(90, 3, stored_width(dim), dtype=torch.int8)

    store(pool, slots, x)

    expected = torch.zeros_like(pool)
    expected[slots] = encode(x)
    assert torch.equal(pool, expected)


@needs_native
@pytest.mark.parametrize("wrong", [[torch.nan], [torch.inf], [-torch.inf, torch.nan], [1e30]])
def test_the_native_kernel_stores_nan_where_torch_does(wrong: list[float]) -> None:
    """By the same bits."""
    x = torch.ones(1, 1, 96)
    x[0, 0, 50 : 50 + len(wrong)] = torch.tensor(wrong)
    pool = torch.zeros(1, 1, stored_width(96), dtype=torch.int8)

    store(pool, torch.tensor([0]), x)

    assert torch.equal(pool, encode(x))
    assert decode(pool[0, 0], 96).isnan().sum() == GROUP


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_of_8_bit_kv_has_the_same_bits_in_every_batch_if_native(
    seed: int, dtype: torch.dtype
) -> None:
    layout = random_layout(random.Random(seed), False)
    shape = make_shape(head_dim_qk=48, head_dim_vo=48)
    case, _ = stored_case(make_case(layout, shape, dtype))
    backend, paths = NativeCascade(), RowwiseAttention().plan(case.layout, case.shape)
    plan = backend.plan(case.layout, case.shape)
    together, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)

    for row, keys in enumerate(paths.keys):
        level = make_level([(1, keys.tolist())], causal=True)
        alone = backend.plan(replace(case.layout, rows=1, levels=(level,)), case.shape)
        out, own = backend.run(alone, case.q[row : row + 1], case.k_pool, case.v_pool)
        assert torch.equal(out[0], together[row]) and torch.equal(own[0], lse[row])


@needs_native
def test_attention_mass_of_8_bit_kv_comes_along() -> None:
    case, _ = stored_case(make_case(random_layout(random.Random(5), False), make_shape()))
    backend = NativeCascade()
    plan = backend.plan(case.layout, case.shape)
    out, lse, mass = backend.run_observed(plan, case.q, case.k_pool, case.v_pool)

    assert torch.equal(out, backend.run(plan, case.q, case.k_pool, case.v_pool)[0])
    expected = backend.mass(plan, case.q, case.k_pool, lse)
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-5)
    assert mass.sum().item() == pytest.approx(case.layout.rows * 4, rel=1e-4)


CHILD = """
import sys, torch
sys.path.insert(0, "tests")
import test_int8
from arbor.kernels.native import native_library
from test_kernels import make_case, make_shape, random_layout
assert native_library().name == sys.argv[1]
for seed in range(12):
    import random
    shape = make_shape(head_dim_qk=48, head_dim_vo=64, softcap=[None, 2.0][seed % 2])
    dtype = [torch.float32, torch.bfloat16][seed // 2 % 2]
    case = make_case(random_layout(random.Random(seed), False), shape, dtype, seed=seed)
    test_int8.assert_reads_what_is_stored(case, test_int8.NativeCascade())
for dtype in (torch.float32, torch.bfloat16):
    test_int8.test_the_native_kernel_stores_the_bits_of_torch(80, dtype)
"""


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("instructions", SETS)
def test_every_instruction_set_reads_and_writes_8_bit_kv(instructions: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, instructions],
        env=os.environ | {native.VARIABLE: instructions},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "has no attribute 'name'" in child.stderr:
        pytest.skip(f"this CPU has no {instructions}")
    assert child.returncode == 0, child.stderr
