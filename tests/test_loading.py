"""Loading: the version of a model, permission for its code, and the attention backend."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from support.run_cli import Arbor, in_process
from support.slow_cases import only

from arbor import Solver
from arbor.errors import UsageError
from arbor.kernels.native import native_library, without_native
from arbor.kernels.native_cascade import NativeCascade
from arbor.kernels.rowwise import RowwiseAttention
from arbor.kernels.torch_cascade import TorchCascade
from arbor.model.describe import describe
from arbor.model.loading import BUILTIN
from arbor.retention.msve import MSVE

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


def test_a_run_of_a_revision_is_repeated_with_it(command: Arbor, hub: Path) -> None:
    asked = ("--model", "Some/Model", "--revision", "v1")
    text = command("solve", "4 5 6 10", *asked, "--print-config").out
    Path("run.toml").write_text(text, encoding="utf-8")

    assert command("solve", "--config", "run.toml", "--print-config").out == text
    assert 'revision = "v1"' in text
    document = command("info", "Some/Model", "--revision", "v1", "--json").document["model"]
    assert document["revision"] == OLD


def test_a_revision_that_is_not_cached_is_named(command: Arbor, hub: Path) -> None:
    ran = command("solve", "4 5 6 10", "--model", "Some/Model", "--revision", "v9")

    assert (ran.code, ran.out) == (5, "")
    assert "[offline] Some/Model@v9 is not in HF_HOME=" in ran.err


def test_a_ready_model_has_no_revision() -> None:
    with pytest.raises(UsageError, match="the model is loaded already"):
        Solver(torch.nn.Linear(1, 1), tokenizer=object(), revision="v1")


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


def test_trust_is_in_no_configuration(command: Arbor, own: Path) -> None:
    printed = command("solve", "--model", str(own), "--trust-remote-code", "--print-config").out
    assert "controller" in printed and "trust_remote" not in printed
    Path("run.toml").write_text("trust_remote_code = true\n", encoding="utf-8")

    ran = command("solve", "4 5 6 10", "--model", str(own), "--config", "run.toml")

    assert (ran.code, ran.out) == (2, "")
    assert "[trust] run.toml sets trust_remote_code" in ran.err
    with pytest.raises(UsageError, match="trust"):
        Solver.from_config("run.toml")


def test_a_replay_trusts_code_only_on_request(command: Arbor, own: Path) -> None:
    asked = ("--model", str(own), "--set", "max_expansions=1", "--trust-remote-code")
    command("solve", "4 5 6 10", *asked, "--trace", "run.jsonl")
    settings = json.loads((own / "tokenizer_config.json").read_text("utf-8"))
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    }
    (own / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

    refused = command("replay", "run.jsonl", "--policy", "lru")
    assert (refused.code, refused.out) == (5, "") and "[remote-code]" in refused.err
    trusted = command("replay", "run.jsonl", "--policy", "lru", "--trust-remote-code")
    assert trusted.code == 0 and "lru" in trusted.out


# Block values


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Solver]:
    """``arbor calibrate`` with made-up losses; lists its solvers here, writes ``kept``."""
    import arbor.measure.calibrate
    from arbor.measure.calibrate import Example

    solvers: list[Solver] = []

    def losses(solver: Solver, problems: list[Any]) -> list[Example]:
        solvers.append(solver)
        solver.describe()
        return [
            Example(problem, block / 6, 0.5, block / 6, float(block > 3))
            for problem in range(10)
            for block in range(6)
        ]

    monkeypatch.setattr(arbor.measure.calibrate, "collect", losses)
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "kept"))
    return solvers


def test_values_fitted_to_a_model_of_the_hub_are_found_for_that_revision(
    command: Arbor, hub: Path, fitted: list[Solver], tmp_path: Path
) -> None:
    ran = command("calibrate", "msve", "--model", "Some/Model", "--revision", "v1", "--n", "8")

    assert ran.code == 0, ran.err
    out = Path(ran.out.strip())
    assert (
        out.is_relative_to(tmp_path / "kept")
        and json.loads(out.read_text())["provenance"]["revision"] == "v1"
    )
    assert [each.config["revision"] for each in fitted] == ["v1"]
    assert Solver("Some/Model", revision="v1").setup.msve == MSVE.load(out) != MSVE()
    assert (
        Solver("Some/Model").setup.msve == Solver("Some/Model", revision="v2").setup.msve == MSVE()
    )
    assert Solver("Some/Other", revision="v1").setup.msve == MSVE()

    out.write_text("broken", encoding="utf-8")
    with pytest.raises(UsageError, match="msve-unreadable"):
        Solver("Some/Model", revision="v1")
    again = command("calibrate", "msve", "--model", "Some/Model", "--revision", "v1", "--n", "8")
    assert again.code == 0 and Solver("Some/Model", revision="v1").setup.msve == MSVE.load(out)


def test_values_fitted_to_a_directory_go_where_one_is(
    command: Arbor, fitted: list[Solver], tmp_path: Path
) -> None:
    assert command("calibrate", "msve", "--n", "8").out == "msve.json\n"

    assert MSVE.load(Path("msve.json")) != MSVE()
    assert not (tmp_path / "kept").exists()


def test_an_unwritable_folder_is_refused_before_anything_is_solved(
    command: Arbor, hub: Path, fitted: list[Solver], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("a file", encoding="utf-8")

    ran = command("calibrate", "msve", "--model", "Some/Model")

    assert (ran.code, ran.out, fitted) == (2, "", [])
    assert "[output-unwritable]" in ran.err and "ARBOR_CACHE" in ran.err


def test_calibration_trusts_code_only_on_request(
    command: Arbor, own: Path, fitted: list[Solver]
) -> None:
    asked = ("calibrate", "msve", "--model", str(own), "--n", "8")

    refused = command(*asked)
    assert (refused.code, refused.out) == (5, "") and "[remote-code]" in refused.err
    assert not Path("it_ran").exists()

    assert command(*asked, "--trust-remote-code").code == 0
    assert Path("it_ran").exists()


# Attention backends


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, NativeCascade if native_library() is not None else TorchCascade),
        ({"backend": "torch"}, TorchCascade),
        ({"backend": "rowwise"}, RowwiseAttention),
        ({"deterministic": True}, RowwiseAttention if native_library() is None else NativeCascade),
        ({"deterministic": True, "backend": "rowwise"}, RowwiseAttention),
    ],
)
def test_the_backend_is_the_one_that_was_asked_for(
    settings: dict[str, Any], kind: type[Any], tmp_path: Path
) -> None:
    with Solver(device="cpu", max_expansions=1, **settings) as solver:
        assert isinstance(solver.engine.runner.backend, kind)
        assert Solver.from_config(solver.config).config == solver.config


def test_without_the_native_kernels_torch_attends() -> None:
    with without_native():
        for settings, kind in (({}, TorchCascade), ({"deterministic": True}, RowwiseAttention)):
            with Solver(device="cpu", max_expansions=1, **settings) as solver:  # type: ignore[arg-type]
                assert type(solver.engine.runner.backend) is kind
        with pytest.raises(UsageError, match="needs the native kernels on a CPU"):
            Solver(device="cpu", backend="native")


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
def test_the_native_backend_is_refused_where_it_would_not_be_deterministic() -> None:
    solver = Solver(device="cpu", backend="native", deterministic=True)
    odd = dataclasses.replace(solver.describe(), head_dims=(20, 64))

    assert solver.checkpoint.backend_name(solver.describe()) == "native"
    with pytest.raises(UsageError, match="no kernels for float32 and heads of 20 and 64"):
        solver.checkpoint.backend_name(odd)
    assert Solver(device="cpu", deterministic=True).checkpoint.backend_name(odd) == "rowwise"
    assert Solver(device="cpu").checkpoint.backend_name(odd) == "torch"


@pytest.mark.parametrize("backend", only(["torch"], ["torch", "rowwise", "reference"]))
def test_a_backend_changes_no_thought(backend: str) -> None:
    texts = []
    for chosen in ("auto", backend):
        with Solver(device="cpu", max_expansions=2, backend=chosen) as solver:
            texts.append([step.text for step in solver.solve("4 5 6 10", seed=3).steps])

    assert texts[0] == texts[1]


def test_flashinfer_without_a_kernel_for_the_model_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arbor.model.placement.find_spec", lambda name: object())
    monkeypatch.setattr("arbor.model.checkpoint.find_spec", lambda name: object())
    monkeypatch.setattr(
        "arbor.model.checkpoint.resolve_device", lambda device: torch.device("cuda")
    )

    solver = Solver(backend="flashinfer")

    with pytest.raises(UsageError, match="no kernels for float32 and heads of 64"):
        solver.checkpoint.backend_name(solver.describe())
    half = dataclasses.replace(solver.describe(), dtype="bfloat16")
    assert solver.checkpoint.backend_name(half) == "flashinfer"
    with pytest.raises(UsageError, match="bfloat16 and heads of 64 and 512"):
        solver.checkpoint.backend_name(dataclasses.replace(half, head_dims=(64, 512)))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--backend", "rowise"], "unknown-backend", "Did you mean 'rowwise'? Known: auto, flash"),
        (["--backend", "torch", "--deterministic"], "backend", "or use --backend rowwise"),
        (["--backend", "flashinfer", "--device", "cpu"], "backend", "Use --backend torch"),
        (["--revision", "v1"], "revision", "Leave --revision out, or name a Hub id"),
    ],
)
def test_invalid_settings_are_refused_before_anything_loads(
    command: Arbor,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: str,
    words: str,
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("arbor.model.weights.load_config", load)

    ran = command("solve", "4 5 6 10", *arguments)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"arbor: error: [{code}] ") and words in ran.err
