"""Every row of the table of errors: the text holds the value that works, the exit code is right,
stdout is empty."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fake_run, header, tick
from support.run_cli import REAL, Arbor, await_line, in_process, spawn

from arbor.model.loading import BUILTIN
from arbor.trace import TraceWriter

PUZZLE = "4 5 6 10"


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Arbor:
    """``arbor`` with its real solver, in an empty folder and with an empty cache of models."""
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return in_process(capsys)


def model(path: Path, **config: Any) -> Path:
    """A directory that looks like a model."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN["sapling"] / name, path)
    return path


def trace(path: Path, **changes: Any) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in [header(**changes), *list(fake_run(seed=1))[1:]]:
            writer(event)
    return path


def missing_model(folder: Path) -> list[str]:
    model(folder / "models" / "qwen2.5-7b")
    return ["solve", PUZZLE, "--model", "./models/qwen"]


def model_without_weights(folder: Path) -> list[str]:
    (model(folder / "qwen") / "pytorch_model.bin").touch()
    return ["solve", PUZZLE, "--model", "./qwen"]


def model_that_is_not_cached(folder: Path) -> list[str]:
    snapshot = folder / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc", encoding="utf-8")
    return ["solve", PUZZLE, "--model", "Qwen/Qwen3-8B"]


def unsupported_model(folder: Path) -> list[str]:
    path = model(folder / "mamba", model_type="mamba2", architectures=["Mamba2ForCausalLM"])
    (path / "model.safetensors").write_bytes(b"not read")
    return ["solve", PUZZLE, "--model", "./mamba"]


def not_utf8(folder: Path) -> list[str]:
    (folder / "problem.txt").write_bytes(b"4 5\n6 \xe9")
    return ["solve", "--file", "problem.txt"]


def bad_trace(folder: Path) -> list[str]:
    path = trace(folder / "run.arbor.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:40], b"{broken\n", *lines[41:50]]))
    return ["trace", "convert", "run.arbor.jsonl"]


def cut_trace(folder: Path) -> list[str]:
    path = trace(folder / "run.arbor.jsonl")
    other = trace(folder / "other.arbor.jsonl")
    path.write_bytes(path.read_bytes()[:-3])
    return ["trace", "diff", str(other), "run.arbor.jsonl"]


def trace_without_header(folder: Path) -> list[str]:
    path = trace(folder / "run.arbor.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    return ["trace", "config", "run.arbor.jsonl"]


def newer_trace(folder: Path) -> list[str]:
    trace(folder / "run.arbor.jsonl", schema="arbor.trace/2")
    return ["trace", "info", "run.arbor.jsonl"]


def broken_config(folder: Path) -> list[str]:
    (folder / "run.toml").write_text("budgte = 0.5\n", encoding="utf-8")
    return ["solve", PUZZLE, "--config", "run.toml"]


def no_folder(folder: Path) -> list[str]:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    return ["solve", PUZZLE]


ROWS: list[tuple[Any, int, str, tuple[str, ...]]] = [
    (
        missing_model,
        5,
        "model-not-found",
        (
            "no such directory: ./models/qwen. It is not a Hub id either",
            "looks like Qwen/Qwen2.5-7B-Instruct",
            "Local models found: models/qwen2.5-7b",
        ),
    ),
    (model_without_weights, 5, "model-incomplete", ("no *.safetensors", "pytorch_model.bin")),
    (
        model_that_is_not_cached,
        5,
        "offline",
        ("Qwen/Qwen3-8B is not in HF_HOME=", "HF_HUB_OFFLINE=1", "Cached models: Some/Model."),
    ),
    (unsupported_model, 5, "arch-unsupported", ("mamba2", "See 'arbor info MODEL'")),
    (
        ["solve", PUZZLE, "--budget", "25"],
        2,
        "budget-range",
        (
            "--budget 25: a ratio lies in (0, 1] and is the part KEPT",
            "Did you mean 0.25 (keep 25 %)",
            "8192tok or 6GiB",
            "kvpress compression_ratio r = budget 1-r",
        ),
    ),
    (
        ["solve", PUZZLE, "--budget", "20tok"],
        6,
        "budget-infeasible",
        (
            "the budget is 20 tokens",
            "the first thought (",
            "Smallest workable: ",
            "Or: a shorter prompt",
        ),
    ),
    (
        ["solve", PUZZLE, "--controller", "bem"],
        2,
        "unknown-controller",
        ("'bem'", "Did you mean 'beam'", "Known: ab-mcts, beam, ", "(plugins loaded: none)."),
    ),
    (
        ["solve", PUZZLE, "--policy", "arbokv"],
        2,
        "unknown-policy",
        ("Did you mean 'arborkv'", "Known: adakv, ams, arborkv, ", "(plugins loaded: none)."),
    ),
    (["solve", PUZZLE, "--task", "gam24"], 2, "unknown-task", ("Did you mean 'game24'",)),
    (["solve", PUZZLE, "--model", "builtin:x"], 2, "unknown-model", ("builtin:sapling",)),
    (
        not_utf8,
        4,
        "not-utf8",
        ("byte 0xe9 at offset 6 (line 2)", "iconv -f latin1 -t utf8, or --encoding latin-1"),
    ),
    (["solve", " "], 4, "problem-empty", ("Try: 4 5 6 10",)),
    (
        ["solve", PUZZLE, "--step-tokens", "100000"],
        4,
        "problem-too-long",
        ("the model's context is ", "the search needs ", "--step-tokens"),
    ),
    (
        ["solve", PUZZLE, "--max-depth", f"1{'0' * 30}"],
        4,
        "problem-too-long",
        ("the model's context is ", "the search needs ", "Use --max-depth 63."),
    ),
    (
        bad_trace,
        4,
        "trace-corrupt",
        (
            "run.arbor.jsonl: line 41 is unreadable: not JSON. 49 events are readable.",
            "'arbor trace repair' writes a clean copy; 'arbor view' shows the readable part",
        ),
    ),
    (cut_trace, 4, "trace-corrupt", ("'arbor trace repair' writes a clean copy",)),
    (trace_without_header, 4, "trace-corrupt", ("has no header", "'arbor trace info'")),
    (newer_trace, 4, "trace-version", ("is arbor.trace/2; this arbor reads arbor.trace/1",)),
    (
        ["trace", "info", "run.arbor.jsonl"],
        4,
        "trace-unreadable",
        ("run.arbor.jsonl cannot be read: No such file", "--trace run.arbor.jsonl"),
    ),
    (broken_config, 2, "unknown-setting", ("run.toml: there is no setting 'budgte'", "'budget'")),
    (["solve", PUZZLE, "--config", "x.toml"], 4, "config-unreadable", ("--print-config",)),
    (
        [
            "solve",
            PUZZLE,
            "--controller",
            "tot",
            "--set",
            "beam=1000000000",
            "--max-depth",
            "20",
            "--budget",
            "100TiB",
        ],
        6,
        "oom",
        ("cpu: the KV of ", " are free next to weights of ", "tokens fit: try --budget "),
    ),
    (["solve", PUZZLE, "--open"], 2, "usage", ("--html run.html",)),
    (["solve", PUZZLE, "--model", ""], 5, "model-not-found", ("builtin:sapling",)),
    (["slove", PUZZLE], 2, "usage", ("Did you mean 'solve'?",)),
    (["trace", "chek", "run.jsonl"], 2, "usage", ("Did you mean 'check'?", "arbor trace --help")),
    (["xyz"], 2, "usage", ("Commands: solve, ",)),
    (["trace", "repair", "x", "-o", "-"], 2, "usage", ("--output clean.arbor.jsonl",)),
    (
        ["solve", PUZZLE, "--log-file", "no/log"],
        2,
        "log-unwritable",
        ("existing, writable folder",),
    ),
    (["solve", PUZZLE, "--device", "tpu"], 2, "device", ("auto, cpu or cuda",)),
    (no_folder, 2, "no-folder", ("working directory", "cd DIR")),
]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "words"), ROWS, ids=[f"{row[2]}-{row[1]}" for row in ROWS]
)
def test_an_error_holds_the_value_that_works(
    command: Arbor, tmp_path: Path, arguments: Any, exit_code: int, code: str, words: tuple[str]
) -> None:
    given = arguments(tmp_path) if callable(arguments) else arguments

    ran = command(*given)

    assert (ran.code, ran.out) == (exit_code, "")
    assert ran.err.startswith(f"arbor: error: [{code}] ")
    for each in words:
        assert each in ran.err
    assert "Traceback" not in ran.err

    as_json = command(*given, "--json")
    assert as_json.code == exit_code
    assert as_json.document["error"]["code"] == code


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is no memory left for this process."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory\nat"), "DefaultCPUAllocator"),
    ],
)
def test_too_little_memory_is_no_bug(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("arbor.cli.solve.check_outputs", fail)

    ran = command("solve", PUZZLE)

    assert ran.code == 6 and ran.err.startswith("arbor: error: [oom] ")
    assert words in ran.err and "a smaller --budget" in ran.err


def test_a_bug_where_the_working_directory_is_gone_is_reported(
    command: Arbor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        no_folder(tmp_path)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("arbor.cli.solve.check_outputs", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    ran = command("solve", PUZZLE)

    assert ran.code == 1 and "[bug] ZeroDivisionError: a bug" in ran.err
    (report,) = tmp_path.glob("arbor-crash-*.txt")
    assert str(report) in ran.err and "check_outputs" in report.read_text(encoding="utf-8")


def test_a_killed_process_leaves_a_trace_that_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with spawn("solve", PUZZLE, "--revision", "endless", "--trace", str(path)) as process:
        await_line(process, b"running")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)

    for arguments, code in ((["check", str(path)], 7), (["repair", str(path)], 0)):
        with spawn("trace", *arguments, code=REAL) as process:
            out, _ = process.communicate(timeout=60)
        assert process.returncode == code, out
    with spawn("trace", "check", str(tmp_path / "run.repaired.arbor.jsonl"), code=REAL) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"interrupted" in out
