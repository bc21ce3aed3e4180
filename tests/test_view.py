"""``arbor view``: where the page goes, what the terminal shows, and its errors for bad traces."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_run import fake_run, header, tick

from arbor.cli import main
from arbor.cli.evaluation.eval_report import write_index
from arbor.events import KV, Answered, Boundary, Ended, Event, Evicted, Opened, Pruned, Verified
from arbor.measure.evaluation.results import results
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.view import html_page, read_page_trace

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


def small_tree() -> list[Event]:
    """A path of two blocks and a sibling that is pruned; half of the answer's KV is gone."""
    closed = {"stop": "step", "logprob": -1.0, "confidence": 0.5, "top1": 0.5}
    return [
        header(),
        Opened(0, None, 0, 0, 8, "Use 4 5 6 10"),
        Opened(1, 0, 0, 1, 0, ""),
        Opened(2, 0, 1, 1, 0, ""),
        Boundary(1, (1,) * 8, "good\n", **closed),
        Boundary(2, (1,) * 8, "bad \x1b[31mred\x1b]0;title\x07\n", **closed),
        Verified("self", (1, 2), (0.75, 0.25), 2, 0.1),
        Opened(3, 2, 0, 2, 0, ""),
        Boundary(3, (1,) * 8, "below bad\n", **closed),
        Evicted("pressure", ((1, 4), (2, 8), (3, 8)), KV(12)),
        Answered(1, (0, 1), "24", 0.75, True),
        Ended("solved", 4),
    ]


# The page


@pytest.mark.parametrize("name", ["run.arbor.jsonl", "run.arbor.jsonl.gz", "run.jsonl"])
def test_the_page_is_written_next_to_its_trace(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    trace = written(tmp_path / "there" / name)

    code, out, _ = command("view", str(trace))

    page = tmp_path / "there" / "run.html"
    assert (code, out) == (0, f"{page}\n")
    assert page.read_text(encoding="utf-8") == html_page(read_page_trace(trace))


def test_two_traces_are_compared_on_one_page(command: Command, tmp_path: Path) -> None:
    first, second = (written(tmp_path / f"{name}.arbor.jsonl") for name in "ab")

    code, out, _ = command("view", str(first), str(second))

    page = tmp_path / "a-b.html"
    assert (code, out) == (0, f"{page}\n")
    expected = html_page(read_page_trace(first), read_page_trace(second))
    assert page.read_text(encoding="utf-8") == expected


def test_the_page_goes_to_the_given_file(command: Command, trace: Path, tmp_path: Path) -> None:
    code, out, _ = command("view", str(trace), "-o", "page.html")

    assert (code, out) == (0, "page.html\n")
    assert (tmp_path / "page.html").is_file() and not (tmp_path / "run.html").exists()


def test_the_page_goes_to_stdout(command: Command, trace: Path, tmp_path: Path) -> None:
    code, out, _ = command("view", str(trace), "-o", "-")

    assert (code, out) == (0, html_page(read_page_trace(trace)))
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


def test_a_program_reads_where_the_page_is(command: Command, trace: Path, tmp_path: Path) -> None:
    code, out, _ = command("view", str(trace), "--json")

    events = read_trace(trace).events
    page = tmp_path / "run.html"
    assert code == 0
    assert json.loads(out) == {
        "schema": "arbor.view/1",
        "path": str(page),
        "bytes": page.stat().st_size,
        "traces": [
            {
                "path": str(trace),
                "events": len(events),
                "nodes": sum(isinstance(event, Opened) for event in events),
                "banner": "",
            }
        ],
    }


@pytest.mark.parametrize("answers", [True, False])
def test_the_page_is_opened_if_there_is_a_browser(
    command: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    opened: list[str] = []

    def open_(address: str) -> bool:
        opened.append(address)
        return answers

    monkeypatch.setattr(webbrowser, "open", open_)

    code, _, err = command("view", str(trace), "--open")

    assert code == 0
    assert opened == [(tmp_path / "run.html").as_uri()]
    assert ("could not open a browser" in err) is not answers


def test_a_damaged_trace_is_shown_with_a_warning(command: Command, trace: Path) -> None:
    data = trace.read_bytes()
    trace.write_bytes(data[: len(data) // 2])

    code, out, err = command("view", str(trace))

    assert code == 0 and out
    assert f"warning: {trace}: incomplete trace" in err


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "not 0"),
        (("a", "b", "c"), "not 3"),
        (("a", "b", "--term"), "--term prints one trace"),
        (("a", "--term", "--json"), "--term prints one trace"),
        (("a", "--term", "-o", "x"), "--term prints one trace"),
        (("a", "--event", "3"), "--event belongs to --term"),
        (("a", "--samples"), "--samples belongs to a folder of 'arbor eval'"),
    ],
)
def test_invalid_arguments_are_a_usage_error(
    command: Command, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = command("view", *arguments)

    assert code == 2
    assert said in err
    assert "--json" in arguments or out == ""


def test_a_page_that_cannot_be_written_is_a_usage_error(command: Command, trace: Path) -> None:
    code, out, err = command("view", str(trace), "-o", "missing/page.html")

    assert (code, out) == (2, "")
    assert "[output-nowhere]" in err and "another file with -o" in err


# The terminal


def test_the_terminal_shows_what_each_block_holds(command: Command, tmp_path: Path) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", small_tree())

    code, out, _ = command("view", str(trace), "--term")

    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "4 5 6 10  (event 11 of 11, end)"
    assert "12 of 200 tokens" in lines[1]
    assert [line for line in lines if "#" in line] == [
        "#0 ████████ Use 4 5 6 10",
        "├── #1 ████···· ✓ v=0.75 good",
        "└── #2 ········ ✓ v=0.25 bad  [31mred ]0;title ",
    ]


def test_identical_siblings_share_a_line(command: Command, tmp_path: Path) -> None:
    closed = {"stop": "step", "logprob": -1.0, "confidence": 0.5, "top1": 0.5}
    texts = ["nine", "nine\n", "ten", "nine", "nine", "nine"]
    trace = written(
        tmp_path / "run.arbor.jsonl",
        [
            header(),
            Opened(0, None, 0, 0, 8, "Use 4 5 6 10"),
            *(Opened(node, 0, node - 1, 1, 0, "") for node in range(1, 8)),
            *(Boundary(node, (1,) * 8, text, **closed) for node, text in enumerate(texts, 1)),
            Pruned((6,)),
            Answered(5, (0, 5), "9", 0.75, True),
            Ended("solved", 8),
        ],
    )

    _, out, _ = command("view", str(trace), "--term")

    assert [line for line in out.splitlines() if "#" in line] == [
        "#0 ████████ Use 4 5 6 10",
        "├── #1 ████████ ×3 nine",  # 1, 2 and 4; without 5, which the answer's path goes through
        "├── #5 ████████ nine",
        "├── #6 ████████ ✗ pruned nine",
        "├── #7 …        ",
    ]
    assert "└── (… 1 more)" in out


@pytest.mark.slow
def test_a_tree_of_any_depth_is_drawn(command: Command, tmp_path: Path) -> None:
    depth = 2 * sys.getrecursionlimit()
    opened = [Opened(node, node - 1, 0, node, 0, "") for node in range(1, depth)]
    root = Opened(0, None, 0, 0, 8, "Use 4 5 6 10")
    end = [Answered(depth - 1, tuple(range(depth)), "9", 0.5, None), Ended("solved", depth)]
    trace = written(tmp_path / "run.arbor.jsonl", [header(), root, *opened, *end])

    code, out, _ = command("view", str(trace), "--term")

    assert code == 0 and len(out.splitlines()) > depth


def test_the_terminal_shows_an_earlier_event(command: Command, tmp_path: Path) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", small_tree())

    _, out, _ = command("view", str(trace), "--term", "--event", "3")

    assert out.startswith("4 5 6 10  (event 3 of 11, node)\n")
    assert "#1 …" in out and "#3" not in out


def test_the_answers_path_is_bold_and_colours_can_be_switched_off(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", small_tree())

    _, coloured, _ = command("view", str(trace), "--term", "--color", "always")
    _, plain, _ = command("view", str(trace), "--term", "--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    _, uncoloured, _ = command("view", str(trace), "--term", "--color", "always")

    assert re.search(r"\x1b\[1m#1 ", coloured) and re.search(r"\x1b\[34m█", coloured)
    assert not re.search(r"\x1b\[1m#2 ", coloured)
    assert "\x1b" not in plain
    assert not re.search(r"\x1b\[3\d", uncoloured)


def test_a_terminal_without_unicode_gets_ascii(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", small_tree())
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)

    code = main(["view", str(trace), "--term"])

    stream.flush()
    out = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert code == 0
    assert "|-- #1 ####.... + v=0.75 good" in out


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 80, 200])
def test_every_line_fits_the_terminal(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", seed=4)
    monkeypatch.setenv("COLUMNS", str(columns))

    code, out, err = command("view", str(trace), "--term")

    lines = out.splitlines()
    assert code == 0
    assert ("the tree needs 60 columns" in err) is (columns < 60)
    assert max(map(len, lines)) <= columns
    assert any("#0" in line for line in lines) is (columns >= 60), "narrow: the meter alone"


def test_the_whole_tree_is_shown_whatever_its_height(command: Command, tmp_path: Path) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", list(fake_run(2, rounds=60)))
    replay = Replay.of(read_trace(trace))
    path = replay.answered.path if replay.answered else ()

    _, out, _ = command("view", str(trace), "--term")

    assert len(path) > 1 and all(f"#{node} " in out for node in path)
    assert "more lines" not in out


# The help


def test_help_imports_no_torch_and_shows_three_examples() -> None:
    code = (
        "import sys; from arbor.cli import main; main(['view', '--help']); "
        "heavy = {'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^    arbor view ", done.stdout, re.MULTILINE)) == 3


def evaluation(folder: Path) -> Path:
    """A folder as `arbor eval` leaves it; its only trace."""
    (folder / "traces").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>", encoding="utf-8")
    return written(folder / "traces" / "a.arbor.jsonl.gz")


def test_an_evaluations_folder_is_shown_by_its_page(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = evaluation(tmp_path / "runs")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)

    code, out, err = command("view", str(tmp_path / "runs"), "--open", "--verbose")

    assert code == 0
    assert out == f"{tmp_path / 'runs' / 'index.html'}\n"
    assert f"arbor view {trace}" in err
    assert opened == [(tmp_path / "runs" / "index.html").as_uri()]


def test_a_program_reads_an_evaluations_page(command: Command, tmp_path: Path) -> None:
    evaluation(tmp_path / "runs")

    _, out, _ = command("view", str(tmp_path / "runs"), "--json")

    assert json.loads(out)["path"] == str(tmp_path / "runs" / "index.html")


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


def test_pages_of_samples_are_made_again_only_where_their_traces_are_newer(
    command: Command, tmp_path: Path
) -> None:
    folder = finished(tmp_path / "runs", "a.arbor.jsonl.gz", "b.arbor.jsonl.gz")
    command("view", str(folder), "--samples")
    for name in "ab":
        (folder / "traces" / f"{name}.html").write_text("kept", encoding="utf-8")
    os.utime(folder / "traces" / "b.html", (0, 0))

    command("view", str(folder), "--samples")

    pages = [(folder / "traces" / f"{name}.html").read_text("utf-8") for name in "ab"]
    assert pages[0] == "kept" and pages[1].startswith("<!doctype html>")


def test_a_sample_whose_trace_cannot_be_read_has_no_link(command: Command, tmp_path: Path) -> None:
    names = [f"{name}.arbor.jsonl.gz" for name in "abc"]
    folder = finished(tmp_path / "runs", *names)
    (folder / "traces" / names[0]).unlink()
    (folder / "traces" / names[1]).write_bytes(b"")
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "far", "trace": "traces/../../far.arbor.jsonl.gz"}) + "\n")

    code, _, err = command("view", str(folder), "--samples")

    assert code == 0 and err.count("arbor: warning: ") == 2
    assert links(folder) == ["traces/c.html"]
    assert not list(tmp_path.glob("*.html"))


def test_the_list_of_an_evaluation_is_made_again_with_its_pages(
    command: Command, tmp_path: Path
) -> None:
    folder = finished(tmp_path / "runs", "a.arbor.jsonl.gz")
    (folder / "index.html").unlink()

    assert command("view", str(folder))[0] == 2
    assert command("view", str(folder), "--samples")[0] == 0
    assert links(folder) == ["traces/a.html"]


@pytest.mark.parametrize("text", [None, "[]", "{}", "nothing", '{"dataset": "x", "n": "many"}'])
def test_samples_without_results_are_one_error(
    command: Command, tmp_path: Path, text: str | None
) -> None:
    folder = finished(tmp_path / "runs", "a.arbor.jsonl.gz")
    (folder / "results.json").unlink()
    if text is not None:
        (folder / "results.json").write_text(text, encoding="utf-8")

    code, _, err = command("view", str(folder), "--samples")

    assert code == 4
    assert f"[run-unreadable] {folder / 'results.json'} is not the results of a run." in err


@pytest.mark.parametrize("more", [["--term"], ["-o", "page.html"], ["other"]])
def test_a_folder_where_a_trace_is_needed_names_one(
    command: Command, tmp_path: Path, more: list[str]
) -> None:
    trace = evaluation(tmp_path / "runs")

    code, _, err = command("view", str(tmp_path / "runs"), *more)

    assert code == 2
    assert "is a folder, not a trace" in err and f"arbor view {trace}" in err


def test_a_folder_without_an_evaluation_says_what_to_type(command: Command, tmp_path: Path) -> None:
    code, _, err = command("view", str(tmp_path))

    assert code == 2
    assert "is a folder, not a trace" in err and "NAME.arbor.jsonl" in err


def test_it_is_among_the_commands(command: Command) -> None:
    code, out, _ = command("--help")

    assert code == 0
    assert re.search(r"^  view +Show a trace", out, re.MULTILINE)
    assert re.search(r"^  demo +Solve a small example", out, re.MULTILINE)
