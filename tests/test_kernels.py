"""Attention backends agree with the reference over the whole space of layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.slow_cases import every, only
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    attention_logits,
    matmul_float32,
)
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TASK_BYTES, TorchCascade
from arbor.kernels.native import native_library

POOL_SLOTS = 4096

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")
NATIVE = pytest.param(NativeCascade, id="native", marks=needs_native)
CASCADES = [pytest.param(TorchCascade, id="torch"), NATIVE]

# Largest allowed differences of out and lse. bfloat16: every level's result is rounded to 8 bits
# (2^-9 relative, values up to 4) before the float32 merge, once more at the end, and the fused
# kernel rounds the probabilities.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-12, 1e-6),  # lse is float32 by protocol
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (5e-3, 5e-3),
}


Backend = Callable[[], AttentionBackend]


@dataclass
class Case:
    """One batch over one pool whose unowned slots hold NaN."""

    layout: CascadeLayout
    shape: AttentionShape
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    sinks: Tensor | None

    @property
    def owned(self) -> Tensor:
        return torch.cat([level.kv_indices for level in self.layout.levels]).long().unique()


def make_level(requests: list[tuple[int, list[int]]], causal: bool) -> CascadeLevel:
    """A level from (rows, slots) of every request."""
    rows, keys, slots = [0], [0], []
    for m, request_slots in requests:
        rows.append(rows[-1] + m)
        slots += request_slots
        keys.append(len(slots))
    return CascadeLevel(*(torch.tensor(x, dtype=torch.int32) for x in (rows, keys, slots)), causal)


def make_case(
    levels: list[CascadeLevel],
    shape: AttentionShape,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> Case:
    """Random q and KV for a layout; `strided` ones have gaps between tokens and heads."""
    rows = int(levels[0].qo_indptr[-1])
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        if not strided:
            return torch.randn(size, generator=generator).to(dtype)
        wide = torch.randn(size[1], size[0] + 1, 2, size[2], generator=generator).to(dtype)
        return wide[:, 1:, 1].transpose(0, 1)

    case = Case(
        CascadeLayout(rows, tuple(levels)),
        shape,
        normal(rows, shape.num_qo_heads, shape.head_dim_qk),
        normal(POOL_SLOTS, shape.num_kv_heads, shape.head_dim_qk),
        normal(POOL_SLOTS, shape.num_kv_heads, shape.head_dim_vo),
        torch.randn(shape.num_qo_heads, generator=generator) if sinks else None,
    )
    unowned = torch.ones(POOL_SLOTS, dtype=torch.bool)
    unowned[case.owned] = False
    case.k_pool[unowned] = torch.nan
    case.v_pool[unowned] = torch.nan
    return case


def make_shape(**changes: object) -> AttentionShape:
    """4 query heads over 2 KV heads of dimension 16, unless said otherwise."""
    shape: dict[str, object] = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
        "scaling": 0.25,
    }
    return AttentionShape(**{**shape, **changes})  # type: ignore[arg-type]


class SlotDealer:
    """Hands out slots as an allocator would: in runs, at a uniform distance, or in pieces."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.next = draw, draw.randrange(20)

    def lists(self, lengths: list[int], how: str) -> list[list[int]]:
        result = []
        distance = max(lengths, default=0) + self.draw.randrange(8)
        for n in lengths:
            if how == "uniform":
                result.append(list(range(self.next, self.next + n)))
                self.next += distance
            elif how == "runs":
                result.append(list(range(self.next, self.next + n)))
                self.next += n + self.draw.randrange(8)
            else:
                steps = [self.draw.choice((1, 1, 1, 1, 3)) for _ in range(n)]
                slots = [self.next + sum(steps[:i]) for i in range(n)]
                if n > 2 and self.draw.random() < 0.3:
                    slots[0], slots[1] = slots[1], slots[0]
                result.append(slots)
                self.next += sum(steps) + 1
        return result


def random_layout(draw: random.Random, windowed: bool) -> list[CascadeLevel]:
    """Prefill, rehydration and decode rows in one batch, under up to three shared levels."""
    dealer = SlotDealer(draw)
    kind = draw.choice(["decode", "decode", "mixed", "prefill"])
    rows: list[int] = []
    own: list[int] = []
    if kind != "prefill":
        leaves, length = draw.randint(1, 12), draw.randint(1, 60)
        rows += [1] * leaves
        own += [length if draw.random() < 0.8 else draw.randint(1, 60) for _ in range(leaves)]
    if kind != "decode":
        for _ in range(draw.randint(1, 3)):
            m = draw.choice([2, 3, 16, 17, 24])
            rows.append(m)
            own.append(m + draw.choice([0, 0, 1, 5, 40]))
    order = list(range(len(rows)))
    if draw.random() < 0.3:
        draw.shuffle(order)
    slots = dealer.lists(
        [own[i] for i in order], draw.choice(["uniform", "uniform", "runs", "pieces"])
    )
    last = make_level([(rows[i], s) for i, s in zip(order, slots, strict=True)], causal=True)
    if windowed:
        return [last]
    total = sum(rows)
    shared = []
    for _ in range(draw.randrange(4)):
        cuts = sorted(draw.sample(range(1, total), min(draw.randrange(4), total - 1)))
        if draw.random() < 0.3 and total % 2 == 0 and total > 2:
            cuts = [total // 2]
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        length = draw.randint(1, 120)
        lengths = [draw.choice([length, length, length, 0, draw.randint(1, 120)]) for _ in parts]
        if not any(lengths):
            lengths[0] = length
        lists = dealer.lists(lengths, draw.choice(["uniform", "runs", "pieces"]))
        shared.append(make_level(list(zip(parts, lists, strict=True)), causal=False))
    return [*shared, last]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """The whole space: layouts x shapes x dtypes x strides."""
    seed = draw(st.integers(0, 1 << 30))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 4, 7]))
    dim = draw(st.sampled_from([16, 32, 64]))
    windowed = draw(st.sampled_from([False, False, True]))
    shape = AttentionShape(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=draw(st.sampled_from([dim, dim, dim, 24])),
        scaling=dim**-0.5,
        window=draw(st.sampled_from([1, 4, 30, 1000])) if windowed else None,
        softcap=draw(st.sampled_from([None, None, None, 2.0])),
    )
    return make_case(
        random_layout(random.Random(seed), windowed),
        shape,
        draw(
            st.sampled_from(
                [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
            )
        ),
        sinks=draw(st.sampled_from([False, False, True])),
        strided=draw(st.sampled_from([False, False, True])),
        seed=seed,
    )


def assert_agrees(case: Case, backend: AttentionBackend | None = None) -> None:
    """`run` and `mass` of the backend equal the reference's."""
    backend = TorchCascade() if backend is None else backend
    reference = RowwiseAttention()
    expected_plan = reference.plan(case.layout, case.shape)
    arguments = (case.q, case.k_pool, case.v_pool, case.sinks)
    expected, expected_lse = reference.run(expected_plan, *arguments)
    plan = backend.plan(case.layout, case.shape)
    tolerance, lse_tolerance = TOLERANCE[case.q.dtype]
    for _ in range(2):  # the second layer meets masks and buffers of the first
        out, lse = backend.run(plan, *arguments)
        assert out.shape == expected.shape and out.dtype == case.q.dtype
        assert lse.shape == expected_lse.shape and lse.dtype == torch.float32
        assert torch.isfinite(out).all(), "an unowned slot was read"
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, expected_lse, atol=lse_tolerance, rtol=lse_tolerance)
    heads = torch.arange(case.shape.num_kv_heads)[::2] if case.sinks is not None else None
    expected_mass = reference.mass(expected_plan, case.q, case.k_pool, expected_lse, heads)
    mass = backend.mass(plan, case.q, case.k_pool, expected_lse, heads)
    assert mass.shape == (POOL_SLOTS,) and mass.dtype == torch.float32
    near = {"atol": 10 * lse_tolerance, "rtol": 10 * lse_tolerance}
    torch.testing.assert_close(mass, expected_mass, **near)
    counted = range(case.shape.num_kv_heads) if heads is None else heads.tolist()
    each = [
        reference.mass(expected_plan, case.q, case.k_pool, expected_lse, torch.tensor([head]))
        for head in counted
    ]
    mass = backend.mass(plan, case.q, case.k_pool, expected_lse, heads, by_head=True)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, torch.stack(each), **near)


@pytest.mark.parametrize("backend", CASCADES)
@given(cases())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_cascade_agrees_with_the_reference(backend: Backend, case: Case) -> None:
    assert_agrees(case, backend())


@pytest.mark.parametrize("backend", [*CASCADES, pytest.param(RowwiseAttention, id="rowwise")])
@pytest.mark.parametrize("changes", only([{}], [{}, {"head_dim_vo": 24}, {"softcap": 30.0}]))
@pytest.mark.parametrize("bias", only([3000.0], [30.0, 3000.0]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_of_a_large_bias_agree_with_float64_in_half_precision(
    dtype: torch.dtype, bias: float, changes: dict[str, object], backend: Backend
) -> None:
    """q·k before scaling is up to 200,000: beyond float16, and all digits of bfloat16."""
    shape = make_shape(**{"head_dim_qk": 64, "head_dim_vo": 64, "scaling": 0.125, **changes})
    levels = [make_level([(12, list(range(100)))], causal=False), decode_level([30] * 12, 130)]
    case = make_case(levels, shape)
    offset = bias * torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1))
    q, k_pool, v_pool = (
        (3 * case.q).to(dtype),
        (case.k_pool + offset).to(dtype),
        case.v_pool.to(dtype),
    )
    reference = RowwiseAttention()
    exact_plan = reference.plan(case.layout, shape)
    exact = reference.run(exact_plan, q.double(), k_pool.double(), v_pool.double())
    exact_mass = reference.mass(exact_plan, q.double(), k_pool.double(), exact[1])

    attention = backend()
    plan = attention.plan(case.layout, shape)
    out, lse = attention.run(plan, q, k_pool, v_pool)
    mass = attention.mass(plan, q, k_pool, exact[1])

    tolerance, _ = TOLERANCE[dtype]
    rounding = 2.0**-22 * float(exact[1].abs().max())  # of a float32 logit
    torch.testing.assert_close(
        out.double(), exact[0], atol=tolerance + 4 * rounding, rtol=tolerance
    )
    torch.testing.assert_close(lse, exact[1], atol=1e-3 + rounding, rtol=0)
    torch.testing.assert_close(mass, exact_mass, atol=1e-3 + 4 * rounding, rtol=1e-3)


def decode_level(lengths: list[int], stride: int, base: int = 1000) -> CascadeLevel:
    """One row per request, request i at slot base + i * stride."""
    runs = [range(base + i * stride, base + i * stride + n) for i, n in enumerate(lengths)]
    return make_level([(1, list(run)) for run in runs], causal=True)


@pytest.mark.parametrize("backend", CASCADES)
@pytest.mark.parametrize("context", only([3], [0, 3, 200]))
@pytest.mark.parametrize("changes", [{}, {"softcap": 2.0}, {"head_dim_vo": 24}, {"window": 20}])
def test_prefill_longer_than_a_chunk(
    backend: Backend, context: int, changes: dict[str, object]
) -> None:
    case = make_case(
        [make_level([(300, list(range(7, 307 + context)))], True)], make_shape(**changes)
    )
    assert_agrees(case, backend())


@pytest.mark.parametrize("cascade", CASCADES)
def test_rows_without_keys_give_nothing(cascade: Backend) -> None:
    levels = [make_level([(1, [1, 2]), (2, [])], False), make_level([(1, [5]), (2, [])], True)]
    case = make_case(levels, make_shape())
    for backend in (RowwiseAttention(), cascade()):
        out, lse = backend.run(
            backend.plan(case.layout, case.shape), case.q, case.k_pool, case.v_pool
        )
        assert (out[1:] == 0).all() and (lse[1:] == -torch.inf).all()
        assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()
    assert_agrees(case, cascade())


@pytest.mark.parametrize("cascade", CASCADES)
def test_no_rows_give_nothing(cascade: Backend) -> None:
    case, backend = make_case([make_level([], True)], make_shape()), cascade()
    plan = backend.plan(case.layout, case.shape)

    out, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)
    mass = backend.mass(plan, case.q, case.k_pool, lse)

    assert (len(out), len(lse)) == (0, 0)
    assert torch.equal(mass, torch.zeros_like(mass))


@pytest.mark.parametrize("cascade", CASCADES)
def test_a_row_that_overflowed_is_not_hidden(cascade: Backend) -> None:
    levels = [make_level([(2, [1, 2, 3])], False), make_level([(1, [5]), (1, [6])], True)]
    case = make_case(levels, make_shape())
    case.q[1] = torch.nan
    backend = cascade()
    out, lse = backend.run(backend.plan(case.layout, case.shape), case.q, case.k_pool, case.v_pool)
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()
    assert out[1].isnan().all()


@pytest.mark.parametrize(("queries", "keys"), [(3, 2), (1, 2), (2, 0), (0, 1), (-2, -1)])
def test_query_heads_that_do_not_share_kv_heads_evenly_are_refused(queries: int, keys: int) -> None:
    with pytest.raises(ValueError, match=f"{queries} query heads over {keys} KV heads"):
        make_shape(num_qo_heads=queries, num_kv_heads=keys)


def test_reference_equals_the_textbook_formula() -> None:
    shape = make_shape(softcap=3.0, window=5)
    case = make_case([make_level([(6, list(range(10, 22)))], True)], shape)
    keys, values = (pool[10:22].repeat_interleave(2, dim=1) for pool in (case.k_pool, case.v_pool))
    logits = torch.einsum("qhd,khd->hqk", case.q, keys) * shape.scaling
    logits = 3.0 * torch.tanh(logits / 3.0)
    distance = torch.arange(6, 12)[:, None] - torch.arange(12)
    logits = logits.masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    out, lse = (x := RowwiseAttention()).run(
        x.plan(case.layout, shape), case.q, case.k_pool, case.v_pool
    )
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", logits.softmax(-1), values))
    torch.testing.assert_close(lse, logits.logsumexp(-1).T)


class Operations(TorchDispatchMode):
    """Records the operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_sums_half_precision_products_in_float32_in_one_call(dtype: torch.dtype) -> None:
    with FakeTensorMode():  # shapes and devices without values
        keys = torch.empty(4096, 2, 64, dtype=dtype, device="cuda")
        runs = keys.as_strided((3, 2, 40, 64), (100 * 128, 64, 128, 1))
        queries = torch.empty(3, 2, 7, 64, dtype=dtype, device="cuda")
        with Operations() as operations:
            logits = attention_logits(queries, runs, make_shape(head_dim_qk=64))
            out = matmul_float32(logits, runs)

    assert (logits.shape, logits.dtype) == ((3, 2, 7, 40), torch.float32)
    assert (out.shape, out.dtype, out.device.type) == ((3, 2, 7, 64), torch.float32, "cuda")
    products = [name for name in operations.seen if "mm" in name]
    assert products == ["aten.bmm.dtype", "aten.bmm.dtype"]


# Pieces: what matmuls make at once


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation returns, and what is copied from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.copied: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
            host = any(isinstance(x, Tensor) and x.device.type == "cpu" for x in args)
            if host and result.device.type != "cpu":
                self.copied.append(result)
        return result


def attend_elsewhere(shape: AttentionShape, levels: list[CascadeLevel]) -> Largest:
    """`run` and `mass` in bfloat16 on a device that is not a CPU: one of shapes without values."""
    backend, rows = TorchCascade(), int(levels[0].qo_indptr[-1])
    plan = backend.plan(CascadeLayout(rows, tuple(levels)), shape)
    slots = 1 + max(int(level.kv_indices.max()) for level in levels)

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="meta")

    q = empty(rows, shape.num_qo_heads, shape.head_dim_qk)
    k_pool = empty(slots, shape.num_kv_heads, shape.head_dim_qk)
    v_pool = empty(slots, shape.num_kv_heads, shape.head_dim_vo)
    with Largest() as largest:
        out, lse = backend.run(plan, q, k_pool, v_pool)
        mass = backend.mass(plan, q, k_pool, lse)
    assert (out.shape, lse.shape, mass.shape) == (q.shape, q.shape[:2], (slots,))
    assert {x.device.type for x in (out, lse, mass)} == {"meta"}
    return largest


ONE_RUN = list(range(9000))
SCATTERED = ONE_RUN[::-1]


@pytest.mark.parametrize(
    ("changes", "levels"),
    every(
        6,
        [
            pytest.param({}, [make_level([(8192, ONE_RUN[:8192])], True)], id="prompt"),
            pytest.param({}, [make_level([(8192, ONE_RUN)], True)], id="after a context"),
            pytest.param({}, [make_level([(8192, SCATTERED)], True)], id="of scattered slots"),
            pytest.param({"softcap": 50.0}, [make_level([(8192, ONE_RUN)], True)], id="softcap"),
            pytest.param({"window": 4096}, [make_level([(8192, ONE_RUN)], True)], id="window"),
            pytest.param(
                {},
                [make_level([(256, ONE_RUN[:8192])], False), decode_level([64] * 256, 64, 8192)],
                id="shared by 256 leaves",
            ),
            pytest.param({}, [decode_level([1024] * 256, 1024, 0)], id="256 leaves"),
        ],
    ),
)
def test_long_prompts_make_few_logits_at_once(
    changes: dict[str, object], levels: list[CascadeLevel]
) -> None:
    """32 heads over 8 of 128: all logits of the prompt in float32 are 8.6 GB."""
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128}
    shape = make_shape(**{**heads, "scaling": 128**-0.5, **changes})

    largest = attend_elsewhere(shape, levels)

    rows = int(levels[0].qo_indptr[-1])
    slots = 1 + max(int(level.kv_indices.max()) for level in levels)
    outputs = rows * 32 * 128 * torch.float32.itemsize
    keys = slots * 8 * 128 * torch.float32.itemsize
    assert largest.bytes <= max(TASK_BYTES, outputs, keys)


@pytest.mark.parametrize("task_bytes", only([2_000], [1, 2_000, 20_000, TASK_BYTES]))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softcap": 2.0},
        {"window": 5},
        {"window": 30, "softcap": 2.0},
        {"num_qo_heads": 6},
        {"num_qo_heads": 7, "num_kv_heads": 1},
        {"head_dim_vo": 24},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
@pytest.mark.parametrize("context", only([1], [0, 1, 40]))
def test_pieces_agree_with_float64(
    context: int, changes: dict[str, object], task_bytes: int
) -> None:
    """Pieces of one row, of a few rows that do not divide the prompt, and of everything."""
    prompt = list(range(7, 44 + context))
    requests = [(37, prompt), (1, prompt[:20]), (5, prompt[5:0:-1]), *[(1, [300, 301])] * 9]
    case = make_case([make_level(requests, True)], make_shape(**changes), sinks=True)
    backend = TorchCascade(task_bytes)

    assert_agrees(case, backend)
