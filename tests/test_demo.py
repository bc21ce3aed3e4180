"""``arbor demo``: a search that shows something, whatever the built-in model is."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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

SCRIPTS = Path(__file__).parents[1] / "scripts"


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


def test_an_answer_is_worth_more_than_rehydrations(attempts: Attempts, tmp_path: Path) -> None:
    answered = Found("24", 0)
    attempts({5: Found(None, 9), 6: Found(None, 0), 7: answered, 8: Found(None, 2)})

    assert search(Output(quiet=True), tmp_path, 5) is answered


def test_no_attempt_begins_when_time_is_up(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = Found(None, 0)
    attempts({1: only})
    monkeypatch.setattr(demo_module, "ENOUGH_S", -1.0)

    assert search(Output(quiet=True), tmp_path, 1) is only


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


def test_a_program_reads_the_solution(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr(demo_module, "ATTEMPTS", 1)

    code = main(["demo", "--json", "-o", str(page)])

    document = json.loads(capsys.readouterr().out)
    assert code in (0, 3)
    assert document["schema"] == "arbor.demo/1" and document["path"] == str(page)
    assert document["solution"]["problem"] == demo_module.PROBLEM
    assert page.is_file()


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


@pytest.mark.parametrize("display", ["plain", "none"])
def test_a_show_is_only_for_a_live_display(
    attempts: Attempts, tmp_path: Path, display: Literal["plain", "none"]
) -> None:
    found = Found("24", 1)
    attempts({1: found})  # it has no stream: asking for one fails

    assert search(Output(display=display), tmp_path, 1) is found


def test_the_readmes_picture_is_of_todays_demo(tmp_path: Path) -> None:
    """`python scripts/picture.py` makes it again."""
    script = runpy.run_path(str(SCRIPTS / "picture.py"))
    solution = search(Output(quiet=True), tmp_path, demo_module.FIRST_SEED)
    metrics = solution.metrics

    shown = script["figures_in"](script["PICTURE"].read_bytes())

    assert shown == script["figures_of"](metrics)
    assert {"rehydrations", "tokens_recomputed"} <= set(shown)


def test_a_picture_carries_its_figures_and_stays_a_picture() -> None:
    script = runpy.run_path(str(SCRIPTS / "picture.py"))
    picture = script["PICTURE"].read_bytes()
    pixels = [each for each in script["chunks"](picture) if each[0] == b"IDAT"]

    changed = script["with_figures"](picture, {"blocks": 7})

    assert script["figures_in"](changed) == {"blocks": 7}
    assert [each for each in script["chunks"](changed) if each[0] == b"IDAT"] == pixels
    assert script["figures_in"](script["with_figures"](picture, {})) == {}


def test_help_imports_no_torch_and_shows_three_examples() -> None:
    code = (
        "import sys; from arbor.cli import main; main(['demo', '--help']); "
        "heavy = {'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^    arbor demo", done.stdout, re.MULTILINE)) == 3
