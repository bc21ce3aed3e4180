"""``arbor view``: where the page goes, what the terminal shows, and its errors for bad traces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_run import fake_run, tick

from arbor.cli import main
from arbor.cli.evaluation.eval_report import write_index
from arbor.errors import UsageError
from arbor.events import Event
from arbor.measure.evaluation.results import results
from arbor.trace import TraceWriter
from arbor.view import html_page, read_page_trace, write_page

Ran = tuple[int, str, str]
Command = Callable[..., Ran]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Runs ``arbor`` in this process, in an empty folder; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*arguments: str) -> Ran:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def written(path: Path, events: list[Event] | None = None, seed: int = 1) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in events or fake_run(seed):
            writer(event)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "run.arbor.jsonl")


# The page


@pytest.mark.parametrize("name", ["run.arbor.jsonl", "run.arbor.jsonl.gz", "run.jsonl"])
def test_the_page_is_written_next_to_its_trace(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    trace = written(tmp_path / "there" / name)

    code, out, _ = command("view", str(trace))

    page = tmp_path / "there" / "run.html"
    assert (code, out) == (0, f"{page}\n")
    assert page.read_text(encoding="utf-8") == html_page(read_page_trace(trace))


# What it refuses


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nothing\n", "[trace-corrupt]"),
        (b'{"e":"header","schema":"arbor.trace/2"}\n', "[trace-version]"),
        (None, "[trace-unreadable]"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--term",)])
def test_a_file_that_is_not_a_trace_is_refused(
    command: Command, tmp_path: Path, content: bytes | None, said: str, more: tuple[str, ...]
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    if content is not None:
        path.write_bytes(content)

    code, out, err = command("view", str(path), *more)

    assert (code, out) == (4, "")
    assert said in err
    assert not (tmp_path / "run.html").exists()


def test_a_page_replaces_a_page_and_no_other_file(command: Command, trace: Path) -> None:
    page, notes = trace.with_name("page.html"), trace.with_name("notes.html")
    page.touch()
    notes.write_text("<!doctype html>\n<title>notes</title>")

    written = [command("view", str(trace), "-o", str(page))[0] for _ in range(2)]
    assert written == [0, 0] and page.read_text("utf-8") == html_page(read_page_trace(trace))
    for arguments in (
        ("view", str(trace), "-o", str(notes)),
        ("solve", "4 5 6 10", "--html", str(notes), "--model", "nowhere"),
        ("demo", "-o", str(notes)),
    ):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert f"[output-exists] {notes} exists, and is no page of 'arbor view'." in err
    with pytest.raises(UsageError, match="output-exists"):
        write_page(trace, read_page_trace(trace))
    assert notes.read_text().endswith("<title>notes</title>")


# The terminal


# The help


def evaluation(folder: Path) -> Path:
    """A folder as `arbor eval` leaves it; its only trace."""
    (folder / "traces").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>", encoding="utf-8")
    return written(folder / "traces" / "a.arbor.jsonl.gz")


def finished(folder: Path, *traces: str) -> Path:
    """A folder as `arbor eval` leaves it, with its samples and results."""
    (folder / "traces").mkdir(parents=True)
    rows = [
        {"id": str(number), "problem": "one", "answer": "1", "trace": f"traces/{name}"}
        for number, name in enumerate(traces)
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "samples.jsonl").write_text(lines, encoding="utf-8")
    for name in traces:
        written(folder / "traces" / name)
    found = results(rows) | {"dataset": "game24", "folder": str(folder), "missing": 0}
    (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    write_index(folder, found, rows)
    return folder


def links(folder: Path) -> list[str]:
    return re.findall(r'<a href="([^"]+)">', (folder / "index.html").read_text("utf-8"))


def test_each_sample_of_an_evaluation_is_a_page_one_click_away(
    command: Command, tmp_path: Path
) -> None:
    folder = finished(tmp_path / "runs", "a.arbor.jsonl.gz", "b~1.arbor.jsonl.gz")
    assert links(folder) == []
    assert "arbor view . --samples --open" in (folder / "index.html").read_text("utf-8")

    code, out, _ = command("view", str(folder), "--samples")

    assert (code, out) == (0, f"{folder / 'index.html'}\n")
    assert links(folder) == ["traces/a.html", "traces/b~1.html"]
    trace = folder / "traces" / "a.arbor.jsonl.gz"
    page = folder / "traces" / "a.html"
    assert page.read_text("utf-8") == html_page(read_page_trace(trace))
    assert "--samples" not in (folder / "index.html").read_text("utf-8")
