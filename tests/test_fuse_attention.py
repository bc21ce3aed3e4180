"""Fused attention layers: which are, which stay, and that no bit of a forward changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.fused_standin import TorchFusedOps, TorchRotary
from support.models import ARCHITECTURES, build, path_logits
from support.slow_cases import every
from support.trees import relative_error
from test_layers import batch
from torch import Tensor, nn

from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import RotaryOps, rotary_ops
from arbor.kernels.linear.layers import DenseJoint, pack_linears, weight_bytes
from arbor.kernels.native import native_library
from arbor.memory.pool import KVPool
from arbor.model.attention import register_implementation
from arbor.model.fuse import fuse, unfuse
from arbor.model.fuse_attention import fuse_attention
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ForwardResult, ModelRunner

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library is not built")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SLOTS = np.arange(60, dtype=np.int32)

# Architectures whose layers stay: of another structure, or, where a reason is given, of another
# formula.
STAY = {
    "gemma3n_text": "",
    "gpt_neox": "",
    "gpt2": "",
    "opt": "",
    "deepseek_v3": "",
    "hunyuan_v1_dense": "",
    "gpt_bigcode": "",
    "persimmon": "",
    "nanochat": "differ in every known form",
    "gemma4_text": "",
    "ministral3": "differ in every known form",
}
# Forms of rotary embedding other than Llama's, in float32 and in bfloat16, by layer where they
# differ; where both round alike, the first of `ROTARY_FORMS` is taken.
FORMS: dict[str, tuple[list[str], list[str]]] = {
    "olmo2": (["llama"], ["olmo2"]),
    "olmo3": (["llama"], ["olmo2"]),
    "smollm3": (["llama", "none"], ["llama", "none"]),
    "cohere": (["cohere"], ["cohere"]),
    "cohere2": (["cohere", "none"], ["cohere", "none"]),
    "exaone4": (["llama", "none"], ["llama", "none"]),
    "gpt_oss": (["gpt_oss"], ["gpt_oss"]),
    "glm": (["glm"], ["glm"]),
    "glm4": (["glm"], ["glm"]),
    "helium": (["glm"], ["glm"]),
    "ernie4_5": (["glm"], ["ernie4_5"]),
}
# Architectures whose projections are one matrix already, or of sizes that are not joined.
APART = {"phi3", "phi3_window", "llama_gqa4", "llama_gqa7"}


def native_rotary() -> RotaryOps:
    ops = rotary_ops(CPU)
    assert ops is not None
    return ops


def prepared(model: nn.Module, kv_dtype: torch.dtype | None = None) -> ModelRunner:
    """A runner of everything native but the attention layers."""
    runner = ModelRunner(model, TorchCascade(), kv_dtype=kv_dtype)
    pack_linears(model)
    ops = fused_ops(CPU)
    assert ops is not None
    fuse(model, ops)
    return runner


def bits(runner: ModelRunner, **settings: Any) -> tuple[ForwardResult, list[Tensor]]:
    """A forward over a tree, and all K and V that it wrote."""
    plan, pool = batch(runner)
    result = runner.forward(plan, pool, **settings)
    return result, [*pool.k, *pool.v]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(
        torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))
        for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", every(3, ARCHITECTURES))
def test_a_fused_forward_has_the_bits_of_the_models_own(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    runner = prepared(model)
    before, stored = bits(runner)

    fused, kept = fuse_attention(model, native_rotary())
    after, stored_after = bits(runner)

    if name in STAY:
        assert fused == () and all(STAY[name] in reason for reason in kept.values())
        assert bool(kept) == bool(STAY[name])
    else:
        assert len(fused) == runner.layer_count and not kept
        forms = [model.get_submodule(each)._arbor_form for each in fused]
        named = FORMS.get(name, (["llama"], ["llama"]))[dtype == torch.bfloat16]
        found = [form.rotary.name if form.rotary else "none" for form in forms]
        assert sorted(set(found)) == sorted(named)
        assert all((form.joint is None) == (name in APART) for form in forms)
    assert torch.equal(after.logits, before.logits)
    assert same(stored_after, stored)


def test_queries_that_are_scaled_by_position_keep_their_scale() -> None:
    """The scale is 1 up to `original_max_position_embeddings`: near positions do not show it."""
    model = build("ministral3")
    ids = [3 + 7 * i % 90 for i in range(60)]
    wanted = path_logits(model, ids)
    runner = prepared(model)
    segment = Segment((), ids, np.arange(60), SLOTS, SLOTS, 60)

    fuse_attention(model, native_rotary())
    pool = KVPool(runner.layer_kv, 60, runner.dtype, runner.device)
    found = runner.forward(plan_forward([segment]), pool).logits

    assert model.config.rope_parameters["original_max_position_embeddings"] < 60
    assert relative_error(found, wanted) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm", "gpt_oss", "smollm3"])
def test_rows_that_leave_and_layers_that_are_observed_keep_their_bits(name: str) -> None:
    model = build(name)
    runner = prepared(model)
    ways: tuple[dict[str, Any], ...] = (
        {"leave": lambda layer, state, rows: state[:, 0] > 0},
        {"stop_after": 1, "hidden": (0, 1)},
        {"mass": {0: None, 2: torch.tensor([0])}},
    )
    before = [bits(runner, **settings) for settings in ways]
    fuse_attention(model, native_rotary())

    for settings, (expected, stored) in zip(ways, before, strict=True):
        found, stored_after = bits(runner, **settings)

        # NaN where a row reads K and V of one that left
        assert same([found.logits, *stored_after], [expected.logits, *stored])
        assert not found.logits.isnan().all()
        assert same(list(found.hidden.values()), list(expected.hidden.values()))
        if expected.mass is not None:
            assert found.mass is not None and torch.equal(found.mass, expected.mass)


def test_keys_are_rotated_before_they_are_stored_in_8_bits() -> None:
    model = build("llama")
    runner = prepared(model, torch.int8)
    plan, _ = batch(runner)
    pools = []
    for _ in range(2):
        pool = type(batch(runner)[1])(runner.layer_kv, 200, torch.int8, CPU)
        result = runner.forward(plan, pool)
        pools.append((result.logits, pool.k, pool.v))
        fuse_attention(model, native_rotary())

    (logits, *stored), (logits_after, *stored_after) = pools
    assert torch.equal(logits_after, logits)
    assert same([*stored[0], *stored[1]], [*stored_after[0], *stored_after[1]])


def test_outside_of_arbor_and_where_gradients_are_recorded_the_layers_own_forward_runs() -> None:
    model = build("llama")
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    own = model.config._attn_implementation
    runner = ModelRunner(model, TorchCascade())
    assert len(fuse_attention(model, native_rotary())[0]) == runner.layer_count

    model.set_attn_implementation(own)
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        cached = model(ids, use_cache=True).past_key_values
        assert cached.layers[0].keys.shape[2] == ids.shape[1]
    model(ids, use_cache=False).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_fusing_can_be_repeated_undone_and_copied() -> None:
    model = build("qwen3")
    runner = prepared(model)
    classes = [type(each) for each in model.modules()]
    before, _ = bits(runner)
    held = weight_bytes(model)

    first = fuse_attention(model, native_rotary())
    names = [type(each).__name__ for each in model.modules()]
    second = fuse_attention(model, native_rotary())

    assert first == second and names.count("FusedQwen3Attention") == runner.layer_count
    assert [type(each).__name__ for each in model.modules()] == names
    assert weight_bytes(model) == held
    assert torch.equal(bits(runner)[0].logits, before.logits)
    twin = ModelRunner(copy.deepcopy(model), TorchCascade())
    assert torch.equal(bits(twin)[0].logits, before.logits)

    unfuse(model)

    assert [type(each).__name__ for each in model.modules()].count("FusedQwen3Attention") == 0
    assert not any(name.startswith("_arbor_") for each in model.modules() for name in vars(each))
    ops = fused_ops(CPU)
    assert ops is not None
    fuse(model, ops)
    assert [type(each) for each in model.modules()] == classes
    assert torch.equal(bits(runner)[0].logits, before.logits)


def test_hooks_of_projections_and_norms_run() -> None:
    model = build("qwen3")
    runner = prepared(model)
    fuse_attention(model, native_rotary())
    plain, _ = bits(runner)
    seen: list[str] = []
    layer, parts = "model.layers.1.self_attn", ("q_norm", "v_proj", "o_proj")
    for name in parts:
        module = model.get_submodule(f"{layer}.{name}")
        module.register_forward_hook(lambda *_, name=name: seen.append(name))

    hooked, _ = bits(runner)

    assert sorted(seen) == sorted(parts)
    assert torch.equal(hooked.logits, plain.logits)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain layers of one input are multiplied as one, as on CUDA."""
    monkeypatch.setattr("arbor.model.fuse.joins_dense", lambda x: True)
    monkeypatch.setattr("arbor.model.fuse_attention.joins_dense", lambda x: True)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "olmo2"])
def test_plain_projections_are_one_product_where_that_gives_the_same(
    name: str, dtype: torch.dtype
) -> None:
    model = build(name).to(dtype)
    runner = ModelRunner(model, TorchCascade())
    before, _ = bits(runner)
    held, ops = weight_bytes(model), TorchFusedOps()

    gated, fused = fuse(model, ops).gated, fuse_attention(model, TorchRotary())[0]

    assert len(gated) == len(fused) == runner.layer_count
    for each in (*gated, *fused):
        module: Any = model.get_submodule(each)
        joint = module._arbor_form.joint if each in fused else module._arbor_joint
        assert isinstance(joint, DenseJoint)
    assert weight_bytes(model) == held
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    assert relative_error(bits(runner)[0].logits, before.logits) < tolerance
    seen: list[str] = []
    hooked = model.get_submodule(f"{fused[1]}.k_proj")
    handle = hooked.register_forward_hook(lambda *_: seen.append("k_proj"))
    assert relative_error(bits(runner)[0].logits, before.logits) < tolerance
    assert seen == ["k_proj"]
    handle.remove()

    unfuse(model)

    assert relative_error(bits(runner)[0].logits, before.logits) < tolerance


@pytest.mark.usefixtures("joined")
def test_projections_stay_apart_where_their_product_as_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = DenseJoint.__call__
    monkeypatch.setattr(DenseJoint, "__call__", lambda self, rows: 1.1 * own(self, rows))
    model = build("llama")
    runner = ModelRunner(model, TorchCascade())
    before, _ = bits(runner)

    gated, fused = fuse(model, TorchFusedOps()).gated, fuse_attention(model, TorchRotary())[0]

    assert len(gated) == len(fused) == runner.layer_count
    assert all(model.get_submodule(each)._arbor_form.joint is None for each in fused)
    assert all(model.get_submodule(each)._arbor_joint is None for each in gated)
    assert relative_error(bits(runner)[0].logits, before.logits) < 1e-5


def test_a_kernel_that_fails_leaves_every_layer_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(TorchRotary):
        def rotate(self, *args: Any) -> Any:
            if self.calls["rotate"] == 1:  # the second layer's
                raise ImportError("no compiler\nat all")
            return super().rotate(*args)

    model = build("llama")
    runner = prepared(model)
    before, stored = bits(runner)

    assert fuse_attention(model, Broken()) == ((), {})

    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said == ["attention layers are not fused: ImportError: no compiler"]
    after, stored_after = bits(runner)
    assert torch.equal(after.logits, before.logits) and same(stored_after, stored)
    assert not any(type(each).__name__ == "FusedLlamaAttention" for each in model.modules())


def test_a_model_whose_attention_is_not_arbors_stays() -> None:
    model = build("llama")

    assert fuse_attention(model, native_rotary()) == ((), {})


# Layers that look alike

Change = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def scaled_keys(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, 1.001 * k, v


def limited(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.clamp(-9, 9), k, v


def shifted_values(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v + 1e-3


def over_rows(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q - q.mean(2, keepdim=True), k, v


@pytest.mark.parametrize("change", [scaled_keys, limited, shifted_values, over_rows])
def test_a_layer_of_another_formula_stays(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer changes its heads just before it attends; the others are fused."""
    from transformers import AttentionInterface

    model = build("llama")
    runner = prepared(model)
    register_implementation()
    own = AttentionInterface._global_mapping["arbor_paged"]

    def changed(layer: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if layer.layer_idx == 1:
            q, k, v = change(layer, q, k, v)
        return own(layer, q, k, v, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "arbor_paged", changed)
    before, stored = bits(runner)

    fused, kept = fuse_attention(model, native_rotary())
    after, stored_after = bits(runner)

    assert len(fused) == 2 and list(kept) == ["model.layers.1.self_attn"]
    assert "differ" in kept["model.layers.1.self_attn"]
    assert torch.equal(after.logits, before.logits) and same(stored_after, stored)


def test_a_layer_whose_result_is_changed_stays() -> None:
    model = build("llama")
    ModelRunner(model, TorchCascade())
    layer = model.model.layers[2].self_attn

    class Doubled(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    layer.__class__ = Doubled

    fused, kept = fuse_attention(model, native_rotary())

    assert len(fused) == 2 and list(kept) == ["model.layers.2.self_attn"]
