"""Rotary embeddings of GGUF files: scaled as the file says, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import ARCHITECTURES, llama, write_gguf, write_random, write_settings

from arbor import ModelError, Solver
from arbor.model.loading import load_config, load_model, locate_model

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that convert

CPU = torch.device("cpu")
IDS = torch.arange(200).view(1, -1) % 97
SCALING = "llama.rope.scaling."
YARN = {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}
SHORT, LONG = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], [float(each) for each in range(1, 9)]


def scaled(**rope: Any) -> Any:
    """The model that `llama` writes, with another rotary embedding in transformers."""
    model = llama()
    config = model.config
    config.rope_parameters = {**config.rope_parameters, **rope}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 4.0}, ("linear", {"factor": 4.0})),
        ({f"{SCALING}factor": 4.0}, ("linear", {"factor": 4.0})),
        ({"llama.rope.scale_linear": 4.0}, ("linear", {"factor": 4.0})),
        (YARN, ("yarn", {"factor": 4.0, "original_max_position_embeddings": 256})),
        (
            YARN | {f"{SCALING}original_context_length": 64, f"{SCALING}yarn_beta_fast": 16.0},
            ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}),
        ),
        (
            YARN | {f"{SCALING}attn_factor": 2.0},
            (
                "yarn",
                {
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "attention_factor": 2.0 * 1.1386294361119891,
                },
            ),
        ),
        (
            YARN | {f"{SCALING}attn_factor": 2.0, f"{SCALING}yarn_attn_factor": 1.25},
            (
                "yarn",
                {
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "attention_factor": 2.5,
                },
            ),
        ),
        ({f"{SCALING}type": "none", f"{SCALING}factor": 4.0}, ("default", {})),
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 1.0}, ("default", {})),
    ],
)
def test_scaling_by_settings_is_that_of_transformers(
    settings: Mapping[str, Any], rope: tuple[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings=settings)
    kind, parameters = rope

    ours = load_model(locate_model(path), torch.float32, CPU)

    wanted = logits(scaled(rope_type=kind, **parameters))
    assert torch.allclose(logits(ours), wanted, atol=1e-5)
    assert (kind == "default") == torch.allclose(wanted, logits(llama()), atol=1e-5)


def test_factors_divide_the_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    llama3 = scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    plain, own = (each.model.rotary_emb.inv_freq for each in (llama(), llama3))
    write_gguf(llama(), path, others={"rope_freqs.weight": (plain / own).tolist()})

    ours = load_model(locate_model(path), torch.float32, CPU)

    assert torch.allclose(logits(ours), logits(llama3), atol=1e-5)
    assert not torch.allclose(logits(ours), logits(llama()), atol=1e-3)
    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        solver.solve("4 5 6 10")  # its logits are compared with the model's own


def test_factors_of_two_lengths_keep_paths_within_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    settings = {f"{SCALING}original_context_length": 64, f"{SCALING}attn_factor": 1.25}
    factors = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    write_gguf(llama(), path, settings=settings, others=factors)
    wanted = scaled(
        rope_type="longrope",
        short_factor=SHORT,
        long_factor=LONG,
        original_max_position_embeddings=64,
        attention_factor=1.25,
    )

    ours = load_model(locate_model(path), torch.float32, CPU)

    assert torch.allclose(logits(ours), logits(wanted), atol=1e-5)
    with Solver(path) as solver:
        assert solver.describe().context == 64


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_phi3_was_trained_on_the_files_length(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    scaling: dict[str, Any] = {"original_context_length": 64}
    scaling |= {"type": "yarn", "factor": 4.0} if kind == "yarn" else {}
    settings = {f"phi3.rope.scaling.{name}": value for name, value in scaling.items()}
    factors = {f"rope_factors_{each}.weight": [2.0] * 32 for each in ("short", "long")}
    write_random(path, "phi3", settings=settings, others=factors if kind == "longrope" else {})

    config = load_model(locate_model(path), torch.float32, CPU).config

    assert config.rope_parameters["rope_type"] == kind
    assert config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_base_of_the_frequencies_is_the_files(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    local = architecture == "gemma3"  # both of its layers have a window
    bases = {"freq_base": 500000.0, "freq_base_swa": 20000.0 if local else 500000.0}
    settings = {f"{architecture}.rope.{name}": base for name, base in bases.items()}
    write_random(path, architecture, settings=settings)

    rotary = load_model(locate_model(path), torch.float32, CPU).model.rotary_emb

    frequencies = rotary.sliding_attention_inv_freq if local else rotary.inv_freq
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    wanted = bases["freq_base_swa" if local else "freq_base"] ** -exponents
    assert torch.allclose(frequencies, wanted, rtol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_part_of_each_head_is_rotated_where_the_file_says_so(
    scaled: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    factors = {"short": [1.0 + each / 24 for each in range(24)], "long": [9.0] * 24}
    own = {f"rope_factors_{kind}.weight": each for kind, each in factors.items()}
    settings = {"phi3.rope.dimension_count": 48}
    write_random(path, "phi3", settings=settings, others=own if scaled else {})
    whole = tmp_path / "whole.gguf"
    write_random(whole, "phi3")

    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        solver.solve("4 5 6 10")  # its logits are compared with the model's own
    model = load_model(locate_model(path), torch.float32, CPU)

    wanted = 10000.0 ** -(torch.arange(24) / 24)
    wanted /= torch.tensor(factors["short"]) if scaled else 1.0
    assert torch.allclose(model.model.rotary_emb.inv_freq, wanted, rtol=1e-5)
    other = load_model(locate_model(whole), torch.float32, CPU)
    assert not torch.allclose(logits(model), logits(other), atol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "starcoder2"])
def test_a_part_of_a_head_is_refused_where_transformers_rotates_the_whole(
    architecture: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, settings={f"{architecture}.rope.dimension_count": 16})

    with pytest.raises(ModelError) as refused:
        load_config(locate_model(path))

    assert refused.value.code == "model-gguf"
    assert "rope.dimension_count 16 of " in refused.value.message


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("gemma2", "freq_base_swa", 5000.0),
        ("gemma2", "dimension_count_swa", 16),
        ("gemma3", "dimension_count_swa", 16),
    ],
)
def test_another_rotation_of_layers_with_a_window_is_refused_by_name(
    architecture: str, name: str, value: float, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, settings={f"{architecture}.rope.{name}": value})

    with pytest.raises(ModelError) as refused:
        load_config(locate_model(path))

    assert refused.value.code == "model-gguf"
    assert f"rope.{name} {value:g} " in refused.value.message


@pytest.mark.parametrize(
    ("settings", "factors", "words"),
    [
        ({f"{SCALING}type": "dynamic", f"{SCALING}factor": 2.0}, {}, "'dynamic'"),
        ({f"{SCALING}attn_factor": 2.0}, {}, "attn_factor 2"),
        ({f"{SCALING}type": "none", f"{SCALING}attn_factor": 1.5}, {}, "'none', attn_factor 1.5"),
        (YARN | {f"{SCALING}yarn_log_multiplier": 0.1}, {}, "'yarn'"),
        (YARN, {"rope_freqs.weight": SHORT}, "rope_freqs.weight together"),
        ({}, {"rope_freqs.weight": SHORT[:4]}, "rope_freqs.weight of 4 numbers"),
        ({}, {"rope_factors_short.weight": SHORT}, "rope_factors_short.weight"),
        (
            {},
            {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG[:4]},
            "rope_factors_short.weight of 8 numbers and rope_factors_long.weight of 4",
        ),
    ],
)
def test_other_scaling_is_refused_by_name(
    settings: Mapping[str, Any], factors: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings=settings, others=factors)

    with pytest.raises(ModelError) as refused:
        load_model(locate_model(path), torch.float32, CPU)

    said = str(refused.value)
    assert refused.value.code == "model-gguf" and str(path) in said
    assert words in said and "safetensors" in said


@pytest.mark.parametrize("scaling", [{"type": "linear"}, {}])
def test_layers_with_a_window_are_not_scaled(scaling: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    settings = {"rope.freq_base": 1000000.0, "rope.scaling.factor": 8.0}
    scaled = {f"rope.scaling.{name}": value for name, value in scaling.items()}
    write_settings(path, "gemma3", settings | scaled)

    rope = load_config(locate_model(path)).rope_parameters

    wanted = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    assert rope["full_attention"].items() >= wanted.items()
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
