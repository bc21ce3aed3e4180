"""Every architecture, against Hugging Face's own forward of each whole path."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from support.models import (
    ARCHITECTURES,
    WINDOW,
    build,
    config_of,
    copy_of,
    random_model,
)
from support.slow_cases import every
from support.trees import Lab, grown, is_greedy, leaves_of, own_answers, own_logits, relative_error
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from arbor.errors import ModelError
from arbor.events import Rehydrated
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.native import native_library
from arbor.model.runner import ModelRunner, check_layer_types
from arbor.tree import ThoughtTree

TOLERANCE = 1e-4
SQUEEZED = 31  # slots: the longest path with its question has 30 tokens, the tree 57
# run by default; the others differ from one of these in what arbor never sees
DEFAULT = (
    *("llama", "llama_gqa4", "llama_gqa7", "qwen2", "qwen2_sliding", "qwen3", "mistral"),
    *("mistral_window", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "phi", "phi3"),
    *("granite", "olmo2", "olmo3", "smollm3", "cohere2", "starcoder2", "mixtral", "qwen3_moe"),
    *("gpt_oss", "gpt_neox", "gpt2", "opt", "glm4", "seed_oss", "deepseek_v3", "stablelm"),
    *("nemotron", "exaone4", "ministral3"),
)
EVERY = [
    *(
        pytest.param(name, TorchCascade, id=name, marks=() if name in DEFAULT else pytest.mark.slow)
        for name in ARCHITECTURES
    ),
    *(
        pytest.param(
            name,
            RowwiseAttention,
            id=f"{name}-rowwise",
            marks=() if name in ("gemma2", "gpt_oss") else pytest.mark.slow,
        )
        for name in ARCHITECTURES
    ),
]


# with heads as wide as the native kernels need; windows, soft caps and sinks among them
WIDE = ("llama", "llama_gqa7", "qwen3", "mistral_window", "gemma2", "gemma3_text", "gpt_oss")
EVERY += [
    pytest.param(
        name,
        NativeCascade,
        id=f"{name}-native",
        marks=pytest.mark.skipif(native_library() is None, reason="the library is not built"),
    )
    for name in WIDE
]


@functools.cache
def wide(name: str) -> Any:
    """A model of an architecture with heads of 16."""
    model_type, given = ARCHITECTURES[name]
    return random_model(config_of(model_type, **{**given, "head_dim": 16}))


def model_for(name: str, backend: type[AttentionBackend]) -> Any:
    """A new model that the backend itself computes, always with the same weights."""
    return copy_of(wide(name)) if backend is NativeCascade else build(name)


@functools.cache
def full(name: str, backend: type[AttentionBackend]) -> tuple[ThoughtTree, Tensor, Tensor]:
    """The tree at full retention, its leaves' answers, and the logits at every block's end."""
    lab = Lab(model_for(name, backend), backend())
    tree, answers = grown(lab)
    nodes = list(tree)[1:]
    ends = lab.ask([node.parent or tree.root for node in nodes], [node.tokens for node in nodes])
    return tree, answers, ends


@pytest.mark.parametrize(("name", "backend"), every(2, EVERY))
def test_every_block_has_the_logits_of_the_models_own_forward(
    name: str, backend: type[AttentionBackend]
) -> None:
    tree, answers, ends = full(name, backend)

    own = model_for(name, backend)
    logits = own_logits(own, tree)

    assert 1 < max(float(logits[leaf.id].abs().max()) for leaf in leaves_of(tree)) < 12
    assert relative_error(answers, own_answers(own, tree)) < TOLERANCE
    assert relative_error(ends, torch.stack([logits[n.id][-1] for n in list(tree)[1:]])) < TOLERANCE
    for node in list(tree)[1:]:
        chosen = logits[node.id][:-1].log_softmax(-1)
        of_tokens = chosen.gather(1, torch.tensor(node.tokens).unsqueeze(1))
        assert node.logprob == pytest.approx(float(of_tokens.sum()), abs=1e-4)
        assert node.top1 == pytest.approx(float(chosen.amax(-1).exp().mean()), abs=1e-5)
        last = logits[node.id][-1].log_softmax(-1)
        entropy = -float((last.exp() * last).sum())
        assert node.confidence == pytest.approx(1 - entropy / math.log(len(last)), abs=1e-5)
        if is_greedy(node):
            assert node.tokens == chosen.argmax(-1).tolist()


@pytest.mark.parametrize(("name", "backend"), every(6, EVERY))
def test_a_small_budget_changes_no_token(name: str, backend: type[AttentionBackend]) -> None:
    want, want_answers, _ = full(name, backend)
    lab = Lab(model_for(name, backend), backend(), debug=True)  # freed slots hold NaN

    tree, answers = grown(lab, SQUEEZED)

    assert [node.tokens for node in tree] == [node.tokens for node in want]
    assert relative_error(answers, want_answers) < TOLERANCE
    assert lab.memory.peak <= SQUEEZED
    assert sum(isinstance(event, Rehydrated) for event in lab.events) > 3


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_other_models_of_the_same_config_stay_as_they_were(name: str) -> None:
    model_type, given = ARCHITECTURES[name]
    config = config_of(model_type, **given)
    ids = torch.tensor([[5, 6, 7]])
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert first.config is second.config
    with torch.inference_mode():
        right = second(ids).logits
        Lab(first)

        assert torch.equal(second(ids).logits, right)
        AutoModelForCausalLM.from_config(config).eval()(ids)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {"state_size": 4}, "layers 0-2 layer_types is linear_attention"),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        "layers 0, 2 layer_types is conv",
    ),
    "llama4_text": (
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "chunked_attention",
    ),
    "qwen3_next": ("qwen3_next", {"num_experts": 2}, "layers 0-2 layer_types is linear_attention"),
    "minimax": (
        "minimax",
        {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
        "layers 0, 2 layer_types is linear_attention",
    ),
    "bidirectional": ("llama", {"is_causal": False}, "layers 0-2 attention is not causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layer_types_are_refused_by_name_before_there_are_weights(name: str) -> None:
    model_type, settings, words = REFUSED[name]

    with pytest.raises(ModelError) as caught:
        check_layer_types(config_of(model_type, **settings))

    assert caught.value.code == "arch-unsupported"
    assert f"model_type '{model_type}'" in caught.value.message
    assert words in caught.value.message
    assert caught.value.data["layers"]


class Twice(nn.Module):
    """A layer that runs twice, as those of looped transformers do (`dory`)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *args: Any, **settings: Any) -> Any:
        """What the layer makes of what it made."""
        return self.layer(self.layer(hidden, *args, **settings), *args, **settings)


def test_a_layer_that_runs_twice_is_refused_by_its_number() -> None:
    model = build("llama")
    model.model.layers[1] = Twice(model.model.layers[1])

    with pytest.raises(
        ModelError, match="in layer 1 attention is computed several times"
    ) as caught:
        ModelRunner(model, TorchCascade())

    assert (caught.value.code, caught.value.data["layers"]) == ("arch-unsupported", [1])


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("gemma2", 0, {"window": WINDOW, "softcap": 3.0, "scaling": 12**-0.5}),
        ("gemma2", 1, {"window": None, "softcap": 3.0}),
        ("gemma3_text", 1, {"window": None, "softcap": None}),
        ("mistral_window", 2, {"window": WINDOW}),
        ("granite", 0, {"scaling": 0.2}),
        ("deepseek_v3", 0, {"head_dim_qk": 12, "head_dim_vo": 6, "num_kv_heads": 4}),
        ("llama_gqa7", 0, {"num_qo_heads": 7, "num_kv_heads": 1, "group": 7}),
        ("opt", 0, {"scaling": 1.0}),
    ],
)
def test_what_a_layer_asks_is_probed(name: str, layer: int, shape: dict[str, Any]) -> None:
    runner = ModelRunner(build(name), TorchCascade())

    assert {key: getattr(runner.specs[layer].shape, key) for key in shape} == pytest.approx(shape)
    assert not runner.specs[layer].sinks
    assert runner.layer_kv[layer].head_dim_vo == runner.specs[layer].shape.head_dim_vo
