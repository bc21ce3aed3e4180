"""What a run looks like while it happens."""

from __future__ import annotations

import io

import pytest
from fake_run import fake_run
from rich.console import Console

from arbor.events import Ended
from arbor.trace.live import LiveView, LogView, human_bytes


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1_250_000, "1.19 MiB"), (5 * 2**40, "5 TiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_a_log_gets_a_line_each_thirty_seconds() -> None:
    on, now = console(terminal=False), 0.0

    with LogView(on, clock=lambda: now) as view:
        for event in fake_run(seed=1):
            now += 4.0
            view(event)

    lines = written(on).splitlines()
    events = len(list(fake_run(seed=1)))
    assert len(lines) == (events - 1) * 4 // 32
    assert lines[0].startswith("arbor: 28 s, ") and " tok/s, KV " in lines[0]


def test_a_short_run_leaves_no_line_in_a_log() -> None:
    on = console(terminal=False)

    with LogView(on) as view:
        for event in fake_run(seed=1):
            view(event)

    assert written(on) == ""


def test_a_terminal_is_redrawn_four_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = 0.0, 0
    view = LiveView(console(terminal=True), clock=lambda: now)
    frame = view.frame

    def count() -> object:
        nonlocal drawn
        drawn += 1
        return frame()

    monkeypatch.setattr(view, "frame", count)
    with view:
        for event in fake_run(seed=1, rounds=40):
            now += 0.01
            view(event)

    assert 2 <= drawn <= 4 * now + 1


def test_the_meter_shows_what_is_held_and_wipes_itself() -> None:
    on = console(terminal=True)

    with LiveView(on) as view:
        for event in fake_run(seed=1):
            if isinstance(event, Ended):
                on.print(view.frame())
            view(event)

    text = written(on)
    assert " of 200 tokens, " in text
    assert " expansions  " in text
    assert text.rstrip().endswith("\x1b[2K"), "the last thing is a wiped line"
