"""What a run looks like while it happens."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.fake_run import fake_run

from arbor.trace.fold import Replay
from arbor.tree import NodeState
from arbor.view.draw import (
    ASCII,
    CELLS,
    UNICODE,
    Glyphs,
    bar,
    draw,
    tree_lines,
)


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


# Drawing


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


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 100, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_no_line_is_wider_than_the_terminal(width: int, glyphs: Glyphs) -> None:
    lines = text_of(replayed(rounds=20), width, glyphs)

    assert all(len(line) <= width for line in lines)
    assert any("#" in line and "v=" in line for line in lines) == (width >= 60)
    if glyphs is ASCII:
        assert "\n".join(lines).isascii()
