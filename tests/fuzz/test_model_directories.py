"""Damaged model directories: a model, or one `ArborError` that names the directory."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from arbor import Solver
from arbor.controllers.chain import Chain
from arbor.errors import ArborError
from arbor.model.loading import BUILTIN

SEEDS = 20
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
JUNK: tuple[Any, ...] = (None, "", "x", -1, 0, 1.5, 10**30, True, [], [1], {}, {"a": 1})


def damage(draw: random.Random, folder: Path) -> str:
    """Damage one file; what was done."""
    path = folder / draw.choice(FILES)
    data = path.read_bytes()
    how = draw.choice(("gone", "empty", "cut", "flipped", "junk", "field", "field"))
    if how == "field" and path.suffix == ".json":
        table = json.loads(data)
        key, value = draw.choice(sorted(table)), draw.choice(JUNK)
        if value is None and draw.random() < 0.5:
            del table[key]
        else:
            table[key] = value
        path.write_text(json.dumps(table), encoding="utf-8")
        return f"{path.name}: {key}={value!r}"
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif how == "junk":
        path.write_bytes(draw.choice((b"null", b"[]", b"3", b"\xff\xfe", b"[" * 99999, b"\0" * 64)))
    else:
        at = draw.randrange(min(len(data), 400))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    return f"{path.name}: {how}"


def check(seeds: range, folder: Path) -> None:
    refused = 0
    for seed in seeds:
        place = folder / f"model{seed}"
        shutil.copytree(BUILTIN["sapling"], place, ignore=shutil.ignore_patterns("*.py", "__*"))
        done = damage(random.Random(seed), place)
        try:
            with Solver(place, controller=Chain(1), step_tokens=2, verifier="exact") as solver:
                solver.solve("4 5 6 10")
        except ArborError as error:
            refused += 1
            assert error.message.isprintable() and len(error.message) < 1000, (done, error.message)
            if error.exit_code == 5:
                assert f"model{seed}" in str(error) or ".json" in str(error), (done, error.message)
        except Exception as error:
            raise AssertionError(f"{seed} ({done}) ends in {type(error).__name__}") from error
        finally:
            shutil.rmtree(place)
    assert refused


@pytest.mark.filterwarnings("ignore")
def test_damaged_model_directories_end_in_a_model_or_one_error(tmp_path: Path) -> None:
    check(range(SEEDS), tmp_path)
