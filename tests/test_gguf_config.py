"""Settings of GGUF files: in the config as llama.cpp reads them, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import HEADS, llama, write_gguf, write_random, write_settings

from arbor import ModelError, Solver
from arbor.model.gguf.header import read_gguf_header
from arbor.model.loading import load_config, load_model, locate_model

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
    ("architecture", "sizes"),
    [
        ("qwen3", {"head_dim": 64}),
        ("qwen3moe", {"moe_intermediate_size": 512, "head_dim": 64}),
        ("qwen2moe", {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}),
    ],
)
def test_sizes_of_heads_and_experts_are_the_files(
    architecture: str, sizes: Mapping[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, sizes=sizes)

    model = load_model(locate_model(path), torch.float32, CPU)

    assert {name: getattr(model.config, name) for name in sizes} == sizes


def test_experts_without_a_size_share_that_of_a_dense_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    unsaid = {"expert_feed_forward_length": 0, "expert_shared_feed_forward_length": 0}

    config = written(path, "qwen2moe", **unsaid)

    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (256, 512)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3"])
def test_keys_have_as_many_heads_as_queries_unless_the_file_says_how_many(
    architecture: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_settings(path, architecture, {"attention.head_count": HEADS, "general.name": "mistral"})

    config = load_config(locate_model(path))

    assert config.num_key_value_heads == HEADS


def test_a_width_of_heads_needs_no_count_of_rotated_numbers(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", llama(head_dim=32)
    widths = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    write_gguf(model, path, settings=widths, unsaid="llama.rope.dimension_count")

    found = load_model(locate_model(path), torch.float32, CPU)

    ids = torch.arange(20).view(1, -1)
    with torch.inference_mode():
        assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-5)


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


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window_has_it_in_no_layer(window: int | None, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    unsaid = "gemma3.attention.sliding_window"
    bases = {"gemma3.rope.freq_base": 20000.0, "gemma3.rope.scaling.factor": 4.0}
    settings = bases | ({} if window is None else {unsaid: window})
    write_random(path, "gemma3", settings=settings, unsaid=unsaid if window is None else "")

    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        solver.solve("4 5 6 10")  # its logits are compared with the model's own
        specs = solver.engine.runner.specs
    model = load_model(locate_model(path), torch.float32, CPU)

    assert [each.shape.window for each in specs] == [None, None]
    assert model.config.layer_types == [FULL, FULL]
    frequencies = model.model.rotary_emb.full_attention_inv_freq
    assert torch.allclose(frequencies, 20000.0 ** -(torch.arange(16) / 16) / 4.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (2, [WINDOWED, FULL, WINDOWED, FULL]),
        (1, [FULL] * 4),
        (0, [WINDOWED] * 4),
        ([False, True, True, False], [FULL, WINDOWED, WINDOWED, FULL]),
    ],
)
def test_layers_of_gemma3_have_windows_where_the_file_says_so(
    pattern: int | list[bool], kinds: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    settings = {"block_count": 4, "attention.sliding_window_pattern": pattern}
    write_settings(path, "gemma3", settings)

    assert load_config(locate_model(path)).layer_types == kinds


@pytest.mark.parametrize("architecture", ["phi3", "starcoder2"])
def test_a_window_of_all_layers_is_the_files(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = written(path, architecture, **{"attention.sliding_window": 16})

    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        solver.solve("4 5 6 10")
        specs = solver.engine.runner.specs

    assert config.sliding_window == 16
    assert {each.shape.window for each in specs} == {16}


# Numbers, and tokens


@pytest.mark.parametrize(
    ("architecture", "own"),
    [("nemotron", "norm_eps"), ("stablelm", "layer_norm_eps"), ("falcon", "layer_norm_epsilon")],
)
def test_the_epsilon_of_norms_is_the_files_whatever_it_is_called(
    architecture: str, own: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    name = "attention.layer_norm_"
    unsaid = f"{architecture}.{name}rms_epsilon"
    write_settings(path, architecture, {f"{name}epsilon": 0.25}, unsaid=unsaid)

    assert getattr(load_config(locate_model(path)), own) == 0.25


@pytest.mark.parametrize("architecture", ["smollm3", "gemma3", "qwen2"])
def test_rotary_embeddings_have_llama_cpps_base_where_the_file_says_none(
    architecture: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, unsaid=f"{architecture}.rope.freq_base")

    rope = load_config(locate_model(path)).rope_parameters

    assert rope.get(FULL, rope)["rope_theta"] == 10000.0


@pytest.mark.parametrize("architecture", ["phi3", "smollm3"])
def test_padding_is_the_files_token_or_none(architecture: str, tmp_path: Path) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    write_random(path, architecture)
    write_random(other, architecture, unsaid="tokenizer.ggml.padding_token_id")

    tables = [
        load_model(locate_model(each), torch.float32, CPU).get_input_embeddings()
        for each in (path, other)
    ]

    assert [each.padding_idx for each in tables] == [0, None]


# Refused


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("llama", "attention.causal", False),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.value_length", 32),
        ("llama", "logit_scale", 2.0),
        ("llama", "embedding_scale", 3.0),
        ("llama", "residual_scale", 0.5),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "expert_count", 8),
        ("llama", "rope.scaling.alpha", 1000.0),
        ("qwen2", "attention.sliding_window", 16),
        ("qwen2", "attention.key_length", 32),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "leading_dense_block_count", 1),
        ("gemma3", "attention.key_length_swa", 64),
    ],
)
def test_a_setting_that_the_model_does_not_take_is_refused_by_name(
    architecture: str, name: str, value: float, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, settings={f"{architecture}.{name}": value})

    refused = refusal(path)

    assert refused.code == "model-gguf"
    assert f"'{name}'" in refused.message and f"is {value}" in refused.message
    assert ("generates text" in str(refused)) == (name == "attention.causal")


def test_settings_that_change_nothing_are_taken(tmp_path: Path) -> None:
    neutral = {"attention.causal": True, "logit_scale": 1.0, "attention.scale": 0.0}
    more = {"expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 1}

    config = written(tmp_path / "m.gguf", "qwen3moe", **neutral, **more)

    assert config.norm_topk_prob
    window = {"attention.sliding_window": 256}  # as long as the context
    assert written(tmp_path / "other.gguf", "qwen2", **window).sliding_window is None


def test_experts_are_weighed_as_the_file_says(tmp_path: Path) -> None:
    config = written(tmp_path / "m.gguf", "qwen2moe", expert_weights_norm=True)

    assert config.norm_topk_prob
    assert read_gguf_header(tmp_path / "m.gguf").own("expert_count") == 4
