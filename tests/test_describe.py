"""A model described from its config alone."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import ARCHITECTURES, build, config_of
from support.slow_cases import every, only

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


def test_a_model_that_does_not_run_without_weights_is_unsupported() -> None:
    settings = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}

    info = describe_config(config_of("jetmoe", **settings), HERE)

    assert not info.supported
    assert "model_type 'jetmoe': it does not run without weights (" in info.reason


def test_a_rotary_embedding_that_changes_as_paths_grow_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

    info = describe_config(config_of("llama", rope_parameters=rope), HERE)

    assert not info.supported
    assert "rotary embedding of type 'dynamic'" in info.reason


def test_a_config_that_takes_no_other_padding_is_refused_with_a_reason() -> None:
    names = ("pad", "bos", "eos", "cls", "sep")
    settings = {"num_attention_heads": 4, **{f"{name}_token_id": 0 for name in names}}

    info = describe_config(config_of("modernbert-decoder", **settings), HERE)

    assert "model_type 'modernbert-decoder': it does not run without weights (" in info.reason
