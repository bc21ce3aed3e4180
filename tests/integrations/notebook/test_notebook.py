"""Notebooks: progress below a cell, and the example notebook, whose cells run without Jupyter."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fake_run

from arbor.errors import UsageError
from arbor.events import Ended, Header
from arbor.integrations.notebook.notebook_view import NotebookView

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = Path(__file__).parents[3]


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


def test_what_follows_quickly_is_not_drawn(cell: Cell) -> None:
    view = NotebookView(clock=lambda: 0.0)

    for event in fake_run(seed=1):
        view(event)

    assert len(cell.shown) == 2, "the first frame, and the line at the end"


def test_another_search_has_a_place_of_its_own(cell: Cell) -> None:
    view = NotebookView(clock=Clock())

    for event in [*fake_run(seed=1), *fake_run(seed=2)]:
        view(event)

    assert len({place for place, _ in cell.shown}) == 2


def test_searches_at_a_time_are_counted(cell: Cell) -> None:
    view = NotebookView(clock=Clock())
    one, other = list(fake_run(seed=1)), list(fake_run(seed=2))

    for event in [one[0], other[0], *one[1:], *other[1:]]:
        view(event)

    lines = [words(page).strip() for _, page in cell.shown]
    assert any("1 searches finished, 1 in progress" in line for line in lines)
    assert re.fullmatch(r"\d+ s, 2 searches finished", lines[-1])


def test_words_of_a_model_are_escaped() -> None:
    shown: list[str] = []
    view = NotebookView(shown.append, Clock())
    hostile = "<script>alert(1)</script>"

    for event in fake_run(seed=1):
        if isinstance(event, Ended):
            break
        if isinstance(event, Header):
            event = dataclasses.replace(event, problem=hostile)
        elif hasattr(event, "text") and event.name in ("boundary", "node"):
            event = dataclasses.replace(event, text=hostile)
        view(event)

    assert shown and not any("<script" in page for page in shown)
    assert any("&lt;script&gt;" in page for page in shown)


def test_elsewhere_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with pytest.raises(UsageError, match="not a notebook"):
        NotebookView()


# The example


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as IPython does; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    )


def test_every_cell_of_the_example_runs(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "examples/search.ipynb").read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    codes = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in codes)

    names: dict[str, Any] = {}
    values = [run("".join(each["source"]), names) for each in codes]

    full, small, same, depths, solutions = values
    assert "<svg" in full._repr_html_() and "<svg" in small._repr_html_()
    assert same is True and small.metrics.tokens_recomputed > 0
    assert small.metrics.peak_tokens < full.metrics.peak_tokens
    assert depths[0] == (1, 0) and len(solutions) == 3
    assert "recomputed" in capsys.readouterr().out
    assert "searches finished" in words(cell.shown[-1][1])
