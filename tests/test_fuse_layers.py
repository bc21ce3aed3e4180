"""All layers of a decoder as one native call: which decoders, and that no bit changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.models import ARCHITECTURES, VOCABULARY, config_of, random_model
from support.slow_cases import every
from test_layers import batch
from torch import Tensor, nn

from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.fused.native_layers import MOST_ROWS, NativeLayers
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import rotary_ops
from arbor.kernels.linear.layers import pack_linears
from arbor.kernels.native import native_library
from arbor.memory.pool import KVPool
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ForwardResult, ModelRunner

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library is not built")

CPU = torch.device("cpu")
HEAD = 16  # the least that the native attention computes
# Architectures whose layers are one call, in float32 and bfloat16.
WHOLE = {
    *("llama", "llama_mha", "llama_gqa4", "llama_gqa7", "llama_yarn"),
    *("qwen2", "qwen2_sliding", "qwen3", "mistral", "mistral_window", "ministral"),
    *("gemma", "gemma2", "vaultgemma", "phi3", "phi3_window", "olmo2", "olmo3"),
    *("smollm3", "glm", "glm4", "seed_oss", "exaone4", "ernie4_5", "helium"),
    *("gemma3_text", "granite"),
}
# Those whose own forward runs around the call: factors of embeddings or logits, soft caps, tables
# of angles by window.
OTHER_FORMS = {
    **dict.fromkeys(("gemma2", "granite", "olmo3", "vaultgemma"), "one table"),
    "gemma3_text": "several tables",
}
# One of each kind: plain, norms of heads, sandwich norms and windows, norms after, joint
# projections, biases, several tables of angles, a factor in the residual sums.
SOME = (
    "llama",
    "qwen3",
    "gemma2",
    "olmo2",
    "phi3_window",
    "qwen2",
    "glm4",
    "gemma3_text",
    "granite",
)
DTYPES = (torch.float32, torch.bfloat16)


def prepared(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> ModelRunner:
    """A runner of an architecture with everything native, its layers one by one."""
    kind, own = ARCHITECTURES[name]
    wide = {**own, "hidden_size": own.get("num_attention_heads", 4) * HEAD}
    if "head_dim" in own:
        wide["head_dim"] = HEAD
    model = random_model(config_of(kind, **wide)).to(dtype)
    runner = ModelRunner(model, NativeCascade(), deterministic=True, **settings)
    pack_linears(model, deterministic=True)
    ops, rotary = fused_ops(CPU), rotary_ops(CPU)
    assert ops is not None and rotary is not None
    fuse(model, ops)
    fuse_attention(model, rotary)
    return runner


@contextmanager
def calls() -> Iterator[list[int]]:
    """Rows of each native call for all layers."""
    found: list[int] = []
    own = NativeLayers.run

    def counted(self: NativeLayers, hidden: Tensor, *others: Any) -> Tensor:
        found.append(len(hidden))
        return own(self, hidden, *others)

    with patch.object(NativeLayers, "run", counted):
        yield found


def forward(runner: ModelRunner, **settings: Any) -> tuple[ForwardResult, list[Tensor]]:
    """A forward over a tree, and all K and V that it wrote."""
    plan, pool = batch(runner)
    result = runner.forward(plan, pool, **settings)
    return result, [each[:-1] for each in (*pool.k, *pool.v)]


def check_bits(name: str, dtype: torch.dtype) -> None:
    runner = prepared(name, dtype)
    before, stored = forward(runner)

    assert runner.fuse_layers() == ""
    assert runner.layers_form == OTHER_FORMS.get(name, "direct")
    with calls() as made:
        after, stored_after = forward(runner)

    assert made == [len(before.logits)]
    assert torch.equal(after.logits, before.logits)
    assert all(map(torch.equal, stored_after, stored))


@pytest.mark.parametrize("name", SOME)
def test_one_call_has_the_bits_of_the_layers(name: str) -> None:
    check_bits(name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_one_call_has_the_bits_of_the_layers_of_every_architecture(
    name: str, dtype: torch.dtype
) -> None:
    check_bits(name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - WHOLE))
def test_other_architectures_keep_their_layers(name: str) -> None:
    runner = prepared(name)
    before, stored = forward(runner)

    reason = runner.fuse_layers()
    with calls() as made:
        after, stored_after = forward(runner)

    assert reason
    assert made == []
    assert torch.equal(after.logits, before.logits)
    assert all(map(torch.equal, stored_after, stored))


@pytest.mark.parametrize("place", ["model", "decoder", "layer", "norm"])
def test_hooks_of_the_model_run(place: str) -> None:
    runner = prepared("llama")
    assert runner.fuse_layers() == "" and runner.layers_form == "direct"
    before, _ = forward(runner)
    model: Any = runner.model
    places = {
        "model": model,
        "decoder": model.model,
        "layer": model.model.layers[0],
        "norm": model.model.norm,
    }
    seen: list[None] = []
    places[place].register_forward_hook(lambda *_: seen.append(None))

    after, _ = forward(runner)

    assert len(seen) == 1
    assert torch.equal(after.logits, before.logits)


def rows(runner: ModelRunner, count: int) -> tuple[Tensor, KVPool]:
    """One segment of so many random tokens: logits, and the pool with their K and V."""
    pool = KVPool(runner.layer_kv, count, runner.dtype, runner.device)
    ids = np.random.default_rng(count).integers(0, VOCABULARY, count).tolist()
    slots = np.arange(count, dtype=np.int32)
    plan = plan_forward([Segment((), ids, np.arange(count), slots, slots, count)])
    return runner.forward(plan, pool).logits, pool


def test_batches_of_every_size_in_any_order_and_pools_in_turn() -> None:
    runner = prepared("qwen3")
    sizes = (3, 1, MOST_ROWS, 2, MOST_ROWS + 1, 7, 3)
    before = [rows(runner, count) for count in sizes]
    runner.fuse_layers()

    with calls() as made:
        after = [rows(runner, count) for count in sizes]

    assert made == [count for count in sizes if count <= MOST_ROWS]
    for (logits, pool), (expected, expected_pool) in zip(after, before, strict=True):
        assert torch.equal(logits, expected)
        assert all(map(torch.equal, pool.k, expected_pool.k))
        assert all(map(torch.equal, pool.v, expected_pool.v))


@pytest.mark.parametrize(
    "settings",
    [
        {"leave": lambda layer, state, rows: state[:, 0] > 0},
        {"stop_after": 1, "hidden": (0, 1)},
        {"mass": {0: None}, "queries": {1: torch.tensor([0])}},
        {"queries": {1: torch.tensor([0, 3])}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_forwards_that_look_into_layers_run_them_one_by_one(settings: dict[str, Any]) -> None:
    runner = prepared("llama")
    before, stored = forward(runner, **settings)
    runner.fuse_layers()

    with calls() as made:
        after, stored_after = forward(runner, **settings)

    assert made == []
    assert torch.equal(after.logits.nan_to_num(-7.0), before.logits.nan_to_num(-7.0))
    for found, expected in zip(stored_after, stored, strict=True):
        assert torch.equal(found.nan_to_num(-7.0), expected.nan_to_num(-7.0))
    if before.mass is not None:
        assert after.mass is not None and torch.equal(after.mass, before.mass)
    assert all(torch.equal(after.hidden[layer], each) for layer, each in before.hidden.items())
    assert all(torch.equal(after.queries[layer], each) for layer, each in before.queries.items())


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2_sliding"])
def test_the_call_observes_layers(name: str, by_head: bool) -> None:
    runner = prepared(name, torch.bfloat16)
    plan, pool = batch(runner)
    again = torch.arange(plan.rows) % 3 == 0
    masses: dict[int, Tensor | None] = {0: None, runner.layer_count - 1: torch.tensor([0])}
    runs = [replace(plan, again=again), plan, plan]
    asked = [masses, {1: None}, {}]

    def observed() -> list[ForwardResult]:
        return [
            runner.forward(each, pool, mass=mass, by_head=by_head)
            for each, mass in zip(runs, asked, strict=True)
        ]

    before = observed()
    assert runner.fuse_layers() == ""
    with calls() as made:
        after = observed()

    assert made == [plan.rows] * 3
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert (one.mass is None) == (other.mass is None)
        assert one.mass is None or other.mass is None or torch.equal(one.mass, other.mass)
    masses_found = [each.mass for each in after]
    assert masses_found[2] is None and float(masses_found[0].sum()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", every(2, ["llama", "gemma3_text"]))
def test_a_forward_that_fails_before_the_layers_keeps_no_pool(name: str) -> None:
    runner = prepared(name)
    before, _ = forward(runner)
    assert runner.fuse_layers() == ""
    plan, pool = batch(runner)
    kept = weakref.ref(pool)

    with (
        patch.object(nn.Embedding, "forward", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        runner.forward(plan, pool)
    del pool
    gc.collect()

    assert kept() is None
    assert torch.equal(forward(runner)[0].logits, before.logits)
