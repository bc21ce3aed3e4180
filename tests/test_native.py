"""The native kernels: every instruction set agrees with the reference, and a row keeps its bits."""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.slow_cases import drawn, only
from test_kernels import (
    Case,
    assert_agrees,
    decode_level,
    make_case,
    make_level,
    make_shape,
    random_layout,
)
from torch import Tensor, nn
from torch.nn import functional as F

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.fused.parts import (
    ACTIVATIONS,
    NORM_FORMS,
    Activation,
    FusedOps,
    NormForm,
    fused_ops,
)
from arbor.kernels.int8 import encode
from arbor.kernels.linear.layers import PackedLinear
from arbor.kernels.native import SETS, AttentionJob, native_library

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")


def random_case(seed: int) -> Case:
    """A layout of any kind in a shape that the kernels compute."""
    draw = random.Random(seed)
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 7])
    dim = draw.choice([16, 32, 48, 64, 80, 128, 256])
    windowed = draw.random() < 0.3
    shape = AttentionShape(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=draw.choice([dim, dim, 32]),
        scaling=dim**-0.5,
        window=draw.choice([1, 4, 30, 1000]) if windowed else None,
        softcap=draw.choice([None, None, 2.0]),
    )
    return make_case(
        random_layout(draw, windowed),
        shape,
        draw.choice(DTYPES),
        sinks=draw.random() < 0.3,
        strided=draw.random() < 0.3,
        seed=seed,
    )


@needs_native
@pytest.mark.parametrize("seed", range(40))
def test_attention_agrees_with_the_reference(seed: int) -> None:
    assert_agrees(random_case(seed), NativeCascade())


@needs_native
@pytest.mark.parametrize("seed", range(12))
def test_mass_comes_along_with_the_attention(seed: int) -> None:
    """Of the rows that count, from one pass or from two."""
    case, backend = random_case(seed), NativeCascade()
    plan = backend.plan(case.layout, case.shape)
    arguments = (case.q, case.k_pool, case.v_pool, case.sinks)
    out, lse = backend.run(plan, *arguments)
    counted = torch.rand(case.layout.rows, generator=torch.Generator().manual_seed(seed)) < 0.6
    heads = torch.arange(case.shape.num_kv_heads)[::2]
    seen = lse.masked_fill(~counted[:, None], torch.inf)

    for rows, chosen, of in ((None, None, lse), (counted, heads, seen)):
        for by_head in (False, True):
            out_too, lse_too, mass = backend.run_observed(
                plan, *arguments, rows, chosen, by_head=by_head
            )

            assert torch.equal(out_too, out) and torch.equal(lse_too, lse)
            wanted = backend.mass(plan, case.q, case.k_pool, of, chosen, by_head=by_head)
            torch.testing.assert_close(mass, wanted, atol=1e-5, rtol=1e-5)
    assert same(backend.run(plan, *arguments), (out, lse))


@needs_native
def test_keys_far_below_the_largest_logit_weigh_nothing() -> None:
    """Their values may be as large as float32 holds."""
    case = make_case([make_level([(1, list(range(40)))], True)], make_shape(scaling=1.0))
    case.k_pool[:40], case.v_pool[:40], case.q = 0.0, 3e38, torch.ones_like(case.q)
    case.k_pool[:40, :, 0] = -100.0
    case.k_pool[7], case.v_pool[7] = 0.0, 1.0
    backend = NativeCascade()

    out, lse = backend.run(backend.plan(case.layout, case.shape), case.q, case.k_pool, case.v_pool)

    assert torch.equal(out, torch.ones_like(out)) and torch.equal(lse, torch.zeros_like(lse))


@needs_native
@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_is_widened_exactly(seed: int) -> None:
    """Queries, keys and values give the bits of float32, but for the rounding of the result."""
    library = native_library()
    if library is not None and library.name == "amx":
        pytest.skip("the tiles of AMX sum logits in an order of their own")
    shape = make_shape(head_dim_qk=48, head_dim_vo=80, num_qo_heads=2 + 2 * seed)
    case = make_case(random_layout(random.Random(seed), False), shape, torch.bfloat16, seed=seed)
    backend = NativeCascade()
    plan = backend.plan(case.layout, shape)
    tensors = (case.q, case.k_pool, case.v_pool)

    out, lse = backend.run(plan, *tensors)

    wide_out, wide_lse = backend.run(plan, *(each.float() for each in tensors))
    assert torch.equal(lse, wide_lse) and torch.equal(out, wide_out.to(torch.bfloat16))


# Bits


def attend(case: Case, levels: list[CascadeLevel], rows: list[int]) -> tuple[Tensor, Tensor]:
    backend = NativeCascade()
    plan = backend.plan(CascadeLayout(len(rows), tuple(levels)), case.shape)
    return backend.run(plan, case.q[rows], case.k_pool, case.v_pool, case.sinks)


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_a_row_has_the_same_bits_in_every_batch_and_division_into_levels(
    dim: int, dtype: torch.dtype
) -> None:
    shape = make_shape(head_dim_qk=dim, head_dim_vo=dim, scaling=dim**-0.5)
    shared, own = list(range(200, 311)), [list(range(500 + 60 * i, 537 + 61 * i)) for i in range(9)]
    whole = make_level([(1, shared + each) for each in own], True)
    case = make_case([whole], shape, dtype, sinks=True)
    expected = attend(case, [whole], list(range(9)))

    for cut in (1, 16, 33, 64, 110):
        levels = [
            make_level([(9, shared[:cut])], False),
            make_level([(4, shared[cut:]), (5, shared[cut:])], False),
            make_level([(1, each) for each in own], True),
        ]
        assert same(attend(case, levels, list(range(9))), expected), cut
    for row in range(9):
        alone = attend(case, [make_level([(1, shared + own[row])], True)], [row])
        assert same(alone, (expected[0][row : row + 1], expected[1][row : row + 1])), row


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_of_a_prompt_has_the_bits_of_one_that_is_decoded(
    window: int | None, dtype: torch.dtype
) -> None:
    shape, path = make_shape(window=window), list(range(100, 170))
    case = make_case([make_level([(70, path)], True)], shape, dtype)
    prompt = attend(case, [make_level([(70, path)], True)], list(range(70)))

    for row in (0, 1, 31, 32, 69):
        alone = attend(case, [make_level([(1, path[: row + 1])], True)], [row])
        assert same(alone, (prompt[0][row : row + 1], prompt[1][row : row + 1])), row


@needs_native
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_values_that_a_row_does_not_read_leave_no_trace(
    window: int | None, bad: float, kind: str
) -> None:
    """Those that are not finite either, though its neighbours read them."""
    shape, rows = make_shape(window=window), list(range(40))
    levels = [make_level([(40, list(range(100, 140)))], True)]
    if window is None:
        levels.insert(0, make_level([(15, [3, 4, 5]), (25, [6])], False))
    case = make_case(levels, shape, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    poisoned = copy.copy(case)
    poisoned.v_pool = case.v_pool.clone()
    poisoned.v_pool[117] = bad
    if kind == "int8":
        for each in (case, poisoned):
            each.k_pool, each.v_pool = encode(each.k_pool), encode(each.v_pool)
    reads = torch.zeros(40, dtype=torch.bool)
    reads[17 : 40 if window is None else 17 + window] = True

    found, wanted = attend(poisoned, levels, rows), attend(case, levels, rows)

    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0][~reads], wanted[0][~reads])
    assert not found[0][reads].isfinite().any()


@needs_native
def test_a_row_without_keys_and_with_a_sink_of_no_weight_gives_nothing() -> None:
    case = make_case([make_level([(1, [5]), (1, [])], False)], make_shape())
    case.sinks = torch.full((case.shape.num_qo_heads,), -torch.inf)

    out, lse = attend(case, list(case.layout.levels), [0, 1])

    assert out[0].isfinite().all() and lse[0].isfinite().all()
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


@needs_native
def test_attention_without_rows_does_nothing() -> None:
    library = native_library()
    assert library is not None
    job = AttentionJob(kv_heads=1, group=1, dim_qk=16, dim_vo=16)

    library.attention(ctypes.addressof(job), 1)

    assert job.row_count == 0


@needs_native
def test_tensors_that_are_not_those_of_the_plan_are_refused() -> None:
    shape = make_shape(head_dim_qk=32)
    case = make_case([make_level([(2, [5, 6, 7])], True)], shape, torch.bfloat16)
    backend = NativeCascade()
    plan = backend.plan(case.layout, case.shape)
    q, k, v = case.q, case.k_pool, case.v_pool
    for wrong, message in (
        ((q[:1], k, v), "queries "),
        ((q.float(), k, v), "a pool "),
        ((q, k[..., :16], v), "a pool "),
        ((q, k, v.float()), "a pool "),
        ((q, k, v[:, :1]), "a pool "),
        ((q, encode(k), v), "a pool "),
        ((q, spread(k), v), "contiguous in the last"),
        ((q, k, spread(v)), "contiguous in the last"),
        ((q, k.to("meta"), v), "on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.run(plan, *wrong)
    with pytest.raises(ValueError, match=r"sinks \[5\]"):
        backend.run(plan, q, k, v, torch.zeros(5))
    _, lse = backend.run(plan, q, k, v)
    for sums in (lse[:1], lse[:, :1], lse.to("meta")):
        with pytest.raises(ValueError, match="logarithms "):
            backend.mass(plan, q, k, sums)
    with pytest.raises(ValueError, match=r"rows that count \[1\]"):
        backend.run_observed(plan, q, k, v, counted=torch.ones(1, dtype=torch.bool))
    lists = [each.long() for each in (level_of(case).qo_indptr, level_of(case).kv_indptr)]
    level = CascadeLevel(*lists, level_of(case).kv_indices, causal=True)
    with pytest.raises(ValueError, match="a level has int32"):
        backend.plan(CascadeLayout(2, (level,)), case.shape)


def spread(pool: Tensor) -> Tensor:
    """The same numbers, a gap after each."""
    return torch.stack([pool, pool], -1)[..., 0]


@needs_native
def test_mass_takes_an_lse_of_any_dtype() -> None:
    case, backend = make_case([make_level([(2, [5, 6, 7])], True)], make_shape()), NativeCascade()
    plan = backend.plan(case.layout, case.shape)
    _, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)
    wanted = backend.mass(plan, case.q, case.k_pool, lse)

    assert torch.equal(backend.mass(plan, case.q, case.k_pool, lse.double()), wanted)


def level_of(case: Case) -> CascadeLevel:
    return case.layout.levels[0]


@needs_native
def test_slots_and_threads_leave_no_trace() -> None:
    shape = make_shape(num_kv_heads=4, num_qo_heads=8, head_dim_qk=64, head_dim_vo=64)
    levels = [make_level([(64, list(range(900)))], False), decode_level([70] * 64, 40)]
    case = make_case(levels, shape)
    expected = attend(case, levels, list(range(64)))
    order = torch.randperm(len(case.k_pool), generator=torch.Generator().manual_seed(0))
    moved = [
        CascadeLevel(
            each.qo_indptr, each.kv_indptr, order.int()[each.kv_indices.long()], each.causal
        )
        for each in levels
    ]
    there = copy.copy(case)
    there.k_pool, there.v_pool = case.k_pool.clone(), case.v_pool.clone()
    there.k_pool[order], there.v_pool[order] = case.k_pool, case.v_pool
    assert same(attend(there, moved, list(range(64))), expected)

    x, layer = torch.randn(40, 512), PackedLinear(nn.Linear(512, 4096), "native")
    product = layer(x)
    torch.set_num_threads(3)
    try:
        for _ in range(5):
            assert same(attend(case, levels, list(range(64))), expected)
            assert torch.equal(layer(x), product)
    finally:
        torch.set_num_threads(1)


@needs_native
def test_calls_from_several_threads_at_once_keep_to_themselves() -> None:
    """Each with a number of threads of its own, and more than the pool had before."""
    shape = make_shape(num_kv_heads=4, num_qo_heads=8, head_dim_qk=64, head_dim_vo=64)
    levels = [make_level([(64, list(range(900)))], False), decode_level([70] * 64, 40)]
    case, layer = make_case(levels, shape), PackedLinear(nn.Linear(512, 4096), "native")
    xs = [torch.randn(rows, 512) for rows in (1, 33, 40, 64)]
    products, attended = [layer(x) for x in xs], attend(case, levels, list(range(64)))

    def work(index: int) -> bool:
        torch.set_num_threads(1 + index)
        return all(
            torch.equal(layer(xs[index]), products[index])
            and same(attend(case, levels, list(range(64))), attended)
            for _ in range(5)
        )

    with ThreadPoolExecutor(len(xs)) as threads:
        assert all(threads.map(work, range(len(xs))))


# Linear layers, norms, activations


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(768, 200), (100, 77), (33, 1), (1, 16), (31, 1000)])
def test_products_agree_and_a_row_keeps_its_bits(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*size).to(dtype)
    packed, x = PackedLinear(layer, "native"), torch.randn(131, size[0]).to(dtype)
    with torch.no_grad():
        wanted = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    found = packed(x)

    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for count in (1, 2, 5, 6, 7, 16, 17, 33, 64, 65, 127, 128):
        assert torch.equal(packed(x[1 : count + 1]), found[1 : count + 1]), count


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_small_whole_numbers_are_exact(dtype: torch.dtype) -> None:
    """In any order of sums; and of prompts that are computed in several blocks."""
    grid = torch.arange(1100 * 70) * 7919
    layer, x = nn.Linear(70, 50), (grid % 5 - 2).view(1100, 70).to(dtype)
    with torch.no_grad():
        layer.weight.copy_((grid[:3500] % 7 - 3).view(50, 70))
        layer.bias.copy_(grid[:50] % 9)
        wanted = layer(x.float())
        found = PackedLinear(layer.to(dtype), "native")

    for rows in (1, 7, 513, 1100):
        assert torch.equal(found(x[:rows]).float(), wanted[:rows].to(dtype).float()), rows


@needs_native
def test_results_are_rounded_to_the_nearest_even_number_and_nan_stays() -> None:
    """Sums of 0 and a bias of any bits, as torch rounds them; ties, infinities, the last vector."""
    step = (1 << 32) // 2011
    bits = torch.arange(-(1 << 31), 1 << 31, step, dtype=torch.int64).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7F8000, 0x00018000], dtype=torch.int32)
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-40])
    values = torch.cat([bits.view(torch.float32), ties.view(torch.float32), odd])
    packed = PackedLinear(nn.Linear(32, len(values)).to(torch.bfloat16), "native")
    packed.bias = values

    found, wanted = packed(torch.zeros(1, 32).to(torch.bfloat16))[0], values.to(torch.bfloat16)

    assert torch.equal(found.isnan(), values.isnan()) and values.isnan().sum() > 5
    assert torch.equal(found.nan_to_num(0.0), wanted.nan_to_num(0.0))


def native_ops() -> FusedOps:
    ops = fused_ops(CPU)
    assert ops is not None
    return ops


@needs_native
@pytest.mark.parametrize(
    ("dtype", "form", "width"),
    drawn([*DTYPES, torch.float16], NORM_FORMS, [1, 15, 64, 250, 768], count=15),
)
def test_norms_agree_with_float64(width: int, form: NormForm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, width).to(dtype), torch.randn(width).to(dtype)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = normal * (weight.double() + form.offset)

    found = native_ops().rms_norm(x, weight, 1e-6, form)

    assert found.dtype == dtype and found.shape == x.shape
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=bound)
    assert torch.equal(native_ops().rms_norm(x[1, 2], weight, 1e-6, form), found[1, 2])


@needs_native
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_agree_with_float64(activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joint = 8 * torch.randn(7, 2 * 77)
    joint[0, :4] = torch.tensor([0.0, -100.0, 100.0, -0.0])
    gate, up = joint.to(dtype).chunk(2, dim=-1)  # rows with a stride
    active = (
        F.silu(gate.double()) if activation == "silu" else F.gelu(gate.double(), approximate="tanh")
    )

    found = native_ops().gated(gate, up, activation)

    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), active * up.double(), atol=bound, rtol=bound)


@needs_native
def test_parts_of_other_shapes_and_dtypes_are_refused() -> None:
    ops, x = native_ops(), torch.ones(4, 64)
    for weight in (torch.ones(8), torch.ones(64).bfloat16(), torch.ones(1, 64)):
        with pytest.raises(ValueError, match="a weight "):
            ops.rms_norm(x, weight, 1e-6, NORM_FORMS[0])
    for up in (torch.ones(1, 64), torch.ones(4, 32), torch.ones(4, 64).bfloat16()):
        with pytest.raises(ValueError, match="up is "):
            ops.gated(x, up, "silu")


@needs_native
def test_silu_of_numbers_far_below_zero_is_nothing() -> None:
    gate = torch.tensor([[-88.0, -89.0, -1e30, -3e38, -torch.inf, torch.nan]])

    found = native_ops().gated(gate, torch.ones_like(gate), "silu")[0]

    assert -1e-36 < float(found[0]) < 0 and found[-1].isnan()
    assert (found[1:-1] == 0).all()


# Instruction sets, and machines without

CHECK = """
import sys
sys.path.insert(0, "tests")
import torch
import test_native
import test_rotary
from arbor.kernels.native import native_state
print(native_state())
if native_state() == sys.argv[1]:
    for seed in range(100, 130):
        test_native.assert_agrees(test_native.random_case(seed), test_native.NativeCascade())
    for dtype in test_native.DTYPES:
        for size in ((768, 200), (100, 77)):
            test_native.test_products_agree_and_a_row_keeps_its_bits(size, dtype)
        test_native.test_gated_activations_agree_with_float64("silu", dtype)
        test_native.test_norms_agree_with_float64(250, test_native.NORM_FORMS[0], dtype)
        for form in test_rotary.ROTARY_FORMS:
            test_rotary.test_the_kernel_has_the_bits_of_torch(form, dtype, (80, 36))
        test_native.test_products_of_small_whole_numbers_are_exact(dtype)
    test_native.test_results_are_rounded_to_the_nearest_even_number_and_nan_stays()
    test_native.test_keys_far_below_the_largest_logit_weigh_nothing()
    test_native.test_silu_of_numbers_far_below_zero_is_nothing()
    for kind in ("float32", "bfloat16", "int8"):
        test_native.test_values_that_a_row_does_not_read_leave_no_trace(None, torch.nan, kind)
    for dim in (32, 256):
        test_native.test_a_row_has_the_same_bits_in_every_batch_and_division_into_levels(
            dim, torch.bfloat16)
"""


def run_with(setting: str, code: str, *arguments: str) -> str:
    settings = {**os.environ, "ARBOR_NATIVE": setting}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sets nothing" not in done.stderr
    return done.stdout.strip()


LEAST = "neon" if platform.machine() in ("aarch64", "arm64") else "avx2"


@needs_native
@pytest.mark.parametrize("name", only([LEAST], SETS))
def test_every_instruction_set_agrees(name: str) -> None:
    state = run_with(name, CHECK, name)

    if state != name:
        pytest.skip(state)


def test_a_set_that_does_not_exist_is_named() -> None:
    print_state = "from arbor.kernels.native import native_state; print(native_state())"

    assert run_with("AVX2", print_state).startswith("no such set; known: off, avx2, ")
