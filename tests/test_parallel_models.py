"""Tensor parallelism: models of many architectures divided among processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import write_random
from support.two_ranks import TWO, assert_same, save

from arbor import Solver
from arbor.kernels.linear.blocks import BlockLinear

pytestmark = pytest.mark.slow

# what transformers has a plan for
DIVIDED = (
    "llama",
    "llama_mha",
    "llama_yarn",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "smollm3",
    "cohere",
    "starcoder2",
)


@pytest.mark.parametrize("name", DIVIDED)
def test_trees_of_an_architecture_are_the_same(name: str, tmp_path: Path) -> None:
    # with seed 0 a number falls between two tokens of llama_mha, within the rounding of its logits
    case = {"path_tokens": 60, "step_tokens": 15, "budget": 0.3, "controller": "beam,beam_size=2"}
    case["seed"] = 1
    model = save(tmp_path / "model", name)
    with Solver(model, **TWO, **case) as two, Solver(model, device="cpu", **case) as one:
        assert_same(two, one, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "each", "layer_part"),
    [(2, 3, 3, 3, False), (4, 4, 2, 1, True), (3, 6, 3, 1, True)],
    ids=["none", "copies", "three"],
)
def test_heads_that_do_not_divide(
    ranks: int, heads: int, kv_heads: int, each: int, layer_part: bool, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    sizes["hidden_size"] = 16 * heads
    model = save(tmp_path / "model", "llama", **sizes)
    case = {"path_tokens": 60, "step_tokens": 15, "device": "cpu"}
    with Solver(model, tp=ranks, **case) as several, Solver(model, **case) as one:
        assert_same(several, one, tmp_path)
        runner = several.engine.runner
        assert {spec.num_kv_heads for spec in runner.layer_kv} == {each}
        assert runner.ranks is not None
        assert runner.ranks.has_heads is layer_part


@pytest.mark.parametrize(
    ("settings", "within"), [({"weights": "int8"}, 1e-4), ({"kv_dtype": "int8"}, 2e-3)]
)
def test_8_bits_are_kept_on_each(settings: dict[str, Any], within: float, tmp_path: Path) -> None:
    """Another last bit of K or V may round to the next of 8 bits."""
    with Solver(**TWO, **settings) as two, Solver(device="cpu", **settings) as one:
        assert_same(two, one, tmp_path, within)


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [("llama", ("Q4_K", "Q6_K")), ("qwen2", ("Q5_0", "Q8_0")), ("gemma3", ("Q4_0",))],
)
def test_a_gguf_file_is_cut_between_blocks(
    architecture: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    write_random(model, architecture, kinds)
    pairs = [(list(range(3, 40)), [50, 51]), (list(range(60, 90)), [91, 92, 93])]
    scores = []
    for ranks in (1, 2):
        with Solver(model, device="cpu", tp=ranks, dtype="float32") as solver:
            scores.append([each.total for each in solver.logprobs(pairs) if each is not None])
            layer = solver.engine.runner.model.model.layers[0]
            down = layer.mlp.down_proj if ranks == 1 else layer.mlp.down_proj.part
            assert isinstance(down, BlockLinear)
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
