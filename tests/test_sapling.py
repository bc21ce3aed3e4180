"""Sapling's files: tokenizer, configuration, weights; what the trainer promises about them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAPLING = ROOT / "arbor" / "sapling"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
pytestmark = pytest.mark.skipif(
    not all((SAPLING / name).exists() for name in FILES), reason="Sapling's files are not there"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAPLING)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32).eval()


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_digits_are_single_tokens_and_frequent_pieces_are_too(tokenizer: Any) -> None:
    assert len(tokenizer("1234567890", add_special_tokens=False).input_ids) == 10
    pieces = (
        " *",
        " +",
        " -",
        " /",
        " =",
        " (left:",
        ")\n",
        "Target",
        " 4",
        " Amy",
        " Amy has",
        " Amy =",
    )
    for piece in pieces:
        assert len(tokenizer(piece, add_special_tokens=False).input_ids) == 1, piece


def test_the_lean_forward_gives_the_logits_of_the_saved_model(model: Any, tokenizer: Any) -> None:
    import torch

    training = script("train_sapling")
    config = model.config
    names = training.Shape.__dataclass_fields__
    sizes = {n: getattr(config, n) for n in names if n not in ("rope_theta", "rms_norm_eps")}
    lean = training.Model(training.Shape(**sizes)).eval()
    training.load_weights(lean, SAPLING)
    ids = torch.tensor(
        [tokenizer("Target 24 (left: 4 5 6 10)\n10 - 4 = 6 (left: 5 6 6)\n").input_ids]
    )
    length = ids.shape[1]
    with torch.inference_mode():
        mask = torch.ones(1, length, length, dtype=torch.bool).tril()
        mine = lean(ids, torch.arange(length)[None], mask) @ lean.embed_tokens.weight.T
        theirs = model(ids).logits
    assert (mine - theirs).abs().max() < 1e-3
