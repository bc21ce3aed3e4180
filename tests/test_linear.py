"""Packed linears equal `F.linear`, keep no second copy, and can ignore the rest of the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support.models import build
from torch import Tensor, nn

from arbor.kernels.linear import layers as linear
from arbor.kernels.linear.layers import (
    PackedLinear,
    Packing,
    batch_dependent,
    dense_joint,
    joint_linear,
    pack_linears,
    weight_bytes,
)
from arbor.kernels.native import native_library, without_native

PACKINGS: tuple[Packing, ...] = ("native", "mkl", "onednn", "dense")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def fresh_probes() -> Iterator[None]:
    """Probes are remembered for the process; tests that break an op must not leave that behind."""
    probe = linear._works
    probe.cache_clear()
    yield
    probe.cache_clear()


def packed(layer: nn.Linear, kind: Packing, deterministic: bool = False) -> PackedLinear:
    if not linear._works(kind, layer.weight.dtype):
        pytest.skip(f"torch has no {kind} packing for {layer.weight.dtype} here")
    return PackedLinear(layer, kind, deterministic)


def tiny_llama(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_layer_equals_f_linear(
    kind: Packing, dtype: torch.dtype, bias: bool, deterministic: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(72, 40, bias=bias).to(dtype)
    replacement = packed(layer, kind, deterministic)
    for size in [(1, 72), (3, 5, 72), (1, 33, 72), (0, 72), (2, 0, 72), (72,)]:
        x = torch.randn(size).to(dtype)
        with torch.no_grad():
            expected = layer(x)
            actual = replacement(x)
        assert actual.shape == expected.shape and actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    sliced = torch.randn(8, 144).to(dtype)[:, ::2]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(replacement(sliced), layer(sliced), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(64, 48), (100, 77)])
def test_deterministic_rows_do_not_depend_on_the_batch(
    kind: Packing, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = packed(nn.Linear(*size).to(dtype), kind, deterministic=True)
    x = torch.randn(64, size[0]).to(dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (1, 2, 7, 20, 64):
        for first in range(0, 65 - rows, 5):
            assert torch.equal(layer(x[first : first + rows]), alone[first : first + rows]), rows
    order = torch.randperm(64)
    assert torch.equal(layer(x[order]), alone[order])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PACKINGS)
def test_a_packed_model_gives_the_same_logits(tied: bool, kind: Packing) -> None:
    model = tiny_llama(tied)
    tokens = torch.arange(24).view(2, 12)
    expected = model(tokens).logits
    report = pack_linears(model, choose=kind, deterministic=True)
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 15 and not any(type(m) is nn.Linear for m in model.modules())
    assert sum(map(len, report.packed.values())) + len(report.dense) == 15
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PACKINGS)
def test_a_packed_models_weights_are_counted(tied: bool, kind: Packing) -> None:
    model = tiny_llama(tied)
    before = weight_bytes(model)

    report = pack_linears(model, choose=kind, deterministic=True)

    assert before == sum(each.nbytes for each in tiny_llama(tied).parameters())
    assert weight_bytes(model) == before + report.extra_bytes


def test_dense_weights_are_dropped_and_a_tied_head_is_the_only_second_copy() -> None:
    if not linear._works("onednn", torch.float32):
        pytest.skip("torch has no oneDNN packing here")
    untied, tied = tiny_llama(False), tiny_llama(True)
    assert pack_linears(untied, choose="onednn").extra_bytes == 0
    report = pack_linears(tied, choose="onednn")
    assert report.extra_bytes == 320 * 64 * 4
    assert "lm_head" in report.packed["onednn"] and report.dense == ()
    for model in (untied, tied):
        for layer in model.modules():
            if isinstance(layer, PackedLinear):
                assert layer.weight.untyped_storage().nbytes() == 4
        assert not any("proj" in name for name in model.state_dict())
    assert torch.isfinite(tied.get_input_embeddings().weight).all()
    assert isinstance(tiny_left_alone().get_submodule("lm_head"), nn.Linear)


def tiny_left_alone() -> nn.Module:
    model = tiny_llama(True)
    report = pack_linears(model, choose="onednn", tied=False)
    assert report.dense == ("lm_head",) and report.extra_bytes == 0
    return model


def test_a_packed_weight_shows_shape_and_dtype_but_no_numbers() -> None:
    layer = packed(nn.Linear(8, 4, dtype=torch.float32), "mkl")
    assert layer.weight.shape == (4, 8) and layer.weight.dtype == torch.float32
    assert layer.weight.device.type == "cpu" and layer.weight.isnan().all()
    assert "in_features=8" in repr(layer) and layer.state_dict() == {}


def test_subclasses_of_linear_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4), nn.Sequential(nn.Linear(4, 4)))
    report = pack_linears(model, deterministic=True)
    assert isinstance(model[0], Special)
    assert [*sum(report.packed.values(), ()), *report.dense] == ["1.0"]


def test_an_op_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear._apply

    def wrong(rows: Tensor, *rest: object) -> Tensor:
        return right(rows, *rest) + (rows.shape[0] == 7)  # type: ignore[arg-type]

    monkeypatch.setattr(linear, "_apply", wrong)
    assert not linear._works("mkl", torch.float32) and not linear._works("onednn", torch.float32)
    assert linear.packing(torch.zeros(1024, 1024), torch.float32) == "dense"


def test_an_op_that_is_gone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Tensor:
        raise AttributeError("no such op")

    monkeypatch.setattr(linear, "_pack", gone)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model, choose="mkl").dense == ("0",)
    assert type(model[0]) is nn.Linear


@pytest.fixture
def no_native() -> Iterator[None]:
    """A machine without the native kernels."""
    with without_native():
        yield


def test_native_kernels_take_every_layer_of_their_dtypes() -> None:
    if native_library() is None:
        pytest.skip("the library is not built")
    for dtype in (torch.float32, torch.bfloat16):
        assert linear.packing(torch.zeros(3, 5, dtype=dtype), dtype) == "native"
    assert linear.packing(torch.zeros(3, 5, dtype=torch.float16), torch.float16) != "native"


@pytest.mark.usefixtures("no_native")
def test_the_rule_follows_vendor_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_works", lambda kind, dtype: True)
    monkeypatch.setattr(linear, "_bfloat16_instructions", lambda: False)
    small, large = torch.zeros(64, 64), torch.zeros(1024, 1024)
    single, half = torch.float32, torch.bfloat16
    monkeypatch.setattr(linear, "_vendor", lambda: "GenuineIntel")
    assert linear.packing(small, single) == linear.packing(large, single) == "mkl"
    assert linear.packing(large, half) == "dense"
    monkeypatch.setattr(linear, "_vendor", lambda: "AuthenticAMD")
    assert (linear.packing(small, single), linear.packing(large, single)) == ("dense", "onednn")
    monkeypatch.setattr(linear, "_bfloat16_instructions", lambda: True)
    assert linear.packing(large, half) == "onednn"
    assert linear.packing(large, torch.float64) == "dense"


@pytest.mark.usefixtures("no_native")
def test_bfloat16_without_instructions_is_advised_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_bfloat16_instructions", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4).bfloat16())
    assert "float32" in pack_linears(model, upcast=False).note
    assert pack_linears(nn.Sequential(nn.Linear(4, 4))).note == ""


@pytest.mark.usefixtures("no_native")
def test_bfloat16_is_packed_as_float32_where_the_cpu_cannot_multiply_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_bfloat16_instructions", lambda: False)
    monkeypatch.setattr(linear, "_vendor", lambda: "AuthenticAMD")  # oneDNN packs on every CPU
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024).bfloat16()
    x = torch.randn(5, 1024, dtype=torch.bfloat16)
    right = x.double() @ layer.weight.double().T + layer.bias.double()
    model = nn.Sequential(layer)

    report = pack_linears(model, upcast=True)

    assert report.upcast == 1 and report.note == ""
    assert report.extra_bytes == 2 * 1024 * 1024
    out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), right.detach(), atol=0, rtol=2**-8)


@pytest.mark.usefixtures("no_native")
def test_upcasting_waits_for_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_bfloat16_instructions", lambda: False)
    monkeypatch.setattr(linear, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(linear, "_memory_bytes", lambda: 4 * 1024 * 1024)

    report = pack_linears(nn.Sequential(nn.Linear(1024, 1024, bias=False).bfloat16()))

    assert report.upcast == 0


def test_layers_that_were_packed_before_become_deterministic() -> None:
    model = tiny_llama(False)
    pack_linears(model, choose="onednn", tied=False)

    pack_linears(model, deterministic=True)
    pack_linears(model)

    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 15 and all(layer.deterministic for layer in layers)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama", []),
        ("gemma3n_text", []),
        ("gpt2", []),
        ("opt", []),
        ("mixtral", ["MixtralTopKRouter", "MixtralExperts"]),
        ("phimoe", ["PhimoeTopKRouter", "PhimoeExperts"]),
        ("deepseek_v3", ["DeepseekV3Experts", "DeepseekV3TopkRouter"]),
    ],
)
def test_what_depends_on_the_batch_is_named(name: str, classes: list[str]) -> None:
    model = build(name)

    found = batch_dependent(model)

    assert sorted(set(found.values())) == sorted(classes)
    assert all(type(model.get_submodule(each)).__name__ == found[each] for each in found)


def test_the_linear_layers_of_gpt2_compute_the_same_and_row_by_row() -> None:
    model = build("gpt2")
    tokens = torch.arange(24).view(2, 12)
    expected = model(tokens).logits

    pack_linears(model, deterministic=True)

    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 3 * 4 + 1 and batch_dependent(model) == {}
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)


# Layers of one input

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")


def native_layers(
    dtype: torch.dtype, bias: bool, outputs: tuple[int, ...] = (48, 16, 80)
) -> list[PackedLinear]:
    torch.manual_seed(0)
    layers = [nn.Linear(72, size, bias=bias).to(dtype) for size in outputs]
    return [PackedLinear(each, "native") for each in layers]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_joint_product_has_the_bits_of_its_layers_and_holds_their_weights_once(
    dtype: torch.dtype, bias: bool
) -> None:
    layers, model = native_layers(dtype, bias), nn.ModuleList()
    model.extend(layers)
    held, states = weight_bytes(model), list(model.state_dict())
    xs = [torch.randn(rows, 72).to(dtype) for rows in (1, 7, 33)]
    alone = [[layer(x) for layer in layers] for x in xs]

    joint = joint_linear(layers)

    assert joint is not None and joint.out_features == 48 + 16 + 80
    for x, expected in zip(xs, alone, strict=True):
        assert torch.equal(joint(x), torch.cat(expected, dim=1))
        assert all(map(torch.equal, [layer(x) for layer in layers], expected))
    storages = {layer._packed.untyped_storage().data_ptr() for layer in layers}  # type: ignore[union-attr]
    assert storages == {joint._packed.untyped_storage().data_ptr()}
    assert joint._packed.nbytes == joint._packed.untyped_storage().nbytes()
    assert weight_bytes(model) == held and list(model.state_dict()) == states


@needs_native
def test_layers_are_joined_once_and_copied_as_one() -> None:
    layers, x = native_layers(torch.float32, True), torch.randn(5, 72)
    joint = joint_linear(layers)
    again = joint_linear(layers)
    assert joint is not None and again is not None
    assert again._packed.data_ptr() == joint._packed.data_ptr()
    assert torch.equal(again(x), joint(x))
    other = joint_linear((layers[1], layers[0]))  # in another order: a copy
    assert other is not None and other._packed.data_ptr() != joint._packed.data_ptr()
    assert torch.equal(other(x), torch.cat((layers[1](x), layers[0](x)), dim=1))

    twins, twin = copy.deepcopy((layers, again))

    assert torch.equal(twin(x), again(x))
    assert twins[2]._packed is not None and layers[2]._packed is not None
    assert (
        twins[2]._packed.untyped_storage().data_ptr() == twin._packed.untyped_storage().data_ptr()
    )


@needs_native
def test_hooks_of_joined_layers_are_seen() -> None:
    layers = native_layers(torch.float32, False)
    joint = joint_linear(layers)
    assert joint is not None and not joint.hooked

    handle = layers[1].register_forward_hook(lambda *_: None)

    assert joint.hooked
    handle.remove()
    assert not joint.hooked
    layers[2].register_forward_pre_hook(lambda *_: None)
    assert joint.hooked


@needs_native
def test_layers_that_differ_are_not_joined() -> None:
    float32 = native_layers(torch.float32, False)
    bfloat16 = native_layers(torch.bfloat16, False)
    biased = native_layers(torch.float32, True)
    ragged = native_layers(torch.float32, False, (48, 24))
    other = PackedLinear(nn.Linear(64, 48, bias=False), "native")
    dense = PackedLinear(nn.Linear(72, 48, bias=False), "dense")
    plain = nn.Linear(72, 48, bias=False)

    for pair in (
        (float32[0], bfloat16[1]),
        (float32[0], biased[1]),
        ragged,
        (float32[0], other),
        (float32[0], dense),
        (float32[0], plain),
    ):
        assert joint_linear(pair) is None


def test_plain_layers_as_one_product_give_the_same_and_share_its_weight() -> None:
    layers = [nn.Linear(24, size) for size in (48, 10, 7)]
    x = torch.randn(5, 24)
    expected, held = [layer(x) for layer in layers], weight_bytes(nn.ModuleList(layers))

    joint = dense_joint(layers)

    assert joint is not None and joint.out_features == 65 and not joint.hooked
    torch.testing.assert_close(joint(x), torch.cat(expected, 1), rtol=1e-5, atol=1e-6)
    storages = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert storages == {joint._weight.untyped_storage().data_ptr()}
    assert weight_bytes(nn.ModuleList(layers)) == held
    for layer, one in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(x), one, rtol=1e-5, atol=1e-6)
    handle = layers[1].register_forward_hook(lambda *_: None)
    assert joint.hooked
    handle.remove()
    assert not joint.hooked
    assert copy.deepcopy(joint).hooked, "its layers have weights of their own"
    layers[2].weight.data = layers[2].weight.data.clone()
    assert joint.hooked


def test_layers_that_are_not_alike_or_not_torchs_stay_apart() -> None:
    plain, tied = nn.Linear(8, 4), nn.Linear(8, 4)
    tied.weight = plain.weight

    class Own(nn.Linear):
        pass

    for other in (
        *(nn.Linear(9, 4), nn.Linear(8, 4, bias=False), nn.Linear(8, 4).half(), Own(8, 4)),
        *(nn.Linear(8, 4, device="meta"), tied),
    ):
        assert dense_joint((plain, other)) is None
