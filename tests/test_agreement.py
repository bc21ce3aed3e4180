"""A model is compared with its own forward when it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import ARCHITECTURES, Words, build, config_of, random_model
from support.slow_cases import every
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from arbor import Solver
from arbor.errors import ModelError
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.model import weights as agreement
from arbor.model.runner import ModelRunner
from arbor.model.weights import check_agreement, own_logits

SAME: dict[str, Any] = {"tokenizer": Words(), "device": "cpu", "task": "reasoning"}
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

    assert own is not None and own.shape[0] == 9
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


class FromTokens(GPT2LMHeadModel):
    """Its positions come from the tokens where none are given."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **settings: Any) -> Any:
        if position_ids is None:
            position_ids = (input_ids != 0).cumsum(-1) + 1
        return super().forward(input_ids=input_ids, position_ids=position_ids, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_come_from_the_tokens_are_refused_in_every_dtype(dtype: torch.dtype) -> None:
    model = as_class(FromTokens, "gpt2")
    embedding = model.transformer.wpe.weight.data
    embedding *= 0.02  # so that logits differ by little

    with pytest.raises(ModelError, match="'gpt2': its positions come from the tokens") as error:
        Solver(model.to(dtype), **SAME).load()

    assert error.value.code == "arch-unsupported"


def test_a_model_that_fails_in_its_own_forward_is_refused_with_the_reason() -> None:
    narrow = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16}
    config = config_of("minicpm3", q_lora_rank=16, head_dim=12, **narrow)  # 2 heads of KV, not 4

    with pytest.raises(ModelError, match=r"own forward fails \(The size of tensor a") as error:
        Solver(AutoModelForCausalLM.from_config(config), **SAME).load()

    assert error.value.code == "model-incomplete"


class Deaf(LlamaForCausalLM):
    """Its logits are of all rows, whichever are asked for."""

    def forward(self, *given: Any, logits_to_keep: Any = 0, **settings: Any) -> Any:
        return super().forward(*given, **settings)


class OfTheLast(LlamaForCausalLM):
    """Its logits are of the last rows, as many as are asked for."""

    def forward(self, *given: Any, logits_to_keep: Any = 0, **settings: Any) -> Any:
        count = len(logits_to_keep) if isinstance(logits_to_keep, Tensor) else logits_to_keep
        return super().forward(*given, logits_to_keep=count, **settings)


class OfTwo(LlamaForCausalLM):
    """Its logits are of two rows."""

    def forward(self, *given: Any, logits_to_keep: Any = 0, **settings: Any) -> Any:
        count = 0 if isinstance(logits_to_keep, int) else 2
        return super().forward(*given, logits_to_keep=count, **settings)


def as_class(kind: Any, name: str = "llama") -> Any:
    model = build(name)
    model.__class__ = kind
    return model


def test_a_forward_that_gives_the_logits_of_all_rows_is_read_at_those_asked_for() -> None:
    before, after = [5, 6, 7, 9, 30], [8, 9, 11]
    model = as_class(Deaf)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + after])).logits[0].log_softmax(-1)
    own = [float(logits[len(before) - 1 + i, token]) for i, token in enumerate(after)]

    with Solver(model, **SAME) as solver:
        assert solver.logprobs([(before, after)])[0].logprobs == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize(("kind", "words"), [(OfTheLast, "differ"), (OfTwo, "logits of 2 rows")])
def test_a_forward_that_gives_the_logits_of_other_rows_is_refused(kind: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        Solver(as_class(kind), **SAME).load()
    assert error.value.code == "arch-unsupported"
