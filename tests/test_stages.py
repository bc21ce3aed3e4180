"""Stages of reading and loading: one line of arbor's own, and no bar of another library."""

from __future__ import annotations

import pytest

from arbor.cli.output import LoadingLine, Output


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


Captured = pytest.CaptureFixture[str]


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
