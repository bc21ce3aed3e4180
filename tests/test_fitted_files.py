"""What was fitted to a model: found for the same weights whatever they are called, and for no
others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.gguf_files import llama, write_gguf

from arbor import Solver
from arbor.model import fitted_files
from arbor.model.fitted_files import file_to_fit, found_file
from arbor.model.loading import ModelLocation, locate_model
from arbor.retention.alpha import save_alpha
from arbor.support.cache_dir import FITTED, cache_dir

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, in a folder that is the current one."""
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "models").mkdir()
    write_gguf(llama(), folder / "m.gguf", quantized=True)
    monkeypatch.chdir(folder)
    return folder / "m.gguf"


def fit(path: Path) -> None:
    """Write what the calibrations of a model leave."""
    for name in FITTED:
        file = file_to_fit(name, locate_model(path))
        file.parent.mkdir(parents=True)
        file.write_text("{}")


def found(path: str | Path) -> list[bool]:
    source = locate_model(path)
    return [found_file(name, source) is not None for name in FITTED]


def test_a_gguf_file_is_known_by_its_content(model: Path) -> None:
    everything, nothing = [True] * len(FITTED), [False] * len(FITTED)
    assert found(model) == nothing
    fit(model)
    Path("link.gguf").symlink_to(model)
    shutil.copy(model, "copy.gguf")

    for spelling in ("m.gguf", "./m.gguf", "../models/m.gguf", model, "link.gguf", "copy.gguf"):
        assert found(spelling) == everything, spelling
    weights = bytearray(model.read_bytes())
    weights[-1] ^= 1
    model.write_bytes(weights)
    assert found(model) == nothing, "the header is the same, and the weights are not"
    assert found("copy.gguf") == everything


def test_weights_are_not_read_for_a_file_to_which_nothing_was_fitted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitted_files, "content_digest", lambda _: pytest.fail("they were read"))

    assert not any(found(model))


def test_a_policy_takes_the_alpha_of_the_weights_that_a_search_will_have(model: Path) -> None:
    def alpha(path: str) -> float:
        with Solver(path, task="chains", policy="raas", mode="lossy") as solver:
            return float(solver.config["policy"]["protect"]["threshold"])

    file = file_to_fit("alpha", locate_model(model))
    file.parent.mkdir(parents=True)
    save_alpha(file, 0.002, {"task": "chains"})

    assert (alpha("m.gguf"), alpha("../models/m.gguf")) == (0.002, 0.002)
    weights = bytearray(model.read_bytes())
    weights[-1] ^= 1
    model.write_bytes(weights)
    assert alpha("m.gguf") == 1e-4


def test_a_directory_holds_its_own_files_and_the_cache_those_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "msve.json").write_text("{}")
    folder, hub = ModelLocation("m", str(tmp_path)), ModelLocation("Some/Model", "Some/Model")
    file = file_to_fit("alpha", hub)

    assert file == cache_dir() / "alpha" / "Some%2FModel" / "main.json"
    assert found_file("msve", folder) == tmp_path / "msve.json"
    assert found_file("alpha", folder) is None and found_file("alpha", hub) is None
    assert found_file("msve", ModelLocation("m", str(tmp_path), adapter="./other")) is None
    assert found_file("msve", ModelLocation("a ready model", "")) is None
