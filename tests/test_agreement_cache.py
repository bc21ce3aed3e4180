"""Weights that had their model's own logits are not compared with them again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write_random

from arbor import Solver
from arbor.errors import ModelError
from arbor.model import weights
from arbor.model.agreement_cache import Agreement, agreed_before, keep_agreement
from arbor.model.gguf.header import read_gguf_header
from arbor.model.loading import locate_model
from arbor.support.cache_dir import cache_dir


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each load that computed a model's own logits."""
    calls: list[None] = []
    own_logits = weights.own_logits

    def counted(model: Any) -> Any:
        calls.append(None)
        return own_logits(model)

    monkeypatch.setattr(weights, "own_logits", counted)
    return calls


def loaded(path: Path, **settings: Any) -> tuple[torch.Tensor, str | None]:
    """Logits of a model's first tokens, and the form of its layers as one call."""
    with Solver(path, controller="chain", verifier="exact", **settings) as solver:
        runner = solver.engine.runner
        return weights.arbor_logits(runner), runner.layers_form


def test_weights_that_agreed_are_compared_once(tmp_path: Path, compared: list[None]) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q4_0", "Q5_K"))

    first, form = loaded(path)
    again, same = loaded(path)

    assert len(compared) == 1
    assert torch.equal(first, again) and form == same
    loaded(path, dtype="float32")
    assert len(compared) == 2
    os.utime(path)
    loaded(path)
    assert len(compared) == 3


def test_weights_that_are_damaged_later_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q4_0", "Q5_K"))
    loaded(path)
    norm = next(each for each in read_gguf_header(path).tensors if "norm" in each.name)
    data = bytearray(path.read_bytes())
    data[norm.start : norm.start + norm.length] = b"\xff" * norm.length
    path.write_bytes(data)

    with pytest.raises(ModelError, match="logits"):
        loaded(path)


def test_a_damaged_record_is_not_believed(tmp_path: Path, compared: list[None]) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q4_0", "Q5_K"))
    loaded(path)
    changed = 0
    for file in (cache_dir() / "models").iterdir():
        record = json.loads(file.read_text())
        if "layers_form" in record:
            file.write_text(json.dumps(record | {"layers_form": "several tables"}))
            changed += record["layers_form"] == "direct"
    assert changed

    loaded(path)

    assert len(compared) == 2


@pytest.mark.parametrize(
    "damage",
    ["null", "5", '"x"', "[1]", "{}", '{"digest": [1]}', "[" * 100_000, "\xff", "1" * 5000],
)
def test_a_damaged_record_is_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q4_0",))
    source, found = locate_model(path), Agreement("one table")
    keep_agreement(source, ("float32",), found)
    (file,) = (cache_dir() / "models").iterdir()
    file.write_bytes(damage.encode("latin-1"))

    assert agreed_before(source, ("float32",)) is None
    keep_agreement(source, ("float32",), found)
    assert agreed_before(source, ("float32",)) == found


def test_a_changed_adapter_is_compared(tmp_path: Path) -> None:
    path, adapter = tmp_path / "m.gguf", tmp_path / "adapter"
    write_random(path, "llama", ("Q4_0",))
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    source, found = replace(locate_model(path), adapter=str(adapter)), Agreement("one table")

    keep_agreement(source, ("float32",), found)

    assert agreed_before(source, ("float32",)) == found
    assert agreed_before(replace(source, adapter=None), ("float32",)) is None
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    assert agreed_before(source, ("float32",)) is None
    assert agreed_before(replace(source, adapter="user/on-the-hub"), ("float32",)) is None
