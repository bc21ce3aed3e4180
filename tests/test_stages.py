"""Stages of reading and loading: one line of arbor's own, and no bar of another library."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from support.gguf_files import llama, write_gguf

from arbor import ModelError, Solver
from arbor.cli.loading_line import FIRST_S, LINE_S, LoadingLine
from arbor.cli.output import Output
from arbor.support import stages
from arbor.support.stages import show, showing, stage_of

needs_load = pytest.mark.filterwarnings("ignore")  # of the packages that convert


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


Captured = pytest.CaptureFixture[str]


@needs_load
def test_a_gguf_file_shows_its_stages_and_no_bar_is_drawn(tmp_path: Path, capfd: Captured) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="the extra `gguf` is not installed")
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, quantized=True)
    shown: list[str] = []

    with showing(shown.append), Solver(path) as solver:
        solver.load()

    tensors = len([each for each in shown if ": tensor" in each])
    assert f"reading {path}" in shown and f"loading {path}" in shown
    assert f"loading {path}: tensor {tensors} of {tensors}" in shown
    assert shown[-1] == ""
    assert "it/s" not in capfd.readouterr().err


def test_an_error_ends_the_stage() -> None:
    shown: list[str] = []

    with showing(shown.append), pytest.raises(ModelError), stage_of("reading m"):
        raise ModelError("model-incomplete", "cut off.")

    assert shown == ["reading m", ""]


def test_a_terminal_has_one_line_that_is_erased(capsys: Captured) -> None:
    clock = Clock()
    line = LoadingLine(Output(display="live"), clock)

    for number in range(5):
        line(f"loading m: tensor {number} of 5")
        clock.now += 1
    line("")

    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert "tensor 4 of 5" in shown
    assert shown.endswith("\r\x1b[2K")


def test_a_pipe_has_a_line_only_where_loading_takes_long(capsys: Captured) -> None:
    clock = Clock()
    line = LoadingLine(Output(display="plain"), clock)

    line("reading m")
    line("")
    assert capsys.readouterr().err == ""

    for seconds in (0.0, FIRST_S, FIRST_S + 1, FIRST_S + LINE_S):
        clock.now = 200 + seconds
        line(f"loading m: tensor {seconds:g}")
    line("")

    assert capsys.readouterr().err == (
        f"arbor: loading m: tensor {FIRST_S:g}\narbor: loading m: tensor {FIRST_S + LINE_S:g}\n"
    )


def test_a_quiet_command_shows_no_stage(capsys: Captured) -> None:
    clock = Clock()
    line = LoadingLine(Output(quiet=True), clock)

    line("reading m")
    clock.now += 10
    line("loading m")
    line("")

    assert capsys.readouterr().err == ""


def test_a_notebook_has_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    show("not in a notebook")
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(stages, "_shown", "")

    show("loading m: tensor 10 of 10")
    show("packing")
    show("")

    shown = capsys.readouterr().err
    assert "not in" not in shown and "\n" not in shown
    assert shown.split("\r")[1:3] == ["loading m: tensor 10 of 10", "packing" + " " * 19]
