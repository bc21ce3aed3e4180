"""A model described from its config alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models import ARCHITECTURES, Words, build, config_of, random_model
from support.slow_cases import every, only
from transformers import AutoConfig

from arbor import Solver
from arbor.memory.pool import LayerKV, bytes_per_token
from arbor.model.attention import probe
from arbor.model.describe import describe_config
from arbor.model.loading import ModelLocation

HERE = ModelLocation("here", "")


@pytest.mark.parametrize("dtype", only([None], [None, "float32", "float16"]))
@pytest.mark.parametrize("name", every(3, ARCHITECTURES))
def test_every_architecture_is_described_in_every_dtype(name: str, dtype: str | None) -> None:
    model_type, settings = ARCHITECTURES[name]

    info = describe_config(config_of(model_type, **settings, dtype=dtype), HERE)

    assert info.supported, info.reason
    assert info.dtype == (dtype or "float32")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_description_without_weights_is_that_with_them(name: str) -> None:
    model = build(name)
    config = copy.deepcopy(model.config)

    info = describe_config(config, HERE, dtype="float32")

    assert config.to_dict() == model.config.to_dict()
    assert config._attn_implementation == model.config._attn_implementation
    assert info.parameters == sum(each.numel() for each in model.parameters())
    model.set_attn_implementation("arbor_paged")
    shapes = [spec.shape for spec in probe(model, info.layers) if spec is not None]
    kv = [LayerKV(each.num_kv_heads, each.head_dim_qk, each.head_dim_vo) for each in shapes]
    assert info.kv_bytes_per_token == bytes_per_token(kv, torch.float32)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NAMED = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
READ_VALUES: dict[str, dict[str, Any]] = {
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 97, "eos_token_id": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": {"kv_channels": 8, **EXPERTS},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "modernbert-decoder": {**NAMED, "global_attn_every_n_layers": 2, "local_attention": 16},
}


@pytest.mark.parametrize("name", READ_VALUES)
def test_a_model_whose_forward_reads_values_is_described_and_runs(name: str) -> None:
    given = READ_VALUES[name]
    config = AutoConfig.for_model("dbrx", **given) if name == "dbrx" else config_of(name, **given)
    before = copy.deepcopy(config.to_dict())

    info = describe_config(config, HERE)

    assert (info.supported, info.reason) == (True, "")
    assert config.to_dict() == before
    model = random_model(config)
    assert info.parameters == sum(each.numel() for each in model.parameters())
    with Solver(model, tokenizer=Words(), device="cpu", task="reasoning") as solver:
        solver.load()  # which compares logits


def test_a_padding_token_that_the_forward_needs_stays() -> None:
    text = config_of("gemma4_text", head_dim=8, hidden_size_per_layer_input=0).to_dict()

    info = describe_config(AutoConfig.for_model("gemma4", text_config=text), HERE)

    assert (info.supported, info.reason) == (True, "")


POSITIONS = "its positions come from the tokens"
ENCODER = "it is an encoder-decoder."
OWN = "no attention but the model's own can be used."
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "blt": ({}, "its config names no number of layers."),
    "roberta": ({"is_decoder": True, "pad_token_id": 1}, POSITIONS),
    "camembert": ({"is_decoder": True}, POSITIONS),
    "xlm-roberta-xl": ({"is_decoder": True}, POSITIONS),
    "bart": ({}, ENCODER),
    "whisper": ({}, ENCODER),
    "musicgen": ({}, ENCODER),
    "mpt": ({}, "in layers 0-23 attention has a position bias (ALiBi)."),
    "falcon": ({"alibi": True}, "in layers 0-2 attention has a position bias (ALiBi)."),
    "gpt_neo": ({"attention_types": [[["global"], 3]], "num_layers": 3}, OWN),
    "longcat_flash": ({"num_hidden_layers": 8}, "keeps no list of 8 decoder layers"),
    "helium": ({"head_dim": 12}, "its own forward fails (mat1 and mat2"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_what_it_is(name: str) -> None:
    given, words = REFUSED[name]
    whole = name in ("blt", "musicgen", "mpt", "whisper")
    config = AutoConfig.for_model(name) if whole else config_of(name, **given)

    info = describe_config(config, HERE)

    assert not info.supported
    assert words in info.reason


def test_a_rotary_embedding_that_changes_as_paths_grow_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

    info = describe_config(config_of("llama", rope_parameters=rope), HERE)

    assert not info.supported
    assert "rotary embedding of type 'dynamic'" in info.reason
