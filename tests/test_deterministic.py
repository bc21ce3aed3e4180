"""With `deterministic`, a row's logits, keys and values do not depend on the batch around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.models import ARCHITECTURES, Words, config_of, random_model
from support.slow_cases import every
from torch import Tensor, nn
from torch.nn import functional as F

from arbor import Solver
from arbor.kernels import invariant
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import rotary_ops
from arbor.kernels.invariant import row_invariant
from arbor.kernels.linear.layers import pack_linears
from arbor.kernels.native import native_library, without_native
from arbor.memory.pool import KVPool
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)

# hidden and intermediate size, attention heads: no width is a multiple of a vector's 16 floats.
SIZES = ((50, 100, 5), (100, 172, 5), (172, 50, 2))

# Mixtures of experts, which `deterministic` refuses.
EXPERTS = [
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
]
DENSE = [name for name in ARCHITECTURES if name not in EXPERTS]

ROOT = 5  # tokens of context
ROWS = 17


def sized(name: str, hidden: int, intermediate: int, heads: int) -> Any:
    """A config of an architecture in other widths."""
    model_type, given = ARCHITECTURES[name]
    settings = dict(given)
    kv_heads = 1 if settings.get("num_key_value_heads", 2) in (1, 2) else heads
    if model_type in ("gpt2", "gpt_bigcode", "opt"):
        heads = 2 if hidden % 4 else 4  # head dimensions of 25 and 43
    if model_type in ("gpt2", "gpt_bigcode"):
        settings |= {"n_embd": hidden, "n_inner": intermediate, "n_head": heads}
    elif model_type == "opt":
        settings |= {
            "hidden_size": hidden,
            "word_embed_proj_dim": hidden,
            "ffn_dim": intermediate,
            "num_attention_heads": heads,
        }
    else:
        settings |= {
            "hidden_size": hidden,
            "intermediate_size": [intermediate] * 4 if name == "gemma3n_text" else intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        if "head_dim" in settings:
            settings["head_dim"] = hidden // heads
        if model_type in ("persimmon", "stablelm", "phi", "gpt_neox"):
            settings["num_key_value_heads"] = heads
            settings["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.4,
            }
    return config_of(model_type, **settings)


class Rows:
    """Forwards of rows below a root, and of the same path in one segment or token by token."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.ids = [3 + 7 * i % 90 for i in range(ROOT + ROWS)]
        self.slots = np.arange(ROOT + 2 * ROWS, dtype=np.int32)
        self.pool = KVPool(runner.layer_kv, len(self.slots), runner.dtype, runner.device)
        head = self.slots[:ROOT]
        self.forward([Segment((), self.ids[:ROOT], np.arange(ROOT), head, head)])
        self.root = Piece("root", head, np.arange(ROOT, dtype=np.int32))

    def forward(self, segments: list[Segment]) -> Tensor:
        return self.runner.forward(plan_forward(segments), self.pool).logits

    def leaves(self, rows: list[int]) -> list[tuple[Tensor, ...]]:
        """Each row's logits, keys and values, the rows in this order in one batch."""
        own = [self.slots[ROOT + row : ROOT + row + 1] for row in rows]
        logits = self.forward(
            [
                Segment((self.root,), [self.ids[ROOT + row]], np.array([ROOT]), slot, slot, 1)
                for row, slot in zip(rows, own, strict=True)
            ]
        )
        return [(logits[i], *self.stored(slot)) for i, slot in enumerate(own)]

    def path(self, parts: list[int]) -> list[tuple[Tensor, ...]]:
        """The same of each token of a path, computed in forwards of so many tokens."""
        slots = self.slots[ROOT + ROWS :]
        found = []
        start = 0
        for count in parts:
            end = start + count
            tokens, places = self.ids[start:end], np.arange(start, end)
            found += self.forward(
                [Segment((), tokens, places, slots[:end], slots[start:end], count)]
            )
            start = end
        return [(logits, *self.stored(slots[i : i + 1])) for i, logits in enumerate(found)]

    def stored(self, slot: Any) -> list[Tensor]:
        return [pool[slot].clone() for pool in (*self.pool.k, *self.pool.v)]


def same(some: list[tuple[Tensor, ...]], others: list[tuple[Tensor, ...]]) -> bool:
    return all(
        torch.equal(one, other)
        for row, other_row in zip(some, others, strict=True)
        for one, other in zip(row, other_row, strict=True)
    )


def deterministic_runner(
    model: nn.Module, backend: Callable[[], AttentionBackend] = RowwiseAttention
) -> ModelRunner:
    runner = ModelRunner(model, backend(), deterministic=True)
    pack_linears(model, deterministic=True)
    ops = fused_ops(CPU)
    if ops is not None:
        fuse(model, ops)
    rotary = rotary_ops(CPU)
    if rotary is not None:
        fuse_attention(model, rotary)
    return runner


def check(
    name: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    counts: Sequence[int],
    backend: Callable[[], AttentionBackend] = RowwiseAttention,
) -> None:
    """Compare rows alone with rows in batches of these sizes, and a path in one part or several."""
    rows = Rows(deterministic_runner(random_model(sized(name, *size)).to(dtype), backend))
    alone = [rows.leaves([row])[0] for row in range(ROWS)]
    for count in counts:
        order = [(count * 5 + i) % ROWS for i in range(count)]
        assert same(rows.leaves(order), [alone[row] for row in order]), (size, dtype, count)
    assert same(rows.path([ROWS]), rows.path([1] * ROWS)), (size, dtype)
    assert same(rows.path([ROWS]), rows.path([3, 1, 8, 5])), (size, dtype)


@pytest.mark.parametrize("name", every(4, DENSE))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    size = SIZES[DENSE.index(name) % len(SIZES)]
    with without_native():
        check(name, size, torch.float32, (2, 7, ROWS))


# heads of 16 and 48; widths that end within a vector, a panel and a pair of inputs
NATIVE_SIZES = ((80, 100, 5), (144, 173, 3))


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "mistral_window", "phi"])
def test_native_kernels_give_a_row_the_same_bits(name: str, dtype: torch.dtype) -> None:
    size = NATIVE_SIZES[0 if name in ("gemma2", "phi") else 1]
    check(name, size, dtype, (2, 7, ROWS), NativeCascade)


def loaded(model: nn.Module, **settings: Any) -> ModelRunner:
    """The runner of a solver that was not asked to be deterministic."""
    return Solver(model, tokenizer=Words(), device="cpu", **settings).checkpoint.load().runner


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("llama", (144, 173, 3), {"backend": "torch"}),
        ("mixtral", (80, 100, 5), {}),  # experts
        ("llama", (50, 100, 5), {}),  # heads of 10
        ("llama", (50, 100, 5), {"backend": "native"}),
    ],
)
def test_what_other_kernels_compute_depends_on_the_batch_unless_asked(
    name: str, size: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    if settings.get("backend") == "native" and native_library() is None:
        pytest.skip("the library is not built")

    assert not loaded(random_model(sized(name, *size)), **settings).deterministic


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_a_row_has_the_same_bits_at_every_place_of_every_batch(
    name: str, dtype: torch.dtype
) -> None:
    for size in SIZES:
        check(name, size, dtype, range(2, ROWS + 1))


# Element-wise functions

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu_": lambda x: F.silu(x, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": Tensor.sigmoid,
    "sigmoid_": Tensor.sigmoid_,
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "mish": F.mish,
    "elu": F.elu,
    "tanh": torch.tanh,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-3),
    "power": lambda x: (x.abs() + 1e-3) ** -0.5,
    "power_": lambda x: x.abs_().add_(1e-3).pow_(-0.5),
    "cos": torch.cos,
    "exp_": Tensor.exp_,
}


@pytest.fixture(params=["key", "dispatch"])
def interception(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing torch's functions: the fast one, and the one for any torch."""
    if request.param == "dispatch":  # a key cannot be registered twice, so the cache stays as it is
        monkeypatch.setattr(invariant, "_by_key", refuse)
        monkeypatch.setattr(invariant, "_interception", invariant._interception.__wrapped__)
    return str(request.param)


def refuse(*_: object) -> None:
    raise AttributeError("this torch has no such key")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_a_function_of_an_element_does_not_depend_on_its_place(
    interception: str, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        for width in (50, 4100):
            x = torch.randn(1, 30, width).to(dtype)
            for name, call in CALLS.items():
                with row_invariant(CPU):
                    whole = call(x.clone())
                    single = [call(row.clone()) for row in x.split(1, dim=1)]
                    strided = call(x.clone().transpose(1, 2)).transpose(1, 2)
                assert torch.equal(whole, torch.cat(single, dim=1)), (name, width)
                assert torch.equal(strided, whole), (name, width)
                torch.testing.assert_close(whole, call(x.clone()), msg=name)
    finally:
        torch.set_num_threads(1)


# Reductions of CUDA


class OnCuda(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("size", [(), (0,), (0, 8), (3, 0), (0, 0)])
def test_reductions_of_a_number_or_none_are_torchs(size: tuple[int, ...]) -> None:
    x = torch.ones(size, dtype=torch.float32)
    for name, reduced in invariant.REDUCTIONS.items():
        if name == "bmm":
            continue
        own: Any = invariant._operator(name)
        for dim in ([0], [-1], None):
            before = [2.0] if name == "linalg_vector_norm" else []
            wanted = own(x, *before, dim)
            found = reduced(x.as_subclass(OnCuda), *before, dim)
            assert torch.allclose(found.as_subclass(Tensor), wanted, equal_nan=True), (name, dim)
            assert found.shape == wanted.shape


@pytest.mark.parametrize("size", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_products_without_numbers_are_torchs(size: tuple[int, ...]) -> None:
    batch, rows, depth, columns = size
    left = torch.ones(batch, rows, depth, dtype=torch.float32).as_subclass(OnCuda)
    right = torch.ones(batch, depth, columns, dtype=torch.float32).as_subclass(OnCuda)
    assert torch.equal(invariant.REDUCTIONS["bmm"](left, right), torch.bmm(left, right))
