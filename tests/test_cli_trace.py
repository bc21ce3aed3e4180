"""``arbor trace``: convert, compare, repair, describe and repeat."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from pathlib import Path

import pytest
from support import fake_solver
from support.fake_run import fake_run, tick
from support.run_cli import Arbor, in_process

from arbor.events import Boundary, Event
from arbor.trace import TraceWriter


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


def test_a_configuration_repeats_the_run(command: Arbor) -> None:
    ran = command("trace", "config", "run.arbor.jsonl")

    assert tomllib.loads(ran.out) == {
        "problem": "4 5 6 10",
        "seed": 0,
        "controller": {"name": "tot"},
    }
    assert command("trace", "config", "run.arbor.jsonl", "--json").document["seed"] == 0


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
