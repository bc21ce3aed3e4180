"""Notebooks: progress below a cell, and the example notebook, whose cells run without Jupyter."""

from __future__ import annotations

import ast
import re
import sys
import types
from typing import Any

import pytest
from support.fake_run import fake_run

from arbor.integrations.notebook.notebook_view import NotebookView

pytestmark = pytest.mark.usefixtures("loaded_once")


class Cell:
    """What a notebook shows below a cell."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.ipython = types.SimpleNamespace(
            get_ipython=lambda: types.SimpleNamespace(kernel=object()),
            display=types.SimpleNamespace(display=self.display, update_display=self.update),
        )

    def display(self, data: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw and display_id not in [place for place, _ in self.shown]
        self.shown.append((display_id, data["text/html"]))

    def update(self, data: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw and self.shown[-1][0] == display_id
        self.shown.append((display_id, data["text/html"]))


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", cell.ipython)
    return cell


class Clock:
    """A second per look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def words(page: str) -> str:
    return re.sub(r"<[^>]*>", "", page)


def test_a_search_is_redrawn_below_its_cell_and_leaves_a_line(cell: Cell) -> None:
    view = NotebookView(clock=Clock())

    for event in fake_run(seed=1):
        view(event)

    pages = [page for _, page in cell.shown]
    assert len({place for place, _ in cell.shown}) == 1 and len(pages) > 5
    assert "KV" in words(pages[5]) and words(pages[5]).count("\n") > 3
    assert words(pages[-1]).strip().count("\n") == 0 and "blocks" in words(pages[-1])


# The example


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as IPython does; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    )
