"""A model is compared with its own forward when it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import ARCHITECTURES, Words, build, config_of, random_model
from support.slow_cases import every

from arbor import Solver
from arbor.errors import ModelError
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.model import weights as agreement
from arbor.model.runner import ModelRunner
from arbor.model.weights import check_agreement, own_logits

WRONG: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
        "layer_types": ["full_attention"] * 3,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "max_position_embeddings": 4,  # more is refused without a forward
        "attn_scale": 0.5,
    },
    "roberta": {"is_decoder": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    every(
        3,
        [
            *((name, torch.float32) for name in ARCHITECTURES),
            *(
                (name, torch.bfloat16)
                for name in ("llama", "gemma2", "glm4_moe", "olmoe", "gpt_oss")
            ),
            ("olmoe", torch.float16),
        ],
    ),
)
def test_every_architecture_agrees_with_itself(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)

    own = own_logits(model)

    assert own is not None and own.shape[0] == 20
    runner = ModelRunner(model, TorchCascade())
    pack_linears(model)
    check_agreement(runner, own)
    assert own_logits(model) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_computes_something_else_is_refused_each_time(name: str) -> None:
    model = random_model(config_of(name, **WRONG[name]))
    solver = Solver(model, tokenizer=Words(), device="cpu")

    for _ in range(2):
        with pytest.raises(ModelError, match=f"'{name}' computes something that arbor") as error:
            solver.load()

    assert error.value.code == "arch-unsupported"
    assert error.value.data["error"] > agreement.TOLERANCE
