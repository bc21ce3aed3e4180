"""Fused attention layers: which are, which stay, and that no bit of a forward changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fused_standin import TorchFusedOps, TorchRotary
from support.models import ARCHITECTURES, build
from support.slow_cases import every
from support.trees import relative_error
from test_layers import batch
from torch import Tensor, nn

from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import RotaryOps, rotary_ops
from arbor.kernels.linear.layers import DenseJoint, pack_linears, weight_bytes
from arbor.kernels.native import native_library
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse, unfuse
from arbor.model.runner import ForwardResult, ModelRunner

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library is not built")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
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


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain layers of one input are multiplied as one, as on CUDA."""
    monkeypatch.setattr("arbor.model.fuse.parts.joins_dense", lambda x: True)
    monkeypatch.setattr("arbor.model.fuse.attention.joins_dense", lambda x: True)


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
    with torch.no_grad():  # as training does
        for each in hooked.parameters():
            each.mul_(3)
    trained = bits(runner)[0].logits

    unfuse(model)

    assert relative_error(bits(runner)[0].logits, trained) < tolerance
    with torch.no_grad():
        for each in hooked.parameters():
            each.div_(3)

    assert relative_error(bits(runner)[0].logits, before.logits) < tolerance


# Layers that look alike
