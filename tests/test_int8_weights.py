"""Weights in 8 bits: a bounded error, and products of exactly the rounded weight."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.run_cli import in_process
from support.slow_cases import every
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from arbor import Solver
from arbor.errors import ModelError, UsageError
from arbor.events import Header
from arbor.kernels.int8_weights import GROUP, MOST_CODE, decode, encode, int8_bytes
from arbor.kernels.linear import (
    PackedLinear,
    joint_linear,
    native_product,
    pack_linears,
    weight_bytes,
)
from arbor.kernels.native import INT8, native_library, without_native
from arbor.kernels.native_cascade import NativeCascade
from arbor.model.agreement import arbor_logits, logit_error
from arbor.model.runner import ModelRunner
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


def test_zeros_stay_zeros_and_what_is_not_finite_is_refused() -> None:
    weight = torch.zeros(2, 100)
    weight[1, 3] = -5.0

    assert torch.equal(rounded(weight), weight)
    for bad in (torch.nan, torch.inf):
        weight[0, 99] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            encode(weight)


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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(768, 200), (64, 16), (100, 77), (33, 1), (1, 16), (130, 1000)])
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
def test_products_do_not_depend_on_the_number_of_threads() -> None:
    layer, x = PackedLinear(nn.Linear(512, 4096), "int8"), torch.randn(40, 512)
    alone = layer(x)
    torch.set_num_threads(3)
    try:
        assert all(torch.equal(layer(x), alone) for _ in range(5))
    finally:
        torch.set_num_threads(1)


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


@needs_native
def test_bytes_are_those_of_codes_and_scales() -> None:
    model = nn.Sequential(nn.Linear(130, 50), nn.Linear(50, 3, bias=False))

    pack_linears(model, choose="int8")

    assert int8_bytes(130, 50) == 50 * (130 + 3 * 4)
    assert weight_bytes(model) == int8_bytes(130, 50) + 4 * 50 + int8_bytes(50, 3)


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
def test_the_reported_error_is_that_of_the_logits() -> None:
    with Solver(SAPLING) as plain, Solver(SAPLING, weights="int8") as coded:
        own = arbor_logits(plain.engine.runner)
        error = logit_error(coded.engine.runner, own)
        rounding = coded.rounding

    assert rounding is not None and rounding.logit_error == pytest.approx(error, rel=1e-3)


@needs_native
def test_a_ready_model_is_not_rounded_twice_nor_taken_for_what_it_was() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SAPLING)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "device": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(SAPLING)
    Solver(model, weights="int8", **settings).load()
    Solver(model, weights="int8", **settings).load()

    with pytest.raises(UsageError, match="Load it again") as error:
        Solver(model, **settings).load()
    assert error.value.code == "weights"
    other = AutoModelForCausalLM.from_pretrained(SAPLING)
    Solver(other, **settings).load()
    with pytest.raises(UsageError, match="Load it again"):
        Solver(other, weights="int8", **settings).load()


@needs_native
def test_a_checkpoint_with_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SAPLING, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 7] = torch.inf
    model.save_pretrained(folder)

    with pytest.raises(ModelError) as error:
        Solver(folder, weights="int8").load()

    assert error.value.code in ("weights-not-finite", "arch-unsupported")


def test_what_cannot_be_is_refused_before_anything_is_read() -> None:
    for asked, code, hint in (
        ({"weights": "int4"}, "setting-choice", "auto, int8"),
        ({"weights": "int8", "device": "cuda"}, "weights", "--device cpu"),
    ):
        with pytest.raises(UsageError) as error:
            Solver("no/such-model", **asked)
        assert error.value.code == code and hint in error.value.hint


def test_without_the_kernels_or_in_another_dtype_the_reason_is_named() -> None:
    with without_native(), pytest.raises(UsageError, match="needs the native kernels"):
        Solver(weights="int8").load()
    if native_library() is not None:
        with pytest.raises(UsageError, match="no kernels for float16") as error:
            Solver(weights="int8", dtype="float16").load()
        assert "--dtype float32 or bfloat16" in error.value.hint


@needs_native
def test_the_command_keeps_and_prints_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)

    config = arbor("solve", "--set", "weights=int8", "--print-config")
    info = arbor("info", "--set", "weights=int8", "--json")
    solved = arbor("solve", "4 5 6 10", "--set", "weights=int8", "--trace", "off", "--verbose")

    assert 'weights = "int8"' in config.out
    assert info.document["model"]["weights"] == "int8"
    assert solved.code == 0 and "weights int8, lossy: 43 linear layers" in solved.err
