"""Attention backends agree with the reference over the whole space of layouts."""

from __future__ import annotations

import doctest
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.slow_cases import only
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    apply_sinks,
)
from arbor.kernels.attention.logits import attention_logits, matmul_float32
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.reference import ReferenceAttention
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import LOGIT_BYTES, TorchCascade
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
    reference = ReferenceAttention()
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
@pytest.mark.parametrize("changes", [{}, {"head_dim_vo": 24}, {"softcap": 30.0}])
@pytest.mark.parametrize("bias", [30.0, 3000.0])
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
    reference = ReferenceAttention()
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


@pytest.mark.parametrize("tokens", [1, 16, 48, 49, 100])
@pytest.mark.parametrize("group,dim", [(2, 32), (3, 64), (1, 128)])
def test_uniform_leaves_are_one_call_without_a_copy(tokens: int, group: int, dim: int) -> None:
    shape = make_shape(num_qo_heads=2 * group, head_dim_qk=dim, head_dim_vo=dim)
    shared = make_level([(12, list(range(100)))], causal=False)
    case = make_case([shared, decode_level([tokens] * 12, 130)], shape)
    plan = TorchCascade().plan(case.layout, shape)
    assert [(task.batch, task.index) for task in plan.tasks] == [(1, None), (12, None)]
    assert_agrees(case)


def test_ragged_leaves_are_one_padded_gather() -> None:
    case = make_case([decode_level([7, 3, 40, 40, 41, 1], 64)], make_shape())
    (task,) = TorchCascade().plan(case.layout, case.shape).tasks
    assert task.index is not None and task.batch == 6
    assert_agrees(case)


def test_a_uniform_rest_of_a_round_stays_a_view() -> None:
    runs = [range(1000 + 64 * i, 1020 + 64 * i) for i in (0, 1, 2, 3, 7, 8, 9, 10, 11)]
    case = make_case([make_level([(1, list(run)) for run in runs], causal=True)], make_shape())
    tasks = TorchCascade().plan(case.layout, case.shape).tasks
    assert [(task.batch, task.index) for task in tasks] == [(4, None), (5, None)]
    assert_agrees(case)


def test_a_long_shared_span_in_few_runs_is_never_gathered() -> None:
    slots = [*range(100, 400), *range(20, 90), *range(500, 800)]
    case = make_case([make_level([(3, slots)], False), decode_level([4, 4, 4], 10)], make_shape())
    tasks = TorchCascade().plan(case.layout, case.shape).tasks
    assert [(task.start, task.keys) for task in tasks if task.rows == 3] == [
        (100, 300),
        (20, 70),
        (500, 300),
    ]
    assert all(task.index is None for task in tasks)
    assert_agrees(case)


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


@pytest.mark.parametrize("backend", CASCADES)
def test_rehydration_and_decode_share_slots_in_one_batch(backend: Backend) -> None:
    path = list(range(100, 190))
    requests = [(1, path[:31]), (4, path[:50]), (20, path[:80]), (1, path), (1, [*path[:60], 300])]
    assert_agrees(make_case([make_level(requests, causal=True)], make_shape()), backend())


@pytest.mark.parametrize("cascade", CASCADES)
def test_rows_without_keys_give_nothing(cascade: Backend) -> None:
    levels = [make_level([(1, [1, 2]), (2, [])], False), make_level([(1, [5]), (2, [])], True)]
    case = make_case(levels, make_shape())
    for backend in (ReferenceAttention(), cascade()):
        out, lse = backend.run(
            backend.plan(case.layout, case.shape), case.q, case.k_pool, case.v_pool
        )
        assert (out[1:] == 0).all() and (lse[1:] == -torch.inf).all()
        assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()
    assert_agrees(case, cascade())


@pytest.mark.parametrize("kind", [*CASCADES, pytest.param(ReferenceAttention, id="reference")])
def test_mass_of_all_heads_sums_to_rows_times_heads(kind: Backend) -> None:
    backend = kind()
    shared = make_level([(3, list(range(50))), (2, [])], False)
    last = make_level([(1, [60, 61]), (1, [70, 71]), (1, [80, 90, 81]), (2, [95, 96, 97])], True)
    case = make_case([shared, last], make_shape())
    plan = backend.plan(case.layout, case.shape)
    lse = backend.run(plan, case.q, case.k_pool, case.v_pool)[1]
    mass = backend.mass(plan, case.q, case.k_pool, lse)
    assert mass.sum().item() == pytest.approx(5 * 4, rel=1e-5)
    assert mass[torch.isin(torch.arange(POOL_SLOTS), case.owned, invert=True)].abs().max() == 0
    one_head = backend.mass(plan, case.q, case.k_pool, lse, torch.tensor([1]))
    assert one_head.sum().item() == pytest.approx(5 * 2, rel=1e-5)


def test_reference_equals_the_textbook_formula() -> None:
    shape = make_shape(softcap=3.0, window=5)
    case = make_case([make_level([(6, list(range(10, 22)))], True)], shape)
    keys, values = (pool[10:22].repeat_interleave(2, dim=1) for pool in (case.k_pool, case.v_pool))
    logits = torch.einsum("qhd,khd->hqk", case.q, keys) * shape.scaling
    logits = 3.0 * torch.tanh(logits / 3.0)
    distance = torch.arange(6, 12)[:, None] - torch.arange(12)
    logits = logits.masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    out, lse = (x := ReferenceAttention()).run(
        x.plan(case.layout, shape), case.q, case.k_pool, case.v_pool
    )
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", logits.softmax(-1), values))
    torch.testing.assert_close(lse, logits.logsumexp(-1).T)


def test_a_sink_is_one_more_key_of_value_zero() -> None:
    case = make_case([decode_level([5, 5], 10)], make_shape(), sinks=True)
    backend = ReferenceAttention()
    plan = backend.plan(case.layout, case.shape)
    out, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)
    assert case.sinks is not None
    with_sink, sink_lse = backend.run(plan, case.q, case.k_pool, case.v_pool, case.sinks)
    share = torch.exp(lse) / (torch.exp(lse) + torch.exp(case.sinks))
    torch.testing.assert_close(with_sink, out * share[..., None])
    torch.testing.assert_close(sink_lse, torch.log(torch.exp(lse) + torch.exp(case.sinks)))
    again = apply_sinks(out, lse, case.sinks)
    torch.testing.assert_close(with_sink, again[0])


@pytest.mark.parametrize(
    "kind",
    [
        *CASCADES,
        pytest.param(ReferenceAttention, id="reference"),
        pytest.param(RowwiseAttention, id="rowwise"),
    ],
)
def test_keys_may_be_split_into_levels_at_will(kind: Backend) -> None:
    backend = kind()
    shape, slots = make_shape(), list(range(100, 140))
    last = make_level([(1, slots[:9]), (1, slots[:9])], True)
    case = make_case([make_level([(2, slots)], False)], shape)

    def attend(*levels: CascadeLevel) -> tuple[Tensor, Tensor]:
        plan = backend.plan(CascadeLayout(2, levels), shape)
        return backend.run(plan, case.q, case.k_pool, case.v_pool)

    whole = attend(make_level([(1, slots), (1, slots)], True))
    for parts in ([slots[9:]], [slots[9:20], slots[20:]], [slots[30:], slots[9:11], slots[11:30]]):
        shared = [make_level([(2, part)], False) for part in parts]
        torch.testing.assert_close(attend(*shared, last), whole, atol=1e-5, rtol=1e-5)


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
    assert largest.bytes <= max(LOGIT_BYTES, outputs, keys)


def test_no_mask_is_copied_from_the_host() -> None:
    prompt = make_level([(600, ONE_RUN[:700]), (3, SCATTERED[:9])], True)
    ragged = decode_level([7, 3, 40, 40, 41, 1], 64)
    for shape in (make_shape(), make_shape(window=50)):
        assert not attend_elsewhere(shape, [make_level([(300, ONE_RUN[:900])], True)]).copied
        for level, listed in ((prompt, 9), (ragged, 6 * 41)):
            copied = attend_elsewhere(shape, [level]).copied
            assert all(x.dtype == torch.int64 and x.numel() <= listed for x in copied)


@pytest.mark.parametrize("logit_bytes", [1, 2_000, 20_000, LOGIT_BYTES])
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
    context: int, changes: dict[str, object], logit_bytes: int
) -> None:
    """Pieces of one row, of a few rows that do not divide the prompt, and of everything."""
    prompt = list(range(7, 44 + context))
    requests = [(37, prompt), (1, prompt[:20]), (5, prompt[5:0:-1]), *[(1, [300, 301])] * 9]
    case = make_case([make_level(requests, True)], make_shape(**changes), sinks=True)
    backend = TorchCascade(fused=False, logit_bytes=logit_bytes)

    assert_agrees(case, backend)

    plan = backend.plan(case.layout, case.shape)
    assert len(list(plan.tasks[0].pieces(1, 1))) == 37


@given(cases(), st.sampled_from([1, 3_000, 100_000]))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_matmuls_of_any_piece_agree_with_the_reference(case: Case, logit_bytes: int) -> None:
    assert_agrees(case, TorchCascade(fused=False, logit_bytes=logit_bytes))


def test_mass_of_few_heads_in_one_piece_leaves_the_masks_of_smaller_pieces_right() -> None:
    case = make_case([make_level([(6, list(range(20, 30)))], True)], make_shape(num_kv_heads=4))
    backend = TorchCascade(fused=False, logit_bytes=6 * 10 * 4)
    plan = backend.plan(case.layout, case.shape)
    expected = backend.run(plan, case.q, case.k_pool, case.v_pool)
    fresh = backend.plan(case.layout, case.shape)

    backend.mass(fresh, case.q, case.k_pool, expected[1], torch.tensor([0]))

    found = backend.run(fresh, case.q, case.k_pool, case.v_pool)
    assert len(fresh.piece_masks) == 1
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_full_precision_keep_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 3, 5, 64, dtype=dtype), torch.randn(2, 3, 64, 9, dtype=dtype)

    assert torch.equal(matmul_float32(left, right), torch.matmul(left, right))


@pytest.mark.parametrize(
    "module",
    [
        "attention.base",
        "hugepages",
        "linear.layers",
        "attention.logits",
        "attention.mass_work",
        "native",
        pytest.param("attention.native_cascade", marks=needs_native),
        pytest.param("fused.parts", marks=needs_native),
        "attention.reference",
        "attention.rowwise",
        "attention.torch_cascade",
        "attention.torch_tasks",
    ],
)
def test_the_examples_of_the_documentation_run(module: str) -> None:
    done = doctest.testmod(importlib.import_module(f"arbor.kernels.{module}"))

    assert done.attempted > 0
    assert done.failed == 0


def test_all_satisfy_the_protocol() -> None:
    assert isinstance(ReferenceAttention(), AttentionBackend)
    assert isinstance(RowwiseAttention(), AttentionBackend)
    assert isinstance(TorchCascade(), AttentionBackend)
    assert native_library() is None or isinstance(NativeCascade(), AttentionBackend)
