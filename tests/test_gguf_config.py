"""Settings of GGUF files: in the config as llama.cpp reads them, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import llama, write_gguf, write_random, write_settings

from arbor import ModelError
from arbor.model.loading import load_config, locate_model

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that convert

CPU = torch.device("cpu")
FULL, WINDOWED = "full_attention", "sliding_attention"


def written(path: Path, architecture: str, **settings: Any) -> Any:
    """The config of a file with these settings of its architecture."""
    own = {f"{architecture}.{name}": value for name, value in settings.items()}
    write_random(path, architecture, settings=own)
    return load_config(locate_model(path))


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as refused:
        load_config(locate_model(path))
    assert str(path) in refused.value.message
    return refused.value


# Sizes


@pytest.mark.parametrize(
    ("name", "number"),
    [("attention.head_count", 4), ("attention.head_count_kv", 2), ("feed_forward_length", 512)],
)
def test_a_list_of_layers_that_are_alike_is_one_number(
    name: str, number: int, tmp_path: Path
) -> None:
    config = written(tmp_path / "m.gguf", "llama", **{name: [number, number]})

    assert config.to_dict() == written(tmp_path / "one.gguf", "llama").to_dict()

    with pytest.raises(ModelError) as refused:
        written(tmp_path / "other.gguf", "llama", **{name: [number, number // 2]})
    assert f"'llama.{name}' differs between layers" in refused.value.message


@pytest.mark.parametrize("name", ["expert_count", "expert_used_count"])
def test_a_mixture_that_does_not_say_its_experts_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        written(tmp_path / "m.gguf", "qwen3moe", **{name: 0})

    assert refused.value.code == "model-incomplete"
    assert f"'qwen3moe.{name}'" in refused.value.message


# Gemma


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "scalar"),
    [("gemma2", 42, 3584, 256), ("gemma2", 46, 4608, 144), ("gemma3", 62, 5376, 168)],
)
def test_the_largest_gemma_scales_its_queries_by_the_width_of_its_input(
    architecture: str, layers: int, width: int, scalar: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    heads = {"attention.head_count": 32, "attention.key_length": 128 if scalar < 256 else 256}
    sizes = {"embedding_length": width, "block_count": layers, "final_logit_softcapping": 20.0}
    write_settings(path, architecture, {**sizes, **heads})

    config = load_config(locate_model(path))

    assert (config.query_pre_attn_scalar, config.final_logit_softcapping) == (scalar, 20.0)


# Windows


def test_a_file_of_llama_has_no_window_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings={"general.name": "mistral"})

    config = load_config(locate_model(path))

    assert config.model_type == "mistral" and config.sliding_window is None
