"""Packed linears equal `F.linear`, keep no second copy, and can ignore the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.slow_cases import drawn
from torch import nn

from arbor.kernels.linear import layers as linear
from arbor.kernels.linear.layers import (
    PackedLinear,
    Packing,
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


@pytest.mark.parametrize(
    ("kind", "dtype", "bias", "deterministic"),
    drawn(PACKINGS, [torch.float32, torch.bfloat16], [False, True], [False, True], count=12),
)
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
def test_a_bias_with_gaps_is_read_as_it_is(kind: Packing) -> None:
    layer, x = nn.Linear(32, 16), torch.randn(3, 32)
    layer.bias = nn.Parameter(torch.arange(32, dtype=torch.float32)[::2])

    torch.testing.assert_close(packed(layer, kind)(x), layer(x))


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    drawn(PACKINGS, [torch.float32, torch.bfloat16, torch.float64], [(64, 48), (100, 77)], count=8),
)
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
    pack_linears(model, choose=kind, deterministic=True)
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 15 and not any(type(m) is nn.Linear for m in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)


needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_packed_weight_does_not_take_are_refused(dtype: torch.dtype) -> None:
    layer, x = packed(nn.Linear(64, 48).to(dtype), "native"), torch.ones(3, 64, dtype=dtype)
    for other in {torch.float32, torch.bfloat16, torch.float16, torch.int64} - {dtype}:
        with pytest.raises(RuntimeError, match=f"rows of {other}: the weight was packed as"):
            layer(x.to(other))
    with pytest.raises(RuntimeError, match="rows of 64 numbers on meta: the weight takes 64 on"):
        layer(x.to("meta"))
    pair = joint_linear([layer, packed(nn.Linear(64, 16).to(dtype), "native")])
    assert pair is not None
    with pytest.raises(RuntimeError, match="rows of 32 numbers on cpu: the weight takes 64 on"):
        pair(x[:, :32])


@needs_native
def test_a_packed_model_refuses_autocast_where_its_rows_change_dtype() -> None:
    model, ids = tiny_llama(tied=False), torch.arange(10)[None]
    pack_linears(model, choose="native")

    refused = pytest.raises(RuntimeError, match=r"outside torch\.autocast")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), refused:
        model(ids)


@needs_native
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_outputs_and_no_threads_are_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert packed(nn.Linear(8, 0), "native")(torch.ones(2, 8)).shape == (2, 0)

    layer, x = packed(nn.Linear(64, 48), "native"), torch.randn(3, 64)
    wanted = layer(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    assert torch.equal(layer(x), wanted)


@pytest.fixture
def no_native() -> Iterator[None]:
    """A machine without the native kernels."""
    with without_native():
        yield


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

    pack_linears(model)

    assert model[0].compute == torch.float32
    out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), right.detach(), atol=0, rtol=2**-8)


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
