"""Weights in 8 bits: models that compute with the rounded weights, and what is refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from support.models import build
from support.slow_cases import every
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from arbor import Solver
from arbor.errors import ModelError
from arbor.events import Header
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.linear.blocks import RUN, BlockLinear, encode_q8_0
from arbor.kernels.linear.layers import encode_linears, pack_linears, weight_bytes
from arbor.kernels.native import native_library
from arbor.model.runner import ModelRunner
from arbor.model.weights import arbor_logits
from arbor.trace.read import read_trace

needs_native = pytest.mark.skipif(native_library() is None, reason="the library is not built")
SAPLING = Path(__file__).parents[1] / "arbor" / "sapling"
# An architecture of each kind: plain; biases; tied; norms of heads; sandwich norms and windows;
# joint projections; weights that lie as [in, out]; experts.
SOME = ["llama", "qwen2", "gemma2", "qwen3", "phi3", "gpt2", "mixtral"]


def rounded(weight: Tensor) -> Tensor:
    """The weight that is multiplied by, float32."""
    return encode_q8_0(weight).dense(torch.float32)


# Whole models


def runner_of(model: nn.Module) -> ModelRunner:
    return ModelRunner(model, NativeCascade(), deterministic=True)


def with_rounded_weights(model: nn.Module) -> nn.Module:
    """A copy whose linear layers have the rounded weights, in full precision, tied to nothing."""
    copied = copy.deepcopy(model)
    for each in copied.modules():
        if type(each) is nn.Linear and each.in_features % RUN == 0:
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

    layers = encode_linears(model)
    pack_linears(model, deterministic=True)

    assert layers and weight_bytes(model) < before
    found, wanted = arbor_logits(runner_of(model)), arbor_logits(runner_of(exact))
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


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
            each for each in solver.engine.runner.model.modules() if isinstance(each, BlockLinear)
        ]

    assert rounding is not None and rounding.layers == len(layers) == 43
    assert {weight.kind for each in layers for weight in each.weights} == {"Q8_0"}
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
