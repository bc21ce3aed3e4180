"""Weights in 8 bits: a bounded error, and products of exactly the rounded weight."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.slow_cases import drawn, every
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from arbor import Solver
from arbor.errors import ModelError
from arbor.events import Header
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.linear.int8_weights import GROUP, MOST_CODE, decode, encode
from arbor.kernels.linear.layers import (
    PackedLinear,
    joint_linear,
    native_product,
    pack_linears,
    weight_bytes,
)
from arbor.kernels.native import INT8, native_library
from arbor.model.runner import ModelRunner
from arbor.model.weights import arbor_logits
from arbor.trace.read import read_trace

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")
DTYPES = (torch.float32, torch.bfloat16)
SAPLING = Path(__file__).parents[1] / "arbor" / "sapling"
# An architecture of each kind: plain; biases; tied; norms of heads; sandwich norms and windows;
# joint projections; weights that lie as [in, out]; experts.
SOME = ["llama", "qwen2", "gemma2", "qwen3", "phi3", "gpt2", "mixtral"]


def rounded(weight: Tensor) -> Tensor:
    """The weight that is multiplied by, float32."""
    return decode(*encode(weight), weight.shape[1])


# The codes


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 200),
    st.sampled_from(DTYPES),
    st.floats(-30, 30),
    st.integers(),
)
def test_a_weight_changes_by_at_most_half_a_scale(
    outputs: int, inputs: int, dtype: torch.dtype, exponent: float, seed: int
) -> None:
    torch.manual_seed(seed % 2**31)
    weight = (torch.randn(outputs, inputs) * 2.0**exponent).to(dtype)

    codes, scales = encode(weight)
    error = (rounded(weight) - weight.float()).abs()

    assert codes.shape == (outputs, -(-inputs // GROUP), GROUP)
    assert int(codes.abs().amax()) == MOST_CODE
    bound = scales.repeat_interleave(GROUP, -1)[:, :inputs] * (0.5 + 1e-4)
    assert bool((error <= bound).all())


# The products


def as_native(layer: nn.Linear) -> PackedLinear:
    """A packed layer in float32 of the rounded weight."""
    exact = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    with torch.no_grad():
        exact.weight.copy_(rounded(layer.weight))
        if layer.bias is not None:
            exact.bias.copy_(layer.bias)
    return PackedLinear(exact, "native")


@needs_native
@pytest.mark.parametrize(
    ("dtype", "bias", "size"),
    drawn(
        DTYPES,
        [True, False],
        [(768, 200), (64, 16), (100, 77), (33, 1), (1, 16), (130, 1000)],
        count=8,
    ),
)
def test_products_have_the_bits_of_the_rounded_weight_in_float32(
    size: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    """For any number of rows, so a row's bits do not depend on the others either."""
    torch.manual_seed(0)
    layer = nn.Linear(*size, bias=bias).to(dtype)
    coded, exact, x = PackedLinear(layer, "int8"), as_native(layer), torch.randn(531, size[0])
    x = x.to(dtype)
    wanted = exact(x.float()).to(dtype)

    for count in (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 33, 513, 530):
        assert torch.equal(coded(x[1 : count + 1]), wanted[1 : count + 1]), count
    assert torch.equal(coded(x.T.contiguous().T[:9]), wanted[:9]), "rows that lie apart"


@needs_native
def test_layers_in_8_bits_join_and_only_with_their_like() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(96, 32), nn.Linear(96, 16), nn.Linear(96, 48)]
    layers, x = [PackedLinear(each, "int8") for each in linears], torch.randn(5, 96)
    apart = torch.cat([each(x) for each in layers], -1)

    assert joint_linear([layers[0], PackedLinear(linears[1], "native")]) is None
    joint = joint_linear(layers)

    assert joint is not None and torch.equal(joint(x), apart)
    assert torch.equal(layers[1](x), apart[:, 32:48]), "a part computes as before"
    product = native_product(joint)
    assert product is not None and (product.number, product.packed_number) == (0, INT8)


# Whole models


def runner_of(model: nn.Module) -> ModelRunner:
    return ModelRunner(model, NativeCascade(), deterministic=True)


def with_rounded_weights(model: nn.Module) -> nn.Module:
    """A copy whose linear layers have the rounded weights, in full precision, tied to nothing."""
    copied = copy.deepcopy(model)
    for each in copied.modules():
        if type(each) is nn.Linear:
            each.weight = nn.Parameter(rounded(each.weight.detach()), requires_grad=False)
        elif type(each).__name__ == "Conv1D":
            weight = rounded(each.weight.detach().T).T.contiguous()
            each.weight = nn.Parameter(weight, requires_grad=False)
    return copied


@needs_native
@pytest.mark.parametrize("name", every(2, SOME))
def test_a_model_computes_with_the_rounded_weights(name: str) -> None:
    model = build(name)
    exact = with_rounded_weights(model)
    pack_linears(exact, deterministic=True)
    before = weight_bytes(model)

    report = pack_linears(model, deterministic=True, choose="int8")

    assert report.packed.keys() == {"int8"} and weight_bytes(model) < before
    found, wanted = arbor_logits(runner_of(model)), arbor_logits(runner_of(exact))
    assert torch.equal(found, wanted)


# Solver and command line


@needs_native
def test_a_solver_reports_the_rounding_and_keeps_its_answers_at_any_budget(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with Solver(weights="int8") as solver:
        assert solver.rounding is None, "nothing is loaded yet"
        full = solver.solve("4 5 6 10", trace=trace)
        quarter = solver.solve("4 5 6 10", budget=0.25)
        rounding, config = solver.rounding, solver.config
        layers = [
            each for each in solver.engine.runner.model.modules() if isinstance(each, PackedLinear)
        ]

    assert rounding is not None and rounding.layers == len(layers) == 43
    assert {each.packing for each in layers} == {"int8"}
    assert rounding.bytes_after < 0.3 * rounding.bytes_before
    assert rounding.logit_error is not None and 0.001 < rounding.logit_error < 0.05
    assert [c.node for c in full.candidates] == [c.node for c in quarter.candidates]
    assert [c.value for c in full.candidates] == [c.value for c in quarter.candidates]
    assert config["weights"] == "int8"
    header = read_trace(trace).events[0]
    assert isinstance(header, Header)
    assert header.config["weights"] == header.model["weights"] == "int8"
    with Solver() as plain:
        assert "weights" not in plain.config
        plain.load()
        assert plain.rounding is None


@needs_native
def test_a_checkpoint_with_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SAPLING, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 7] = torch.inf
    model.save_pretrained(folder)

    with pytest.raises(ModelError) as error:
        Solver(folder, weights="int8").load()

    assert error.value.code in ("weights-not-finite", "logits-not-finite")
