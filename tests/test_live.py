"""What a run looks like while it happens."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, ConsoleDimensions
from rich.text import Text
from support.fake_run import fake_run

from arbor.events import KV, Ended, Evicted, Rehydrated
from arbor.metrics import Metrics
from arbor.support.units import human_bytes
from arbor.trace.fold import Replay
from arbor.tree import NodeState
from arbor.view.draw import (
    ASCII,
    CELLS,
    UNICODE,
    Glyphs,
    bar,
    draw,
    movement,
    time_left,
    tree_lines,
)
from arbor.view.live import PAUSES_S, LiveView, LogView, ShowView, glyphs_of, progress_line
from arbor.view.redraw import Redraw


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


def test_a_show_waits_after_what_changes_but_not_behind_a_slow_search() -> None:
    events = list(fake_run(seed=1, rounds=10))

    def waited(per_event: float) -> float:
        now, slept = 0.0, 0.0

        def sleep(seconds: float) -> None:
            nonlocal now, slept
            now, slept = now + seconds, slept + seconds

        with ShowView(console(terminal=True), clock=lambda: now, sleep=sleep) as view:
            for event in events:
                now += per_event
                view(event)
        return slept

    wanted = sum(PAUSES_S.get(event.name, 0.0) for event in events)
    assert waited(0.0) == pytest.approx(wanted)
    assert 0 < waited(0.02) < wanted
    assert waited(5.0) == 0


def test_a_movement_of_kv_is_said_in_words() -> None:
    nodes = tuple((node, 2) for node in range(7))

    assert movement(Evicted("pressure", nodes, KV(0))) == (
        "leave   14 tokens of #0 #1 #2 #3 #4 and 2 more (pressure)"
    )
    assert movement(Rehydrated(((3, 4),), "recompute", KV(0))) == (
        "return  4 tokens of #3, computed again"
    )
    assert movement(Rehydrated(((3, 4),), "fetch", KV(0))).endswith(", fetched")
    assert movement(Ended("solved", 1)) == ""


# Drawing


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "····"), (1, "████"), (0.5, "██··"), (0.53, "██▏·"), (7, "████"), (-1, "····")],
)
def test_a_bar_is_filled_by_eighths_of_a_cell(part: float, text: str) -> None:
    assert bar(part, 4, UNICODE) == text
    assert bar(part, 4, ASCII) == text.replace("█", "#").replace("▏", ".").replace("·", ".")


def replayed(until: int | None = None, rounds: int = 6) -> Replay:
    replay = Replay()
    for number, event in enumerate(fake_run(seed=1, rounds=rounds)):
        if until is None or number < until:
            replay.feed(event, number / 100)
    return replay


def text_of(replay: Replay, width: int, glyphs: Glyphs = UNICODE, height: int = 50) -> list[str]:
    on = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    on.print(draw(replay, width, height, glyphs))
    return written(on).splitlines()


def test_the_tree_shows_what_each_block_holds() -> None:
    replay = replayed(rounds=40)
    rows = {
        int(line.plain.partition("#")[2].partition(" ")[0]): line.plain
        for line in tree_lines(replay, UNICODE, 200, 500)
        if "#" in line.plain
    }

    assert rows
    for node, row in rows.items():
        block = replay.blocks[node]
        share = block.resident / block.tokens
        assert f"#{node} {bar(share, CELLS, UNICODE)}" in row
        assert (f"v={block.value:.2f}" in row) == block.verified
        assert ("pruned" in row) == (block.state is NodeState.PRUNED)
    assert any("·" * CELLS in row for row in rows.values()), "something was evicted"


def test_the_running_path_is_bold_and_the_rest_is_folded() -> None:
    replay = replayed(until=60, rounds=40)
    leaf = replay.running[0]
    path = [leaf]
    while replay.blocks[path[-1]].parent is not None:
        path.append(replay.blocks[path[-1]].parent)

    lines = list(tree_lines(replay, UNICODE, 200, 500))

    bold = [line.plain for line in lines if any(span.style == "bold" for span in line.spans)]
    assert [int(row.partition("#")[2].split()[0]) for row in bold] == sorted(path)
    assert len(lines) < len(replay.blocks)


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 100, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_no_line_is_wider_than_the_terminal(width: int, glyphs: Glyphs) -> None:
    lines = text_of(replayed(rounds=20), width, glyphs)

    assert all(len(line) <= width for line in lines)
    assert any("#" in line and "v=" in line for line in lines) == (width >= 60)
    if glyphs is ASCII:
        assert "\n".join(lines).isascii()


def test_a_low_terminal_is_not_overrun() -> None:
    assert len(text_of(replayed(rounds=40), 100, height=14)) <= 14


def test_the_signs_follow_the_encoding() -> None:
    def on(encoding: str) -> Console:
        return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))

    assert glyphs_of(on("ascii")) is ASCII
    assert glyphs_of(on("latin-1")) is ASCII
    assert glyphs_of(on("utf-8")) is UNICODE


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    replay = replayed()
    replay.blocks[0].text = "\x1b[2J\x07[red]gone[/red]\r\n"

    row = next(iter(tree_lines(replay, UNICODE, 100, 20))).plain

    assert "\x1b" not in row and "\x07" not in row
    assert "[red]gone[/red]" in row


def reflowed(text: str, width: int, narrower: int) -> list[str]:
    """The rows of a terminal that breaks its lines when it becomes narrower at the mark ``\\0``."""
    rows, row, now = [""], 0, width
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\x00|[^\x1b\x00]", text):
        if part == "\0":
            now = narrower
            broken = [
                [each[at : at + now] for at in range(0, max(1, len(each)), now)] for each in rows
            ]
            row = sum(map(len, broken[: row + 1])) - 1
            rows = [each for line in broken for each in line]
        elif part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            rows[row] += part
    return rows


def test_a_narrower_terminal_keeps_no_row_of_before() -> None:
    on = console(terminal=True)
    on.size = ConsoleDimensions(80, 30)
    on.print("what stood above")
    display = Redraw(on)
    display.start()
    display.update(Text("\n".join(letter * 70 for letter in "abc")))
    assert isinstance(on.file, io.StringIO)
    on.file.write("\0")
    on.size = ConsoleDimensions(30, 30)

    display.update(Text("short"))
    display.stop()

    rows = [row for row in reflowed(written(on), 80, 30) if row.strip()]
    assert rows == ["what stood above"]


def test_one_of_a_kind_is_not_counted_as_several() -> None:
    line = progress_line(Metrics(nodes=2, expansions=1, wall_s=3.0), 5)

    assert "1 block, 1 expansion, " in line and "left" not in line
    assert "2 blocks, 1,200 expansions, " in progress_line(Metrics(nodes=3, expansions=1200), 5)


def test_the_time_left_follows_the_blocks_of_the_plan() -> None:
    metrics = Metrics(nodes=11, wall_s=60.0)

    assert time_left(metrics, 40) == "up to about 3 min left"
    assert "60 s, up to about 3 min left, 10 blocks" in progress_line(metrics, 5, 40)
    assert time_left(metrics, 10) == time_left(metrics, 0) == "", "nothing is left, or known"
    assert time_left(Metrics(nodes=2, wall_s=0.5), 40) == "", "too early"
