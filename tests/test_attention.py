"""Windows that a model leaves to the masks of its layers, asking its attention for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import WINDOW, config_of, copy_of, random_model
from support.trees import Lab, grown, own_answers, relative_error
from transformers import masking_utils
from transformers.models.phimoe import modeling_phimoe

from arbor.errors import ModelError
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import rotary_ops
from arbor.kernels.native import native_library
from arbor.model.attention import IMPLEMENTATION
from arbor.model.describe import describe_config
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse
from arbor.model.loading import ModelLocation
from arbor.model.runner import ModelRunner

CPU = torch.device("cpu")
HERE = ModelLocation("here", "")
TOLERANCE = 1e-4
MASKED: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "qwen2_moe": (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
        [WINDOW, None, WINDOW],
    ),
    "phimoe": ({"num_local_experts": 2, "sliding_window": WINDOW}, [WINDOW] * 3),
}


def phimoe(**settings: Any) -> Any:
    return random_model(config_of("phimoe", **MASKED["phimoe"][0] | settings))


def windows(runner: ModelRunner) -> list[int | None]:
    return [spec.shape.window for spec in runner.specs]


def error_of(model: Any) -> float:
    """How far answers over a tree, of paths longer than the window, are from the model's own."""
    own = copy_of(model)
    tree, answers = grown(Lab(model))
    assert tree.tokens > 2 * WINDOW
    return relative_error(answers, own_answers(own, tree))


@pytest.mark.parametrize("name", MASKED)
def test_windows_of_masks_are_computed(name: str) -> None:
    settings, expected = MASKED[name]
    model = random_model(config_of(name, **settings))

    assert windows(ModelRunner(copy_of(model), TorchCascade())) == expected
    assert error_of(copy_of(model)) < TOLERANCE


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
@pytest.mark.parametrize("name", MASKED)
def test_fused_layers_and_ready_models_keep_the_windows_of_masks(name: str) -> None:
    settings, expected = MASKED[name]
    model = random_model(config_of(name, **settings))
    own = copy_of(model)
    lab = Lab(model)
    ops, rotary = fused_ops(CPU), rotary_ops(CPU)
    assert ops is not None and rotary is not None
    fuse(model, ops)
    fused, _ = fuse_attention(model, rotary)

    tree, answers = grown(lab)

    assert len(fused) == 3
    assert relative_error(answers, own_answers(own, tree)) < TOLERANCE
    assert windows(ModelRunner(model, TorchCascade())) == expected
    assert model.config._attn_implementation == IMPLEMENTATION


def chunked(**arguments: Any) -> Any:
    arguments["config"].attention_chunk_size = WINDOW
    return masking_utils.create_chunked_causal_mask(**arguments)


def without_the_first(**arguments: Any) -> Any:
    return masking_utils.create_sliding_window_causal_mask(
        **arguments, and_mask_function=lambda batch, head, query, key: key > 0
    )


def broken(**arguments: Any) -> Any:
    if arguments["attention_mask"] is not None:
        raise NotImplementedError("no padding")


@pytest.mark.parametrize("mask", [chunked, without_the_first, broken])
def test_masks_of_another_kind_are_refused(
    mask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = phimoe()
    monkeypatch.setattr(modeling_phimoe, "create_sliding_window_causal_mask", mask)

    with pytest.raises(ModelError, match="in layers 0-2 attention has a mask of its own") as caught:
        ModelRunner(model, TorchCascade())

    assert caught.value.code == "arch-unsupported"
    assert model.config._attn_implementation == IMPLEMENTATION
    info = describe_config(model.config, HERE)
    assert not info.supported and "attention has a mask of its own" in info.reason
