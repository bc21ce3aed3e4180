"""Stages of reading and loading: one line of arbor's own, and no bar of another library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from arbor import Solver
from arbor.cli.output import LoadingLine, Output
from arbor.support.stages import showing


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


PUZZLE = "4 5 6 10"
ENDS: dict[str, Callable[[Solver], Any]] = {
    "solve": lambda solver: solver.solve(PUZZLE).finish_reason,
    "stream": lambda solver: solver.stream(PUZZLE).solution.finish_reason,
    "batch": lambda solver: [each.finish_reason for each in solver.imap([PUZZLE, "1 2 3 4"])],
    "generate": lambda solver: {each.finished for each in solver.generate(PUZZLE, beams=2)},
}
STOPPED = {"solve": "interrupted", "stream": "interrupted", "batch": [], "generate": {False}}


@pytest.mark.parametrize("how", ENDS)
def test_what_is_stopped_while_it_reads_the_model_ends(how: str) -> None:
    def stop(stage: str) -> None:
        if stage.startswith("reading") and not stopped:
            stopped.append(stage)
            solver.stop()

    stopped: list[str] = []
    with Solver(controller="tot,width=2,beam=2", max_expansions=2) as solver:
        with showing(stop):
            assert ENDS[how](solver) == STOPPED[how]
        assert stopped
        assert ENDS[how](solver) != STOPPED[how]


def test_what_is_stopped_while_it_waits_ends() -> None:
    found: list[str] = []
    with Solver(controller="tot,width=2,beam=2", max_expansions=2) as solver:
        solver.load()
        thread = threading.Thread(target=lambda: found.append(ENDS["solve"](solver)))
        with solver._busy:
            thread.start()
            while not solver._next.locked():
                pass
            solver.stop()
        thread.join()
        assert found == ["interrupted"]
