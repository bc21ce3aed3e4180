"""Checks of the Triton kernels in a process of their own: in the interpreter, or compiled only.

Triton reads TRITON_INTERPRET when it is imported. The interpreter computes tiles with numpy, so
it checks what a tile reads, masks and writes, and not the last bits of a GPU.

    TRITON_INTERPRET=1 python -m support.triton_checks sums   # prints {check: "" or what is wrong}
    python -m support.triton_checks hopper
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.fused_standin import TorchFusedOps
from support.models import build
from torch import Tensor
from torch.nn import functional as F

from arbor.engine import sampling as sampler
from arbor.kernels import int8_triton
from arbor.kernels import invariant as reductions
from arbor.kernels import invariant_triton as kernels
from arbor.kernels.attention import triton_tree_kernel
from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.fixed import Bucket
from arbor.kernels.attention.invariant_cascade import InvariantCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.triton_tree import FixedTree, TritonTree
from arbor.kernels.fused import triton_parts as triton_fused
from arbor.kernels.fused import triton_rotary, triton_sampling
from arbor.kernels.fused.choice import sums_by_torch
from arbor.kernels.fused.parts import ACTIVATIONS, NORM_FORMS
from arbor.kernels.fused.rotary import ROTARY_FORMS, RotaryForm, rotate_by_torch
from arbor.kernels.int8 import encode, stored_width
from arbor.kernels.invariant import row_invariant
from arbor.kernels.linear.layers import PackedLinear, pack_linears
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.model.weights import arbor_logits, own_logits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CUDA = torch.device("cuda")
SLOTS = 160


def products() -> None:
    """Rows of 1 to 70, alone and together."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        for depth, columns in ((100, 50), (64, 48)):
            x, weight = torch.randn(70, depth).to(dtype), torch.randn(columns, depth).to(dtype)
            for bias in (None, torch.randn(columns).to(dtype)):
                whole = kernels.linear(x, weight, bias)
                close(whole, F.linear(x, weight, bias), 8 * TOLERANCE[dtype])
                for first, end in ((0, 1), (37, 38), (69, 70), (5, 24), (1, 68)):
                    part = kernels.linear(x[first:end], weight, bias)
                    assert torch.equal(part, whole[first:end]), (dtype, first, end)
    assert kernels.linear(torch.empty(0, 8), torch.empty(4, 8)).shape == (0, 4)


def sums() -> None:
    """What `row_invariant` puts in the place of torch's reductions."""
    torch.manual_seed(0)
    calls: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.pow(2).mean(-1),
        lambda x: x.sum(-1),
        lambda x: x.sum(dim=(1, 2)),
        lambda x: x.var(-1, unbiased=False),
        lambda x: x.std(dim=-1, keepdim=True),
        lambda x: x.norm(dim=-1),
        lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
        lambda x: F.rms_norm(x, (x.shape[-1],)),
        lambda x: torch.bmm(x, x.transpose(1, 2)),
        lambda x: torch.bmm(x[:, :, :1], x[:, :1]),
    )
    for dtype in DTYPES:
        x = torch.randn(9, 3, 1100).to(dtype)
        for number, call in enumerate(calls):
            expected = call(x)
            with cuda_sums():
                whole = call(x)
                alone = torch.cat([call(row) for row in x.split(1)])
            assert whole.dtype == expected.dtype and whole.shape == expected.shape, number
            assert torch.equal(whole, alone), (dtype, number)
            scale = float(expected.float().abs().max())
            close(whole, expected, 2 * TOLERANCE[dtype] * max(1.0, scale))
    with cuda_sums():
        assert torch.arange(6).view(2, 3).sum(-1).tolist() == [3, 12]


def attention() -> None:
    """A tree of rows against the reference, and each row alone."""
    for dtype in DTYPES:
        for shape in (
            AttentionShape(6, 2, 32, 32, scaling=0.3),
            AttentionShape(6, 2, 12, 6, scaling=0.3, window=40, softcap=5.0),
        ):
            attend_alone_and_together(dtype, shape)


def attend_alone_and_together(dtype: torch.dtype, shape: AttentionShape) -> None:
    torch.manual_seed(1)
    forward = plan_forward(segments())
    layout = forward.layout(shape.window)
    q = torch.randn(forward.rows, 6, shape.head_dim_qk).to(dtype)
    k = torch.randn(SLOTS + 1, 2, shape.head_dim_qk).to(dtype)
    v = torch.randn(SLOTS + 1, 2, shape.head_dim_vo).to(dtype)
    k[SLOTS] = v[SLOTS] = torch.nan  # no list names it
    sinks = torch.randn(6)
    backend, reference = InvariantCascade(), RowwiseAttention()

    plan = backend.plan(layout, shape)
    out, lse = backend.run(plan, q, k, v, sinks)

    right, right_lse = reference.run(reference.plan(layout, shape), q, k, v, sinks)
    close(out, right, TOLERANCE[dtype])
    close(lse, right_lse, 1e-4)
    heads = torch.tensor([1])
    mass = backend.mass(plan, q, k, lse, heads)
    close(mass, reference.mass(reference.plan(layout, shape), q, k, lse, heads), 1e-3)
    for row in (0, 3, 5, 9, forward.rows - 1):
        keys = plan.rowwise.keys[row].int()
        level = CascadeLevel(ints(0, 1), ints(0, len(keys)), keys, causal=False)
        single = backend.plan(CascadeLayout(1, (level,)), replace(shape, window=None))
        alone, alone_lse = backend.run(single, q[row : row + 1], k, v, sinks)
        assert torch.equal(alone[0], out[row]) and torch.equal(alone_lse[0], lse[row]), row


def tree() -> None:
    """Tree attention in two launches against the reference; a bucket's buffers serve many trees."""
    shapes = (
        AttentionShape(6, 2, 32, 32, scaling=0.3),
        AttentionShape(40, 2, 12, 6, scaling=0.3, softcap=5.0),
        AttentionShape(6, 2, 12, 6, scaling=0.3, window=40, softcap=5.0),
        AttentionShape(2, 2, 16, 16, scaling=0.3, window=3),
    )
    for dtype, shape in itertools.product(DTYPES, shapes):
        torch.manual_seed(1)
        fixed = TritonTree().fixed(shape, Bucket(8, 4, 4), SLOTS)
        assert fixed is not None
        for count in (7, 6, 4, 5):
            layout = plan_forward(segments()[:count]).layout(shape.window)
            attend_tree(dtype, shape, layout, fixed if count < 7 else None)
        shared = plan_forward(segments()[:6]).shared
        for added in range(3 if dtype == torch.float32 else 0):  # since the items were planned
            forward = plan_forward(longer(segments()[:6], added), shared=shared)
            attend_tree(dtype, shape, forward.layout(shape.window), fixed)


def attend_tree(
    dtype: torch.dtype,
    shape: AttentionShape,
    layout: CascadeLayout,
    fixed: FixedTree | None,
    *,
    stored: bool = False,
) -> None:
    """One layout as it is, and padded in a bucket's buffers; stored: over 8-bit KV."""
    backend, reference = TritonTree(), RowwiseAttention()
    q = torch.randn(layout.rows, shape.num_qo_heads, shape.head_dim_qk).to(dtype)
    k = torch.randn(SLOTS + 2, shape.num_kv_heads, shape.head_dim_qk).to(dtype)
    v = torch.randn(SLOTS + 2, shape.num_kv_heads, shape.head_dim_vo).to(dtype)
    k[SLOTS + 1] = v[SLOTS + 1] = torch.nan  # no list names it
    if stored:
        k, v = encode(k), encode(v)
    sinks = torch.randn(shape.num_qo_heads)
    planned, right = backend.plan(layout, shape), reference.plan(layout, shape)
    found = [backend.run(planned, q, k, v, sinks)]
    if fixed is not None:
        lists = fixed.prepare(layout, SLOTS)
        assert lists is not None
        fixed.plan(lists)
        padded = torch.cat((q, q.new_zeros(8 - layout.rows, *q.shape[1:])))
        found.append(fixed.run(padded, k, v, sinks))
    wanted, wanted_lse = reference.run(right, q, k, v, sinks)
    for out, lse in found:
        close(out[: layout.rows], wanted, TOLERANCE[dtype])
        close(lse[: layout.rows], wanted_lse, TOLERANCE[dtype] if stored else 1e-4)
    mass = backend.mass(planned, q, k, wanted_lse)
    close(mass, reference.mass(right, q, k, wanted_lse), 1e-3)


def stored_int8() -> None:
    """8-bit KV is written with the bits of `encode`, whatever the numbers are."""
    for dtype, dim in itertools.product(DTYPES, (12, 40, 64, 128)):
        torch.manual_seed(dim)
        x = torch.randn(5, 4, dim)[:, 1:] * torch.tensor([1e-6, 1.0, 1e4])[None, :, None]
        x[0, 0], x[1, 1, 3], x[2, 1, 3], x[3, 1, -1] = 0.0, torch.nan, torch.inf, -3e38
        x = x.to(dtype)
        slots = torch.tensor([3, 0, 6, 2, 5])
        pool = torch.full((7, 3, stored_width(dim)), 7, dtype=torch.int8)
        wanted = pool.index_copy(0, slots, encode(x))
        int8_triton.store(pool, slots, x)
        assert torch.equal(pool, wanted), (dtype, dim)
    half = torch.arange(-127, 128).float() + 0.5  # ties: the scale is 1
    x = torch.stack([half[:32].clamp(-127, 127), half[-33:-1]])
    x[:, 0] = 127.0
    pool = torch.zeros(2, 1, stored_width(32), dtype=torch.int8)
    int8_triton.store(pool, torch.arange(2), x[:, None])
    assert torch.equal(pool, encode(x[:, None]))


def tree_int8() -> None:
    """Tree attention over 8-bit KV; heads of 32 and 16 channels, and of a part of a scale's."""
    for dtype, shape in itertools.product(
        DTYPES,
        (
            AttentionShape(6, 2, 64, 32, scaling=0.1),
            AttentionShape(6, 2, 12, 40, scaling=0.3, window=40, softcap=5.0),
        ),
    ):
        torch.manual_seed(1)
        layout = plan_forward(segments()).layout(shape.window)
        attend_tree(dtype, shape, layout, None, stored=True)


def tree_hopper() -> None:
    """It compiles for an H100: half precision on the tensor cores, keys copied ahead."""
    kinds = [*zip(DTYPES, ("fp32", "fp16", "bf16"), strict=True), (torch.bfloat16, "i8")]
    for dtype, word in kinds:
        types = {"q": "*bf16" if word == "i8" else f"*{word}"}
        types |= dict.fromkeys(("k_pool", "v_pool"), f"*{word}")
        types |= dict.fromkeys(("slots", "items", "places", "grown"), "*i32")
        types |= dict.fromkeys(("part_out", "part_lse"), "*fp32")
        for heads, dim, softcap in (
            (32, 64, None),
            (32, 128, None),
            (28, 128, None),
            (8, 256, 50.0),
        ):
            shape = AttentionShape(heads, 4, dim, dim, 0.1, softcap=softcap)
            constants = triton_tree_kernel.tile(shape, dtype)
            width = stored_width(dim) if word == "i8" else dim
            constants |= {"k_slot": 4 * width, "k_head": width}
            constants |= {"v_slot": 4 * width, "v_head": width}
            ptx = compiled(triton_tree_kernel.tree_kernel, types, constants)
            assert "cp.async" in ptx, (dtype, dim)
            assert ("wgmma" in ptx) == (dtype != torch.float32), (dtype, dim)
            assert not re.search(r"ld\.global\S*\.[bsu]8", ptx), "codes are read one by one"
    pointers = {"x": "*bf16", "pool": "*i8", "slots": "*i64", "x_row": "i32", "x_head": "i32"}
    sizes = {"pool_slot": 8 * 136, "pool_head": 136, "DIM": 128, "GROUPS": 4, "CHANNELS": 32}
    compiled(int8_triton.store_kernel, pointers, sizes | {"MOST": 127.0, "num_warps": 1})


def segments() -> list[Segment]:
    """A root of 70 tokens, leaves of two blocks below it, and a part of a path in seven rows."""
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    root = Piece("root", slots[:70], np.arange(70, dtype=np.int32))
    found, free = [], 90
    for block in range(2):
        piece = Piece(block, slots[70 + 10 * block :][:10], np.arange(70, 80, dtype=np.int32))
        for length in (1, 4, 1):
            own = slots[free : free + length]
            free += length
            place = np.array([79 + length])
            found.append(Segment((root, piece), [1], place, own, own[-1:], 1))
    own = slots[free : free + 7]
    return [*found, Segment((root,), [1] * 7, np.arange(70, 77), own, own, 1)]


def longer(several: Sequence[Segment], added: int) -> list[Segment]:
    """Decoding rows after so many more tokens each, at most three."""
    free = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)[110:]
    found = []
    for row, segment in enumerate(several):
        own = np.concatenate((segment.tail, free[3 * row :][:added]))
        place = segment.positions + added
        found.append(replace(segment, positions=place, tail=own, write=own[-1:]))
    return found


def models() -> None:
    """Whole models with every CUDA kernel: close to their own logits, and equal row by row."""
    for name in ("llama", "gemma3n_text"):
        model = build(name)
        own = own_logits(model)
        runner = ModelRunner(model, InvariantCascade(), deterministic=True)
        pack_linears(model, deterministic=True, choose="dense")
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module._general = in_triton(module)  # type: ignore[method-assign]
        runner._layers_context = cuda_sums
        together = arbor_logits(runner)
        assert own is not None
        close(together, own, 2e-3)
        assert torch.equal(together, arbor_logits(runner)), name
        # the first path in one segment, and the second by itself
        from test_deterministic import Rows, same

        rows = Rows(runner)
        alone = [rows.leaves([row])[0] for row in (0, 1, 2)]
        assert same(rows.leaves([2, 0, 1]), [alone[2], alone[0], alone[1]]), name
        assert same(rows.path([4]), rows.path([1, 2, 1])), name


def in_triton(module: PackedLinear) -> Callable[[Tensor], Tensor]:
    def general(x: Tensor) -> Tensor:
        rows = x.reshape(-1, module.in_features)
        out = kernels.linear(rows, module.weight, module.bias)
        return out.view(*x.shape[:-1], module.out_features)

    return general


@contextmanager
def cuda_sums() -> Iterator[None]:
    """The reductions of CUDA, on a CPU, next to what a CPU needs itself."""
    before = reductions.applies
    reductions.applies = lambda x: x.dtype in DTYPES
    try:
        with row_invariant(CUDA), row_invariant(torch.device("cpu")):
            yield
    finally:
        reductions.applies = before


def fused() -> None:
    """Fused norms and gated activations of rows of any width and stride."""
    torch.manual_seed(0)
    ops, exact = triton_fused.TritonFusedOps(), TorchFusedOps()
    for dtype in DTYPES:
        for x in (
            torch.randn(1, 5, 64) + 0.5,
            20 * torch.randn(3, 100),
            1e-3 * torch.randn(1, 2, 3, 24),
            torch.randn(1, 4, 6, 40)[:, :, 1:3],  # as heads sliced out of a joint projection
            torch.randn(1, 1, 1030),
            torch.randn(7, 2500)[:, :1200],
            torch.randn(50, 6).t(),
            torch.randn(0, 32),
        ):
            x = x.to(dtype)
            weight = torch.randn(x.shape[-1]).to(dtype)
            for form in NORM_FORMS:
                for eps in (1e-6, 1e-2):
                    found = ops.rms_norm(x, weight, eps, form)
                    rounded_alike(found, exact.rms_norm(x, weight, eps, form))
            halves = torch.cat([6 * x, x], -1).chunk(2, -1)
            for gate, up in (halves, (x, halves[1].contiguous())):
                for activation in ACTIVATIONS:
                    found = ops.gated(gate, up, activation)
                    rounded_alike(found, exact.gated(gate, up, activation), gate * up)


def rounded_alike(found: Tensor, right: Tensor, factors: Tensor | None = None) -> None:
    """Of one shape and dtype, equal but for two last bits; in float16, mostly in every bit.

    The interpreter cuts bfloat16 off where a GPU rounds it.

    Args:
        factors: numbers whose float32 rounding differences may show; tanh near -1 has them.
    """
    assert (found.shape, found.dtype) == (right.shape, right.dtype) and found.is_contiguous()
    if not found.numel():
        return
    last_bit = torch.finfo(found.dtype).eps * (8 if found.dtype == torch.float32 else 1)
    small = 1e-7 + (0.0 if factors is None else 1e-6 * factors.double().abs())
    difference = (found.double() - right.double()).abs()
    assert bool((difference <= 2 * last_bit * right.double().abs() + small).all())
    if found.dtype == torch.float16:
        assert float((difference > small).double().mean()) < 0.03


def fused_hopper() -> None:
    """The fused kernels compile for an H100; a GPU rounds bfloat16 as often as it should."""
    for word in ("fp32", "fp16", "bf16"):
        pointers = dict.fromkeys(("x", "weight", "gate", "up", "out"), f"*{word}")
        types = pointers | dict.fromkeys(("x_row", "gate_row", "up_row"), "i32") | {"eps": "fp32"}
        for width in (128, 4096, 18432):
            roundings = {}
            for form in NORM_FORMS:
                constants = {"OFFSET": form.offset, "ROUNDS_FIRST": form.rounds_first}
                constants |= {"WIDTH": width} | triton_fused.norm_launch(width)
                ptx = compiled(triton_fused.rms_norm_kernel, types, constants)
                roundings[form.name] = len(re.findall(r"cvt\.rn\.bf16", ptx))
            if word == "bf16":
                assert roundings["llama"] > roundings["olmo2"] > 0, roundings
        for activation in ACTIVATIONS:
            constants = {"WIDTH": 14336, "ACTIVATION": activation}
            constants |= triton_fused.gated_launch(14336)
            compiled(triton_fused.gated_kernel, types, constants)


def rotary() -> None:
    """Rotated heads have torch's bits, and K and V lie in their slots alone."""
    torch.manual_seed(0)
    ops = triton_rotary.TritonRotary()
    forms: tuple[RotaryForm | None, ...] = (*ROTARY_FORMS, None)
    # the interpreter cuts bfloat16 off where a GPU rounds it
    for dtype, form in itertools.product((torch.float32, torch.float16), forms):
        for dim, rotated in ((64, 64), (8, 4), (50, 50), (80, 32), (128, 100), (16, 0)):
            q, k, v = torch.randn(4, 4 + 2 + 2, dim).to(dtype).split((4, 2, 2), dim=1)
            halved = form is not None and form.half_table
            table = torch.float32 if form is not None and not form.rounds_products else dtype
            cos, sin = torch.randn(2, 4, rotated // (2 if halved else 1)).to(table)
            wanted = (
                [q, k] if form is None else [rotate_by_torch(x, cos, sin, form) for x in (q, k)]
            )
            for found, right in zip(ops.rotate(q, k, cos, sin, form), wanted, strict=True):
                assert torch.equal(found, right) and found.is_contiguous(), (dtype, form, dim)

            store = torch.full((2, 10, 2, dim + 8), torch.nan, dtype=dtype)
            pools = store[0][..., :dim], store[1][..., 4 : dim + 4]  # slots with a stride
            slots = torch.tensor([7, 9, 2, 0])
            found = ops.rotate_and_write(q, k, v, cos, sin, form, pools, slots)
            assert torch.equal(found, wanted[0]), (dtype, form, dim)
            assert torch.equal(pools[0][slots], wanted[1]) and torch.equal(pools[1][slots], v)
            others = [slot for slot in range(10) if slot not in slots.tolist()]
            assert store[:, others].isnan().all() and store[0][..., dim:].isnan().all()
            assert store[1][..., :4].isnan().all() and store[1][..., dim + 4 :].isnan().all()
    empty = torch.empty(0, 2, 8)
    assert ops.rotate(empty, empty, empty[:, 0], empty[:, 0], ROTARY_FORMS[0])[0].shape == (0, 2, 8)


def row_sums() -> None:
    """Sums of rows of logits are torch's, and tokens drawn with them are those without."""
    torch.manual_seed(0)
    uniform = torch.rand(7, 1, dtype=torch.float64)
    uniform[:3] = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)[:, None]
    for dtype, width in itertools.product(DTYPES, (50, 4096, 9001)):
        logits = (4 * torch.randn(7, width)).to(dtype)
        logits[3, width // 2 :] = logits[4, : width // 2] = -torch.inf
        logits[5] = 0.5
        for temperature in (1.0, 0.7, 3.0):
            sums = triton_sampling.row_sums(logits, temperature)
            right = sums_by_torch(logits, temperature)
            torch.testing.assert_close(sums, right, rtol=1e-12, atol=0)
            alone = [triton_sampling.row_sums(row, temperature) for row in logits.split(1)]
            assert torch.equal(torch.cat(alone, 1), sums)
            strided = torch.cat((logits, logits), 1)[:, :width]
            assert torch.equal(triton_sampling.row_sums(strided, temperature), sums)
            for sampling in (Sampling(temperature, 0.9), Sampling(temperature, 0.95, 20)):
                draws_alike(logits, uniform, sampling, min(width, 256))
    broken = torch.zeros(4, 5000)
    broken[0, 1], broken[1, 4999], broken[2] = torch.nan, torch.inf, -torch.inf
    assert triton_sampling.row_sums(broken, 0.5)[1:].isnan().all(0).tolist() == [True] * 3 + [False]
    assert triton_sampling.row_sums(broken[:0], 0.5).shape == (3, 0)


def draws_alike(logits: Tensor, uniform: Tensor, sampling: Sampling, width: int) -> None:
    without = sampler._draw(logits, uniform, sampling, width)
    before, sampler.row_sums = sampler.row_sums, triton_sampling.row_sums
    try:
        found = sampler._draw(logits, uniform, sampling, width)
    finally:
        sampler.row_sums = before
    settled = without[-1] == 1
    assert torch.equal(found[-1], without[-1])
    assert torch.equal(found[0, settled], without[0, settled]), sampling
    torch.testing.assert_close(found[:, settled], without[:, settled], rtol=1e-5, atol=1e-5)


def row_sums_hopper() -> None:
    """The kernels of the sums compile for an H100 and compute in float64."""
    types = {"logits": "*fp32", "row_stride": "i32", "highest": "*fp32"}
    types |= {"temperature": "*fp64", "sums": "*fp64", "out": "*fp64"}
    sizes = {"PARTS": 32, "TEMPERED": True, **triton_sampling.FUSION}
    part = {"VOCABULARY": 128256, "PART": triton_sampling.PART, "num_warps": triton_sampling.WARPS}
    ptx = compiled(triton_sampling.part_sums_kernel, types, sizes | part)
    assert "f64" in ptx and "ex2.approx" not in ptx
    compiled(triton_sampling.row_sums_kernel, types, sizes | {"PADDED": 32, "num_warps": 1})


def rotary_hopper() -> None:
    """The rotary kernel compiles for an H100 and rounds products where torch does."""
    names = ("q", "k", "v", "q_out", "k_out", "v_out")
    for form in ROTARY_FORMS:
        types = dict.fromkeys((*names, "cos", "sin"), "*bf16") | {"slots": "*i64"}
        types |= {
            name: "i32"
            for name in triton_rotary.rotary_kernel.arg_names
            if name not in types and not name.isupper()
        }
        sizes = {"Q_HEADS": 32, "DIM": 128, "DIM_V": 128, "WHOLE": 128, "WHOLE_V": 128}
        constants = triton_rotary.constants(form, 128, rounds=True) | sizes | {"WRITES": True}
        ptx = compiled(triton_rotary.rotary_kernel, types, constants)
        assert "fma.rn" not in ptx, form
        # a product in bfloat16 is one that is rounded to it
        products = set(re.findall(r"mul\.rn\.(bf16|f32)", ptx))
        assert products == {"bf16" if form.rounds_products else "f32"}, (form, products)


def hopper() -> None:
    """Every kernel compiles for an H100 within its shared memory, without atomics."""
    for dtype, word in zip(DTYPES, ("fp32", "fp16", "bf16"), strict=True):
        pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{word}") | {"rows": "i32"}
        for columns in (1024, 128256):
            layer = {"COLUMNS": columns, "DEPTH": 4096, "HAS_BIAS": True}
            compiled(kernels.linear_kernel, pointers, kernels.linear_tile(columns, dtype) | layer)
        slots = dict.fromkeys(("q", "k_pool", "v_pool"), f"*{word}")
        slots |= dict.fromkeys(("keys", "lengths", "first_parts", "items"), "*i32")
        slots |= dict.fromkeys(("part_out", "part_lse"), "*fp32")
        slots |= dict.fromkeys(("width", "k_slot", "k_head", "v_slot", "v_head"), "i32")
        for dim, softcap in ((128, None), (256, 50.0)):
            shape = AttentionShape(32, 8, dim, dim, 0.1, softcap=softcap)
            compiled(kernels.attention_kernel, slots, kernels.attention_tile(shape, dtype))
        compiled(kernels.row_sum_kernel, {"x": f"*{word}", "out": "*fp32"}, SUM)
        merged = slots | {"out": f"*{word}", "lse": "*fp32"}
        compiled(kernels.merge_kernel, merged, MERGE)


SUM = {"DEPTH": 4096, "BLOCK": kernels.SUM_BLOCK, "num_warps": 4, **kernels.FUSION}
MERGE = {"HEADS": 32, "DIM": 128, "PADDED": 128, "BLOCK": kernels.MERGED, **kernels.FUSION}
SHARED_BYTES = 227 << 10  # of an H100's multiprocessor, for one thread block


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The PTX of a kernel; addresses are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types.get(name, "").startswith("*")
        },
    )
    options = {name: given for name, given in constants.items() if name not in names}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= SHARED_BYTES, (kernel, found.metadata.shared)
    assert not re.search(r"\b(atom|red)\.", found.asm["ptx"]), kernel
    return str(found.asm["ptx"])


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def close(found: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.float(), right.float(), atol=tolerance, rtol=tolerance)


def sum_products_in_one_order() -> None:
    """Make the interpreter multiply tiles one term after another.

    Its own product is numpy's, whose BLAS sums a row in an order that depends on the row's place in
    the tile (OpenBLAS on CPUs with AVX2 alone does), and it keeps bfloat16 as the integers of its
    bits. On a GPU every element of a tile is summed in one order.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = widened(a).astype(d.data.dtype), widened(b).astype(d.data.dtype)
        total = d.data.copy()
        for term in range(left.shape[-1]):
            total += left[..., :, term, None] * right[..., None, term, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


CHECKS = {
    each.__name__: each
    for each in (
        *(products, sums, attention, models, hopper, tree, tree_int8, stored_int8, tree_hopper),
        *(fused, fused_hopper, rotary, rotary_hopper, row_sums, row_sums_hopper),
    )
}


def main() -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sum_products_in_one_order()
        kernels.CHUNK_KEYS, kernels.BLOCK_KEYS = 32, 16
    found = {}
    for name in sys.argv[1:]:
        try:
            CHECKS[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
