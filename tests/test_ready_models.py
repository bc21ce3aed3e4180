"""A ready model that was refused is as it was; one whose weights were packed is not saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fused_standin import TorchFusedOps, TorchRotary
from support.models import Words, build
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from arbor import Solver
from arbor.errors import ArborError, ModelError, UsageError
from arbor.kernels.linear import layers
from arbor.kernels.linear.blocks import BlockLinear
from arbor.kernels.native import native_library
from arbor.model import weights
from arbor.model.attention import IMPLEMENTATION

needs_native = pytest.mark.skipif(native_library() is None, reason="the native kernels")
IDS = torch.tensor([[5, 6, 7, 8]])
SAME: dict[str, Any] = {"tokenizer": Words(), "device": "cpu", "task": "reasoning"}


class OtherLogits(LlamaForCausalLM):
    """Its logits are twice as large where only some rows are asked for."""

    def forward(self, *given: Any, logits_to_keep: Any = 0, **settings: Any) -> Any:
        output = super().forward(*given, logits_to_keep=logits_to_keep, **settings)
        output.logits *= 1 if isinstance(logits_to_keep, int) else 2
        return output


def of_class(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind(build("llama").config)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "other logits": (lambda: of_class(OtherLogits), {}),
    "float16 in 8 bits": (lambda: build("llama").half(), {"weights": "int8"}),
    "no head": (lambda: of_class(LlamaModel), {}),
    "a score for each text": (lambda: of_class(LlamaForSequenceClassification), {}),
    "layers that depend on the batch": (lambda: build("mixtral"), {"deterministic": True}),
}


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    """What the model computes by itself."""
    modes = {each: each.training for each in model.modules()}
    found = model.eval()(input_ids=IDS, use_cache=False)[0]
    for each, mode in modes.items():
        each.training = mode
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_refused_is_as_it_was(case: str) -> None:
    made, settings = REFUSED[case]
    model = made().train()
    before, attention = outputs(model), model.config._attn_implementation
    saved = {name: each.clone() for name, each in model.state_dict().items()}

    for _ in range(2):
        with pytest.raises((ModelError, UsageError)):
            Solver(model, **SAME, **settings).load()

    assert attention == model.config._attn_implementation != IMPLEMENTATION
    assert all(each.training for each in model.modules())
    assert torch.equal(outputs(model), before)
    after = model.state_dict()
    assert after.keys() == saved.keys()
    assert all(torch.equal(after[name], each) for name, each in saved.items())


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_a_model_without_a_head_for_each_token_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(ModelError, match=f"{kind.__name__} gives no logits of each") as error:
        Solver(of_class(kind), **SAME).load()
    assert error.value.code == "arch-unsupported"


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_whose_loading_is_interrupted_computes_and_is_loaded_again(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fresh = build("llama"), build("llama")
    before, pairs = outputs(model), [([5, 6, 7], [8, 9])]

    def interrupt(*given: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_fuse" if packed else "pack_linears", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Solver(model, **SAME).load()

    assert torch.allclose(outputs(model), before, atol=1e-4)
    if packed:
        with pytest.raises(ModelError, match="model-packed"):
            model.state_dict()
    else:
        assert model.state_dict().keys() == fresh.state_dict().keys()
    with Solver(model, **SAME) as again, Solver(fresh, **SAME) as solver:
        assert again.logprobs(pairs) == solver.logprobs(pairs)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_whose_projections_were_joined_is_trained_after_it_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fresh = build(name).train(), build(name).train()

    def gradients(of: Any) -> dict[str, Tensor]:
        of.zero_grad()
        of(input_ids=IDS, labels=IDS).loss.backward()
        return {name: each.grad for name, each in of.named_parameters()}

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    wanted, joints = gradients(fresh), []
    model.lm_head.weight.requires_grad_(False)
    frozen = {name: each.requires_grad for name, each in model.named_parameters()}
    made = layers.DenseJoint.__init__
    with monkeypatch.context() as patch:  # as on a GPU: it packs no weights, and joins them
        patch.setattr(weights, "pack_linears", lambda *given, **named: None)
        patch.setattr(weights, "fused_ops", lambda device: TorchFusedOps())
        patch.setattr(weights, "rotary_ops", lambda device: TorchRotary())
        for module in ("parts", "attention"):
            patch.setattr(f"arbor.model.fuse.{module}.joins_dense", lambda x: True)
        patch.setattr(
            layers.DenseJoint,
            "__init__",
            lambda self, given: made(self, given) or joints.append(self),
        )
        patch.setattr(weights, "eos_ids", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Solver(model, **SAME).load()

    assert len(joints) == 2 * model.config.num_hidden_layers
    assert {name: each.requires_grad for name, each in model.named_parameters()} == frozen
    model.lm_head.weight.requires_grad_(True)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


@needs_native
def test_rounding_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fresh, rounded = build("llama"), build("llama"), []

    def stops(weight: Tensor) -> Any:
        rounded.append(weight)
        if len(rounded) == 4:
            raise KeyboardInterrupt
        return encode(weight)

    encode = layers.encode_q8_0
    with monkeypatch.context() as patch:
        patch.setattr(layers, "encode_q8_0", stops)
        with pytest.raises(KeyboardInterrupt):
            Solver(model, weights="int8", **SAME).load()

    with pytest.raises(ModelError, match="model-packed"):
        model.state_dict()
    with pytest.raises(ArborError, match="int8"):
        Solver(model, **SAME).load()
    pairs = [([5, 6, 7], [8, 9])]
    with (
        Solver(model, weights="int8", **SAME) as again,
        Solver(fresh, weights="int8", **SAME) as solver,
    ):
        assert again.logprobs(pairs) == solver.logprobs(pairs)
    kinds = [[type(each) for each in it.modules()].count(BlockLinear) for it in (model, fresh)]
    assert kinds[0] == kinds[1] > 3
