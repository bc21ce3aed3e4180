"""``arbor trace``: convert, compare, repair, describe and repeat."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from support import fake_solver
from support.fake_run import fake_run, tick
from support.run_cli import Arbor, in_process

from arbor.errors import UsageError
from arbor.events import Answered, Boundary, Event
from arbor.trace import TraceWriter
from arbor.trace.perfetto import to_perfetto
from arbor.trace.read import read_trace
from arbor.trace.records import trace_schema


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Arbor:
    """``arbor`` in a folder with the traces of one run, whole and without words, and of another
    one."""
    monkeypatch.chdir(tmp_path)
    run = list(fake_run(seed=1))
    write("run.arbor.jsonl", run)
    write("quiet.arbor.jsonl", run, text="none")
    at = next(i for i, event in enumerate(run) if isinstance(event, Boundary))
    run[at] = dataclasses.replace(run[at], ids=(7, *run[at].ids[1:]))
    write("other.arbor.jsonl", run)
    return in_process(capsys)


def write(name: str, run: list[Event], text: str = "full") -> None:
    with TraceWriter(name, clock=tick(), text=text) as writer:
        for event in run:
            writer(event)


def test_a_format_that_no_folder_adds_is_refused(command: Arbor) -> None:
    ran = command("trace", "convert", "run.arbor.jsonl", "--format", "parquet")

    assert (ran.code, ran.out) == (2, "")
    assert "[unknown-format] unknown format 'parquet'" in ran.err
    assert "perfetto" in ran.err and "arbor/integrations" in ran.err


def test_a_timeline_goes_to_stdout_or_to_a_file(command: Arbor, tmp_path: Path) -> None:
    timeline = to_perfetto(read_trace("run.arbor.jsonl"))

    ran = command("trace", "convert", "run.arbor.jsonl")
    converted = command("trace", "convert", "run.arbor.jsonl", "-o", "run.json", "--json")

    assert (ran.code, ran.err) == (0, "")
    assert len(ran.document["traceEvents"]) == len(timeline["traceEvents"])
    assert json.loads((tmp_path / "run.json").read_text("utf-8")) == ran.document
    assert converted.document["path"] == "run.json"
    missing = command("trace", "convert", "run.arbor.jsonl", "-o", "no/where.json")
    assert missing.code == 2 and "[output-nowhere]" in missing.err
    assert command("trace", "convert", "run.arbor.jsonl", "-o", "-").out == ran.out
    assert not Path("-").exists()


def test_a_comparison_for_people(command: Arbor) -> None:
    same = command("trace", "diff", "run.arbor.jsonl", "run.arbor.jsonl")
    other = command("trace", "diff", "run.arbor.jsonl", "other.arbor.jsonl", "--exit-code")

    assert same.out == "tree      the same, block by block\nevents    the same\n"
    lines = other.out.splitlines()
    assert other.code == 7
    assert lines[0].startswith("tree      1 blocks differ, the first is ")
    assert lines[1].startswith("events    equal up to ")
    assert lines[2].startswith("  first   boundary node=") and "ids=" in lines[2]
    assert lines[3].startswith("  second  boundary node=") and "[7" in lines[3]


def test_a_comparison_for_programs(command: Arbor) -> None:
    document = command("trace", "diff", "run.arbor.jsonl", "other.arbor.jsonl", "--json").document

    assert document["schema"] == "arbor.trace-diff/1"
    assert (document["same_tree"], document["same_events"]) == (False, False)
    assert document["parting"]["fields"] == ["ids"]
    assert len(document["blocks"]) == 1
    assert command("trace", "diff", "run.arbor.jsonl", "other.arbor.jsonl").code == 0


def test_a_repair_says_what_it_did(command: Arbor, tmp_path: Path) -> None:
    whole = (tmp_path / "run.arbor.jsonl").read_bytes()
    (tmp_path / "run.arbor.jsonl").write_bytes(whole[: len(whole) // 2])

    ran = command("trace", "repair", "run.arbor.jsonl", "--json")

    facts = ran.document
    assert (facts["path"], facts["ended"]) == ("run.repaired.arbor.jsonl", True)
    assert facts["dropped"] <= 1 and facts["kept"] > 10
    check = command("trace", "check", "run.repaired.arbor.jsonl")
    assert (check.code, check.err) == (0, "")
    assert check.out.startswith("run.repaired.arbor.jsonl: interrupted, ")
    public = command("trace", "repair", "run.arbor.jsonl", "-o", "p.jsonl", "--trace-text", "none")
    assert public.out.startswith("p.jsonl: ") and "lines kept" in public.out
    assert b"thought" not in (tmp_path / "p.jsonl").read_bytes()


def test_the_schema_is_one_document(command: Arbor) -> None:
    assert command("trace", "schema").document == trace_schema()
    assert command("trace", "schema", "--json").document == trace_schema()


def test_a_configuration_repeats_the_run(command: Arbor) -> None:
    ran = command("trace", "config", "run.arbor.jsonl")

    assert tomllib.loads(ran.out) == {
        "problem": "4 5 6 10",
        "seed": 0,
        "controller": {"name": "tot"},
    }
    assert command("trace", "config", "run.arbor.jsonl", "--json").document["seed"] == 0


def test_a_trace_without_words_gives_settings_without_a_problem(command: Arbor) -> None:
    ran = command("trace", "config", "quiet.arbor.jsonl")

    assert "problem" not in tomllib.loads(ran.out)
    assert "written without its problem" in ran.err
    info = command("trace", "info", "quiet.arbor.jsonl")
    assert info.out.startswith("problem   (left out)  (game24, seed 0)")
    assert "\nanswer    (left out)  (score 0.750, path " in info.out and "None" not in info.out
    answer = command("trace", "info", "quiet.arbor.jsonl", "--json").document["answer"]
    assert "text" not in answer and answer["score"] == 0.75
    events = command("trace", "events", "quiet.arbor.jsonl", "--type", "boundary", "--json")
    lines = [json.loads(line) for line in Path("quiet.arbor.jsonl").read_text().splitlines()]
    assert events.document["events"] == [line for line in lines if line["e"] == "boundary"]
    assert "(left out)" in command("view", "--term", "quiet.arbor.jsonl").out
    assert command("trace", "check", "quiet.arbor.jsonl").code == 0


@pytest.mark.parametrize("text", ["full", "none"])
def test_a_run_without_an_answer_has_none(command: Arbor, text: str) -> None:
    write(
        "none.arbor.jsonl",
        [
            Answered(None, (), None, 0.0, None) if isinstance(e, Answered) else e
            for e in fake_run(1)
        ],
        text=text,
    )

    info = command("trace", "info", "none.arbor.jsonl")

    assert "\nanswer    (no answer)  (score 0.000, " in info.out


def test_a_trace_is_not_written_over(command: Arbor) -> None:
    before = Path("run.arbor.jsonl").read_bytes()
    for arguments in (
        ("trace", "convert", "run.arbor.jsonl", "--output", "run.arbor.jsonl"),
        ("view", "run.arbor.jsonl", "-o", "./run.arbor.jsonl"),
        ("view", "other.arbor.jsonl", "run.arbor.jsonl", "-o", "run.arbor.jsonl"),
    ):
        ran = command(*arguments)
        assert ran.code == 2
        assert "[output-is-input]" in ran.err
    assert Path("run.arbor.jsonl").read_bytes() == before


def test_a_search_writes_over_nothing_it_reads_and_to_places_there_are(command: Arbor) -> None:
    Path("puzzle.txt").write_text("4 5 6 10")
    Path("run.toml").write_text("seed = 3\n")
    for arguments, code in (
        (("--file", "puzzle.txt", "--trace", "puzzle.txt"), "output-is-input"),
        (("4 5 6 10", "--config", "run.toml", "--trace", "run.toml"), "output-is-input"),
        (("4 5 6 10", "--trace", "x.html", "--html", "x.html"), "output-is-input"),
        (("4 5 6 10", "--html", "nowhere/x.html"), "output-nowhere"),
        (("4 5 6 10", "--html", "."), "output-nowhere"),
    ):
        ran = command("solve", *arguments)
        assert ran.code == 2
        assert f"[{code}]" in ran.err
    assert Path("puzzle.txt").read_text() == "4 5 6 10"
    assert Path("run.toml").read_text() == "seed = 3\n"


def test_a_search_overwrites_a_trace_only_by_force(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "arbor.solver", None)
    fake_solver.install()
    command = in_process(capsys)
    write("run.arbor.jsonl", list(fake_run(seed=1)))
    before = Path("run.arbor.jsonl").read_bytes()
    Path("empty.arbor.jsonl").touch()
    search = ("solve", "4 5 6 10", "--trace")

    refused = command(*search, "run.arbor.jsonl")
    unchanged = Path("run.arbor.jsonl").read_bytes()
    forced = command(*search, "run.arbor.jsonl", "--force")

    assert (refused.code, refused.out) == (2, "")
    assert refused.err.splitlines()[-1] == (
        "arbor: error: [output-exists] run.arbor.jsonl exists. "
        "Name another file with --trace, or overwrite it with --force."
    )
    assert unchanged == before
    assert (forced.code, Path("run.arbor.jsonl").read_bytes() != before) == (0, True)
    assert command(*search, "empty.arbor.jsonl").code == 0, "nothing is lost"
    assert command(*search, os.devnull).code == 0, "not a file"
    assert command("solve", "4 5 6 10", "--dry-run", "--trace", "run.arbor.jsonl").code == 0
    Path("off").write_text("a file")
    assert command(*search, "off").code == 0
    assert Path("off").read_text() == "a file"


def test_of_two_searches_with_one_trace_the_second_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    run = list(fake_run(seed=1))
    with TraceWriter(path, clock=tick(), overwrite=False) as first:
        with pytest.raises(UsageError) as refused:
            TraceWriter(path, overwrite=False)  # nothing is in it yet: the first loads a model
        for event in run:
            first(event)

    assert refused.value.code == "output-exists"
    assert len(path.read_bytes().splitlines()) == len(run)
    with pytest.raises(UsageError, match="output-exists"):
        TraceWriter(path, overwrite=False)
    assert len(path.read_bytes().splitlines()) == len(run)
    TraceWriter(path).close()
    assert path.read_bytes() == b"", "overwritten"


def test_a_search_refuses_the_trace_that_another_began_while_it_read_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "arbor.solver", None)
    fake_solver.install()
    monkeypatch.setattr(
        "arbor.cli.solve.budget_line", lambda *_: str(write("run.arbor.jsonl", list(fake_run(1))))
    )

    refused = in_process(capsys)("solve", "4 5 6 10", "--trace", "run.arbor.jsonl")

    assert refused.code == 2
    assert "[output-exists] run.arbor.jsonl exists." in refused.err
    assert len(Path("run.arbor.jsonl").read_bytes().splitlines()) == len(list(fake_run(1)))


def test_a_typo_does_not_put_words_into_a_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"trace-text.*'nune'"):
        TraceWriter(tmp_path / "run.jsonl", text="nune")  # type: ignore[arg-type]
    assert not (tmp_path / "run.jsonl").exists()
