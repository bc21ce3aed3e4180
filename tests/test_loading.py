"""Loading: the version of a model, permission for its code, and the attention backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.run_cli import Arbor, in_process
from support.slow_cases import every
from transformers import GenerationConfig

from arbor import Solver
from arbor.errors import ModelError, UsageError
from arbor.feature import hook
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.native import native_library
from arbor.model.describe import describe
from arbor.model.loading import (
    BUILTIN,
    eos_ids,
    left_out,
    load_generation_config,
    locate_model,
    sampling_defaults,
    settled_dtype,
)

OLD, NEW = "1" * 40, "2" * 40

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path("it_ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Arbor:
    """``arbor`` with its real solver, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return in_process(capsys)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache with the built-in model as ``Some/Model``; its tag v1 has a shorter context."""
    cache = tmp_path / "hub"
    model = cache / "models--Some--Model"
    for commit, context in ((OLD, 512), (NEW, 1024)):
        copy_of_sapling(model / "snapshots" / commit, max_position_embeddings=context)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(NEW, encoding="utf-8")
    (model / "refs" / "v1").write_text(OLD, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The built-in model with remote code for config and model, which writes a file when run."""
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path = copy_of_sapling(tmp_path / "own", model_type="own", auto_map=names)
    # transformers runs the same text once per process
    (path / "own.py").write_text(f"{CODE}\n# {path}\n", encoding="utf-8")
    return path


def copy_of_sapling(path: Path, **changes: Any) -> Path:
    shutil.copytree(BUILTIN["sapling"], path, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((path / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


# Revisions


def test_a_revision_is_the_version_that_is_loaded(hub: Path) -> None:
    assert (describe("Some/Model").revision, describe("Some/Model").context) == (NEW, 1024)
    old = describe("Some/Model", revision="v1")
    assert (old.revision, old.context) == (OLD, 512)

    with Solver("Some/Model", revision="v1", max_expansions=1) as solver:
        assert solver.solve("4 5 6 10").config["revision"] == "v1"
        assert solver.engine.runner.config.max_position_embeddings == 512


# Data types


def in_float16(folder: Path) -> Path:
    """The same model, its weights in float16; the config states no dtype."""
    path = folder / "model.safetensors"
    tensors = {name: each.half() for name, each in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_auto_is_the_dtype_of_the_weights_where_the_config_states_none(tmp_path: Path) -> None:
    folder = in_float16(copy_of_sapling(tmp_path / "model"))
    assert describe(folder).dtype == "float16"
    with Solver(folder, controller="chain", device="cpu") as solver:
        assert solver.describe().dtype == "float16"
        assert solver.engine.runner.dtype == torch.float16

    shutil.copy(BUILTIN["sapling"] / "model.safetensors", folder)
    assert settled_dtype(locate_model(folder), "auto", "cpu") == "bfloat16"
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert settled_dtype(locate_model(folder), "auto", "cpu") == "auto"


def test_files_that_are_not_of_the_models_weights_do_not_set_the_dtype(tmp_path: Path) -> None:
    folder = in_float16(copy_of_sapling(tmp_path / "model"))
    others = {"a": torch.zeros(3, dtype=torch.float32)}
    save_file(others, folder / "adapter_model.safetensors", {"format": "pt"})
    assert describe(folder).dtype == "float16"

    names = load_file(folder / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    save_file(others, folder / "consolidated.safetensors", {"format": "pt"})

    assert describe(folder).dtype == "float16"


@pytest.mark.parametrize("there", [True, False], ids=["in the cache", "not downloaded"])
def test_so_it_is_of_a_model_of_the_hub(
    hub: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_float16(hub / "models--Some--Model" / "snapshots" / NEW)
    if not there:
        tensors = {"b": SimpleNamespace(dtype="F32"), "a": SimpleNamespace(dtype="F16")}
        files = {"2.safetensors": None, "1.safetensors": SimpleNamespace(tensors=tensors)}
        found = SimpleNamespace(files_metadata=files)
        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: found)
        (folder / "model.safetensors").unlink()

    assert describe("Some/Model").dtype == "float16"
    assert describe("Some/Model", revision="v1").dtype == "float32"


# Files that are not all there


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The built-in model in two files with their index."""
    folder = copy_of_sapling(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named = {}
    for number, names in enumerate((sorted(tensors)[:4], sorted(tensors)[4:]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({each: tensors[each] for each in names}, folder / shard, {"format": "pt"})
        named |= dict.fromkeys(names, shard)
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def refusal(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        Solver(folder, controller="chain", device="cpu").load()
    assert caught.value.code == "model-incomplete"
    return caught.value


def test_files_that_their_index_does_not_name_are_no_reason_to_copy_them_again(
    sharded: Path,
) -> None:
    index = sharded / "model.safetensors.index.json"
    first, second = sorted(each.name for each in sharded.glob("model-*"))
    whole = index.read_text("utf-8")
    named = {name: file for name, file in json.loads(whole)["weight_map"].items() if file != second}
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}), encoding="utf-8")

    assert f"{index.name} there again: it does not name {second}" in (refusal(sharded).hint or "")

    index.unlink()
    assert f"Copy {index.name} there" in (refusal(sharded).hint or "")

    index.write_text(whole, encoding="utf-8")
    (sharded / first).unlink()
    assert "index" not in (refusal(sharded).hint or "")


def test_a_directory_without_a_vocabulary_is_refused_by_that(tmp_path: Path) -> None:
    folder = copy_of_sapling(tmp_path / "model")
    for each in folder.glob("token*"):
        each.unlink()

    assert "no readable tokenizer (no file there has a vocabulary)" in str(refusal(folder))


# Generation configs


def with_generation_config(folder: Path, text: str) -> Path:
    copy_of_sapling(folder)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("text", ["[]", '"greedy"', '{"compile_config": 4}'])
def test_a_generation_config_of_another_form_is_refused_by_name(text: str, tmp_path: Path) -> None:
    folder = with_generation_config(tmp_path / "model", text)

    with pytest.raises(
        ModelError, match=r"generation_config\.json of .* cannot be read"
    ) as refused:
        load_generation_config(locate_model(folder))

    assert refused.value.code == "model-incomplete" and "delete it" in str(refused.value.hint)


def test_an_end_that_is_no_id_is_refused_by_name(tmp_path: Path) -> None:
    folder = with_generation_config(tmp_path / "model", '{"eos_token_id": "abc"}')

    with (
        Solver(folder, device="cpu") as solver,
        pytest.raises(ModelError, match="eos_token_id of the generation config is 'abc'"),
    ):
        solver.generate("4 5 6 10", max_tokens=2)


@pytest.mark.parametrize("ids", [["2"], [[2]], {"a": 1}, True, 2.0])
def test_ids_that_end_a_text_are_whole_numbers(ids: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))

    with pytest.raises(ModelError, match="a whole number, or a list of them"):
        eos_ids(model, SimpleNamespace(eos_token_id=3))


@pytest.mark.parametrize(("ids", "ends"), [(2, (2,)), ([2, 5], (2, 5)), ([], ()), (None, (3,))])
def test_ends_are_the_generation_configs_or_the_tokenizers(ids: Any, ends: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))

    assert eos_ids(model, SimpleNamespace(eos_token_id=3)) == ends


def test_settings_that_transformers_alone_applies_are_named() -> None:
    forced = {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "remove_invalid_values": True}

    assert left_out(GenerationConfig(**forced)) == tuple(forced)
    assert left_out(GenerationConfig(remove_invalid_values=False)) == ()


def test_sampling_settings_that_a_generation_config_lacks_change_nothing() -> None:
    found = sampling_defaults(GenerationConfig(do_sample=True, top_p=0.8))

    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 0.8, 0, 0.0)


# Code of a model's own


def test_code_next_to_the_weights_runs_only_if_it_is_trusted(command: Arbor, own: Path) -> None:
    asked = ("solve", "4 5 6 10", "--model", str(own), "--set", "max_expansions=1")

    refused = command(*asked)

    assert (refused.code, refused.out) == (5, "")
    assert refused.err.startswith(f"arbor: error: [remote-code] {own} needs Python code")
    assert "add --trust-remote-code" in refused.err and "Traceback" not in refused.err
    assert not Path("it_ran").exists()

    assert command(*asked, "--trust-remote-code").code in (0, 3)
    assert Path("it_ran").exists()


# Attention backends


@pytest.mark.parametrize(
    ("settings", "kind"),
    every(
        3,
        [
            ({}, NativeCascade if native_library() is not None else TorchCascade),
            ({"backend": "torch"}, TorchCascade),
            ({"backend": "rowwise"}, RowwiseAttention),
            (
                {"deterministic": True},
                RowwiseAttention if native_library() is None else NativeCascade,
            ),
            ({"deterministic": True, "backend": "rowwise"}, RowwiseAttention),
        ],
    ),
)
def test_the_backend_is_the_one_that_was_asked_for(
    settings: dict[str, Any], kind: type[Any], tmp_path: Path
) -> None:
    with Solver(device="cpu", max_expansions=1, **settings) as solver:
        assert isinstance(solver.engine.runner.backend, kind)
        assert Solver.from_config(solver.config).config == solver.config


# Block values


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Solver]:
    """``arbor calibrate`` with made-up losses; lists its solvers here, writes ``kept``."""
    calibrate = pytest.importorskip("arbor.papers.arborkv.calibrate")

    solvers: list[Solver] = []

    def losses(solver: Solver, problems: list[Any]) -> list[Any]:
        solvers.append(solver)
        solver.describe()
        return [
            calibrate.Example(problem, block / 6, 0.5, block / 6, float(block > 3))
            for problem in range(10)
            for block in range(6)
        ]

    monkeypatch.setattr(calibrate, "collect", losses)
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "kept"))
    return solvers


def test_values_fitted_to_a_model_of_the_hub_are_found_for_that_revision(
    command: Arbor,
    hub: Path,
    fitted: list[Solver],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = command("calibrate", "msve", "--model", "Some/Model", "--revision", "v1", "--n", "8")

    assert ran.code == 0, ran.err
    out = Path(ran.out.strip())
    assert (
        out.is_relative_to(tmp_path / "kept")
        and json.loads(out.read_text())["provenance"]["revision"] == "v1"
    )
    assert [each.config["revision"] for each in fitted] == ["v1"]
    assert (
        Solver("Some/Model", revision="v1").setup.msve == hook("msve").load(out) != hook("msve")()
    )
    assert (
        Solver("Some/Model").setup.msve
        == Solver("Some/Model", revision="v2").setup.msve
        == hook("msve")()
    )
    assert Solver("Some/Other", revision="v1").setup.msve == hook("msve")()

    out.write_text("broken", encoding="utf-8")
    with pytest.raises(UsageError, match="msve-unreadable"):
        Solver("Some/Model", revision="v1", policy="arborkv")
    assert Solver("Some/Model", revision="v1").setup.msve == hook("msve")()
    assert str(out) in caplog.text and "arbor calibrate msve" in caplog.text
    again = command("calibrate", "msve", "--model", "Some/Model", "--revision", "v1", "--n", "8")
    assert again.code == 0 and Solver("Some/Model", revision="v1").setup.msve == hook("msve").load(
        out
    )
