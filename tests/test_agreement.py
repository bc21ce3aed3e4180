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
from arbor.model import agreement
from arbor.model.agreement import check_agreement, own_logits
from arbor.model.runner import ModelRunner, check_layer_types

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


def test_a_ready_model_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[ModelRunner] = []
    monkeypatch.setattr(
        "arbor.model.weights.check_agreement", lambda runner, own: compared.append(runner)
    )
    model = build("llama")
    model.generation_config.eos_token_id = 2

    for _ in range(2):
        Solver(model, tokenizer=Words(), device="cpu").load()

    assert len(compared) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [4, 8192])
def test_queries_scaled_by_position_are_refused_beyond_what_ten_tokens_can_show(scale: int) -> None:
    settings = {**WRONG["llama4_text"], "floor_scale": scale, "max_position_embeddings": 10_000}
    with pytest.raises(ModelError, match="layers 1 scale their queries by position"):
        check_layer_types(config_of("llama4_text", **settings))
    check_layer_types(config_of("llama4_text", **settings | {"max_position_embeddings": scale}))
