"""``arbor demo``: a search that shows something, whatever the built-in model is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import arbor.solver
from arbor.cli import demo as demo_module
from arbor.cli import main
from arbor.cli.demo import search
from arbor.cli.output import Output
from arbor.metrics import Metrics
from arbor.trace import Replay, read_trace
from arbor.view.live import ShowView

pytestmark = pytest.mark.usefixtures("loaded_once")


@dataclass
class Found:
    """What a scripted attempt came to."""

    answer: str | None
    rehydrations: int
    seed: int = 0
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(rehydrations=self.rehydrations)


Attempts = Callable[[dict[int, Found]], None]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Replaces the solver by one that finds what is scripted for each seed."""

    def script(outcomes: dict[int, Found]) -> None:
        class Scripted:
            def __init__(self, **settings: Any) -> None:
                self.settings = settings

            def __enter__(self) -> Scripted:
                return self

            def __exit__(self, *error: object) -> None:
                return None

            def describe(self) -> Any:
                return type("Info", (), {"parameters": 10**9})

            def plan(self, problem: str) -> Any:
                return type("Plan", (), {"enough_tokens": 100})

            def solve(self, problem: str, *, seed: int, trace: Path) -> Found:
                assert self.settings["budget"] == "100tok"
                return outcomes[seed]

        monkeypatch.setattr(arbor.solver, "Solver", Scripted)

    return script


def test_the_first_search_with_an_answer_and_rehydrations_is_shown(
    attempts: Attempts, tmp_path: Path
) -> None:
    good = Found("24", 3)
    attempts({1: Found(None, 5), 2: Found("24", 0), 3: good})

    assert (
        search(Output(quiet=True), tmp_path, 1) is good
    )  # seed 4 has no script: asking for it fails


def test_the_demo_writes_a_page_of_a_search_within_its_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    traces: list[Path] = []
    real = demo_module.search

    def kept(output: Output, folder: Path, seed: int) -> Any:
        solution = real(output, tmp_path, seed)
        traces.append(Path(solution.trace_path or ""))
        return solution

    monkeypatch.setattr(demo_module, "search", kept)

    code = main(["demo"])

    out = capsys.readouterr().out
    replay = Replay.of(read_trace(traces[0]))
    metrics = replay.metrics()
    assert code == (0 if replay.answered and replay.answered.text else 3)
    assert replay.problems == []
    assert metrics.evictions > 0 and metrics.peak_tokens <= metrics.budget_tokens
    assert metrics.budget_tokens < metrics.tree_tokens
    assert f"{metrics.evictions:,} evictions" in out and "arbor-demo.html" in out
    assert [line.split()[0] for line in out.splitlines()] == [
        "problem",
        "answer",
        "KV",
        "cost",
        "page",
    ]
    page = (tmp_path / "arbor-demo.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and page.count('class="run"') == 1


def test_a_terminal_sees_the_tree_grow_and_kv_leave_and_return(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(
        file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None
    )
    waits: list[float] = []
    monkeypatch.setattr(Output, "console", lambda self, stream=None: screen)
    monkeypatch.setattr(ShowView.__init__, "__defaults__", (lambda: 0.0, waits.append))

    code = main(["demo", "--display", "live", "-o", str(tmp_path / "page.html")])

    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    frames = [int(blocks) for blocks in re.findall(r"([\d,]+) blocks  ", shown)]
    assert code in (0, 3)
    assert len(frames) > 20 and frames[0] < frames[-1], "the tree grows"
    assert " of budget" in shown
    assert re.search(r"leave   \d+ tokens of #\d+.* \((pressure|transition)\)", shown)
    assert re.search(r"return  \d+ tokens of #\d+.*, computed again", shown)
    assert sum(waits) > 0
    assert "page.html" in capsys.readouterr().out
