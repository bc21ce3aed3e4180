"""A full disk: one clear error or warning, nothing half-written, what was finished stays readable.

A limit on the size of files stands for a disk that is full: writing beyond it fails in the middle
of a file, as on a full disk.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_run import fake_run, tick
from support.run_cli import FAKE, REAL, environment
from support.slow_cases import every

from arbor.trace import TraceWriter


def limited(most: int) -> Callable[[], None]:
    """Limits the files of a process to so many bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return limit


def arbor(
    *arguments: str, most: int, folder: Path, code: str = FAKE
) -> subprocess.CompletedProcess[str]:
    """``arbor`` on a disk whose files hold so many bytes."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limited(most),
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("arbor: error: ")]


def written(path: Path, rounds: int = 6) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in fake_run(1, rounds):
            writer(event)
    return path


# One file

# Traces

# Commands


@pytest.mark.parametrize(
    ("words", "name"),
    every(
        3,
        [
            (["view", "run.arbor.jsonl"], "run.html"),
            (["trace", "convert", "run.arbor.jsonl", "-o", "run.json"], "run.json"),
            (
                ["trace", "repair", "run.arbor.jsonl", "-o", "clean.arbor.jsonl"],
                "clean.arbor.jsonl",
            ),
        ],
    ),
)
def test_what_a_command_writes_is_whole_or_as_it_was(
    tmp_path: Path, words: list[str], name: str
) -> None:
    written(tmp_path / "run.arbor.jsonl")
    old = "<title>arbor trace</title>"  # of a page that may be replaced
    (tmp_path / name).write_text(old, encoding="utf-8")

    done = arbor(*words, most=3000, folder=tmp_path, code=REAL)

    assert (done.returncode, done.stdout) == (2, "")
    (error,) = errors(done)
    assert error.startswith(f"arbor: error: [output-unwritable] {name} cannot be written: File too")
    assert (tmp_path / name).read_text("utf-8") == old
    assert {each.name for each in tmp_path.iterdir()} == {"run.arbor.jsonl", name}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        ["view", "run.arbor.jsonl", "-o", "-"],
        ["trace", "info", "run.arbor.jsonl"],
        ["trace", "info", "none.arbor.jsonl", "--json"],
        ["list", "tasks", "--json"],
        ["--help"],
    ],
)
def test_a_full_stdout_is_one_error(tmp_path: Path, words: list[str]) -> None:
    written(tmp_path / "run.arbor.jsonl")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", REAL, *words],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )

    assert done.returncode == (4 if "none.arbor.jsonl" in words else 2), done.stderr
    (error,) = errors(done)
    assert "cannot be written: No space" in error or "none.arbor.jsonl cannot be read" in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_stderr_loses_messages_and_no_result(tmp_path: Path) -> None:
    settings = {"cwd": tmp_path, "env": environment(), "text": True, "timeout": 120}
    command = [sys.executable, "-c", FAKE, "solve", "4 5 6 10", "-v"]
    wanted = subprocess.run(command, capture_output=True, **settings)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, **settings)

    assert wanted.stderr and wanted.returncode == 0
    assert (done.returncode, done.stdout) == (0, wanted.stdout)


# Evaluations


def problems(folder: Path, count: int = 12) -> str:
    rows = ({"problem": f"problem {n}", "answer": "2"} for n in range(count))
    path = folder / "problems.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_an_evaluation_keeps_whole_samples_and_resumes(tmp_path: Path) -> None:
    words = ["eval", problems(tmp_path), "--task", "reasoning", "--output", "out", "--trace", "off"]

    done = arbor(*words, most=5000, folder=tmp_path)

    assert done.returncode == 2, done.stderr
    assert errors(done) == [
        f"arbor: error: [run-unwritable] {Path('out/samples.jsonl')} cannot be written: "
        "File too large. Free some space first."
    ]
    lines = (tmp_path / "out" / "samples.jsonl").read_bytes().splitlines(keepends=True)
    kept = [json.loads(line) for line in lines]
    assert 0 < len(kept) < 12 and lines[-1].endswith(b"\n")
    assert f"{len(kept)} finished sample(s) kept; to resume: arbor eval --config" in done.stderr
    assert not list(tmp_path.glob("out/.arbor-*"))

    again = arbor(*words, "--json", most=10**9, folder=tmp_path)

    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["n"] == 12
    after = (tmp_path / "out" / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert after[: len(lines)] == lines and len(after) == 12
