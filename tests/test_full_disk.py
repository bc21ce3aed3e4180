"""A full disk: one clear error or warning, nothing half-written, what was finished stays readable.

A limit on the size of files stands for a disk that is full: writing beyond it fails in the middle
of a file, as on a full disk.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_run import fake_run, tick
from support.run_cli import FAKE, REAL, environment

from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically
from arbor.trace import TraceWriter, read_trace

PUZZLE = "4 5 6 10"


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

WRITE = """
import os, sys
from pathlib import Path
from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically

folder, closed = Path(sys.argv[1]), sys.argv[2] == "closed"
if closed:  # root may write everywhere
    os.access = lambda path, mode: Path(path) != folder or mode != os.W_OK
for name in ("new.html", "old.html"):
    try:
        write_atomically(folder / name, "x" * 5000)
    except UsageError as error:
        print(error.exit_code, error)
"""


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, kind: str) -> None:
    (tmp_path / "old.html").write_text("old", encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), kind],
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited(1000),
    )

    assert done.stderr == ""
    for line, name in zip(done.stdout.splitlines(), ("new.html", "old.html"), strict=True):
        path = tmp_path / name
        assert line.startswith(f"2 [output-unwritable] {path} cannot be written: File too large.")
        assert line.endswith("Free some space first.")
    assert [each.name for each in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text("utf-8") == "old"


def test_a_file_that_cannot_be_read_is_overwritten_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr("os.access", lambda where, mode: Path(where) == path and mode == os.W_OK)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it may not be read"))

    write_atomically(path, "new")

    assert path.read_text("utf-8") == "new"


# Traces

TRACE = """
import resource, sys
from support.fake_run import fake_run, tick
from arbor.trace.write import TraceWriter

for most in range(0, 24_000, 397):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    for suffix in ("", ".gz"):
        with TraceWriter(f"{sys.argv[1]}/{most}.arbor.jsonl{suffix}", clock=tick()) as writer:
            for event in fake_run(1, 12):
                writer(event)
"""


def test_a_trace_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    whole = read_trace(written(tmp_path / "whole.arbor.jsonl", 12)).events
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited(resource.RLIM_INFINITY),
    )

    assert done.returncode == 0, done.stderr
    cut = 0
    for path in tmp_path.glob("[0-9]*.arbor.jsonl*"):
        if not path.stat().st_size:
            continue
        trace = read_trace(path)
        assert trace.events == whole[: len(trace.events)] and trace.bad == ()
        assert path.suffix == ".gz" or path.read_bytes().endswith(b"\n")
        assert trace.banner or trace.events == whole
        cut += len(trace.events) < len(whole)
    assert cut > 20
    warnings = done.stderr.splitlines()
    assert len(warnings) > cut and all("the trace stopped at event" in each for each in warnings)


def test_a_search_goes_on_without_its_trace(tmp_path: Path) -> None:
    done = arbor("solve", PUZZLE, "--trace", "run.arbor.jsonl", most=3000, folder=tmp_path)

    assert (done.returncode, done.stdout, errors(done)) == (0, "(10 - 4) * 5 - 6\n", [])
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("arbor: warning: [no-space] run.arbor.jsonl: the trace stopped at")
    assert 0 < (tmp_path / "run.arbor.jsonl").stat().st_size <= 3000
    assert read_trace(tmp_path / "run.arbor.jsonl").banner == "incomplete trace"


# Commands


def test_a_page_that_does_not_fit_is_one_error_after_the_answer(tmp_path: Path) -> None:
    done = arbor("solve", PUZZLE, "--html", "run.html", most=3000, folder=tmp_path)

    assert (done.returncode, done.stdout) == (2, "(10 - 4) * 5 - 6\n")
    assert errors(done) == [
        "arbor: error: [output-unwritable] run.html cannot be written: File too large. "
        "Free some space first."
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["view", "run.arbor.jsonl"], "run.html"),
        (["trace", "convert", "run.arbor.jsonl", "-o", "run.json"], "run.json"),
        (["trace", "repair", "run.arbor.jsonl", "-o", "clean.arbor.jsonl"], "clean.arbor.jsonl"),
    ],
)
def test_what_a_command_writes_is_whole_or_as_it_was(
    tmp_path: Path, words: list[str], name: str
) -> None:
    written(tmp_path / "run.arbor.jsonl")
    (tmp_path / name).write_text("old", encoding="utf-8")

    done = arbor(*words, most=3000, folder=tmp_path, code=REAL)

    assert (done.returncode, done.stdout) == (2, "")
    (error,) = errors(done)
    assert error.startswith(f"arbor: error: [output-unwritable] {name} cannot be written: File too")
    assert (tmp_path / name).read_text("utf-8") == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"run.arbor.jsonl", name}


def test_a_log_stops_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n" * 100, encoding="utf-8")
    words = ["--log-file", "log.jsonl", "--trace", "/dev/full"]

    done = arbor("solve", PUZZLE, *words, most=300, folder=tmp_path)

    assert (done.returncode, done.stdout, errors(done)) == (0, "(10 - 4) * 5 - 6\n", [])
    stopped = [line for line in done.stderr.splitlines() if "the log stopped" in line]
    assert len(stopped) == 1 and stopped[0].startswith("arbor: warning: [no-space] ")
    assert (tmp_path / "log.jsonl").read_text("utf-8") == "{}\n" * 100


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


def test_results_that_do_not_fit_are_one_error_and_written_later(tmp_path: Path) -> None:
    words = ["eval", problems(tmp_path, 2), "--task", "reasoning", "--output", "out"]

    done = arbor(*words, "--trace", "off", most=3000, folder=tmp_path)

    assert done.returncode == 2, done.stderr
    (error,) = errors(done)
    assert "index.html cannot be written: File too large. Free some space first." in error
    assert "2 finished sample(s) kept; to resume: arbor eval --config" in done.stderr
    assert not (tmp_path / "out" / "index.html").exists()
    assert arbor(*words, "--trace", "off", most=10**9, folder=tmp_path).returncode == 0
    assert (tmp_path / "out" / "index.html").is_file()


def test_traces_that_do_not_fit_are_cut_and_the_samples_finish(tmp_path: Path) -> None:
    words = ["eval", problems(tmp_path, 2), "--task", "reasoning", "--output", "out", "--json"]

    done = arbor(*words, most=4000, folder=tmp_path)

    assert errors(done) == [] or done.returncode == 2, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_bytes().splitlines()]
    assert len(rows) == 2 and all(row["error"] is None for row in rows)
    for row in rows:
        assert row["trace"] is None or read_trace(tmp_path / "out" / row["trace"]).events


def test_an_evaluation_without_room_for_its_settings_is_one_error(tmp_path: Path) -> None:
    words = ["eval", problems(tmp_path, 2), "--task", "reasoning", "--output", "out"]

    done = arbor(*words, most=10, folder=tmp_path)

    assert done.returncode == 2
    (error,) = errors(done)
    assert error.endswith("run.toml cannot be written: File too large. Free some space first.")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"samples.jsonl", "traces"}


def test_a_full_disk_is_named_by_the_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arbor.measure.evaluation.folder import RunFolder

    def full(self: Path, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UsageError, match=r"run-unwritable.*No space left.*Free some space first"):
        RunFolder(tmp_path / "out", {})
