"""Views of runs whose texts are hostile: nothing executes, nothing reaches the terminal as control.

Pages are parsed, and have the elements and attributes of a harmless run's page and the hostile
texts as text. What a terminal gets holds no control character but those of the display itself.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import io
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.chromium import MISSING, Page, chromium, program
from support.fake_run import fake_run, header, tick
from support.hostile import CHARACTERS, LONG, MARKUP, OBEYED, TERMINAL, hostile
from support.slow_cases import every

from arbor.events import Answered, Boundary, Event, Header, Opened, Terminal, Verified
from arbor.metrics import Metrics
from arbor.run.listeners import RecordedEvents
from arbor.run.solution import Candidate, Solution, Step
from arbor.trace import TraceWriter
from arbor.view import html_page, page_trace_of, read_page_trace
from arbor.view.live import LiveView, ShowView

SEEDS = 10
# cursor movements of a live display
DISPLAY = {"\x1b[2K", "\x1b[1A", "\x1b[?25l", "\x1b[?25h", "\r"}
SEQUENCE = re.compile(f"\x1b\\[[0-9;?]*[A-Za-z]|{OBEYED.pattern}")
EVERY = (*MARKUP, *TERMINAL, *CHARACTERS, *LONG)


def hostile_run(seed: int) -> Iterator[Event]:
    """A run with hostile texts wherever a trace has texts of others."""
    draw_ = random.Random(seed)
    for event in fake_run(seed):
        if isinstance(event, Header):
            model, config = {"id": hostile(draw_), "layers": 4}, {"name": hostile(draw_)}
            event = header(
                run=hostile(draw_),
                created=hostile(draw_),
                task=hostile(draw_),
                problem=hostile(draw_, 6),
                expected=hostile(draw_),
                model=model,
                config={"controller": config, "budget": hostile(draw_), hostile(draw_): [1]},
            )
        elif isinstance(event, Opened | Boundary):
            event = dataclasses.replace(event, text=hostile(draw_, 6))
        elif isinstance(event, Terminal):
            event = dataclasses.replace(event, answer=hostile(draw_))
        elif isinstance(event, Answered):
            event = dataclasses.replace(event, text=hostile(draw_))
        elif isinstance(event, Verified):
            event = dataclasses.replace(event, verifier=hostile(draw_))
        yield event


def written(path: Path, seed: int) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in hostile_run(seed):
            writer(event)
    return path


class Elements(HTMLParser):
    """Start tags with the names of their attributes, and the text of each element of some kinds."""

    def __init__(self, page: str, collected: tuple[str, ...] = ()) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[dict[str, str | None]] = []
        self.texts: dict[str, list[str]] = {name: [] for name in collected}
        self._inside: str | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.values.append(dict(attrs))
        if tag in self.texts:
            self.texts[tag].append("")
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.texts[self._inside][-1] += data


# HTML


def embedded(page: str) -> Any:
    (packed,) = re.findall(
        r'<script type="application/octet-stream" class="run">(.*?)</script>', page
    )
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_page_has_its_own_elements_only_and_every_text_as_data(seed: int, tmp_path: Path) -> None:
    harmless = html_page(page_trace_of("run", enumerate(fake_run(seed))))
    trace = written(tmp_path / "run.arbor.jsonl", seed)
    lines = [json.loads(line) for line in trace.read_bytes().splitlines()]

    page = html_page(read_page_trace(trace))

    assert Elements(page).tags == Elements(harmless).tags
    page.encode("ascii", "xmlcharrefreplace").decode()
    for record, line in zip(embedded(page)["records"], lines, strict=True):
        ids = line.pop("ids", None)
        assert record == (line if ids is None else line | {"tokens": len(ids)})
    in_memory = html_page(page_trace_of("run", enumerate(hostile_run(seed))))
    texts = [record.get("text") for record in embedded(in_memory)["records"]]
    assert texts == [line.get("text") for line in lines]


def solution(text: str, events: Iterator[Event] | None = None) -> Solution:
    """A solution with one text wherever it has text of others."""
    recording = RecordedEvents() if events is not None else None
    for event in events or ():
        assert recording is not None
        recording(event)
    return Solution(
        id="0",
        task=text,
        problem=text,
        answer=text,
        text=text,
        score=0.5,
        correct=None,
        finish_reason="solved",
        path=(0, 1),
        steps=(Step(1, text, 0.5, 3),),
        candidates=(Candidate(1, text, 0.5, -1.0),),
        metrics=Metrics(),
        seed=0,
        config={"model": text},
        recording=recording,
    )


@pytest.mark.parametrize("text", EVERY)
def test_a_notebook_shows_a_solution_without_elements_of_its_texts(text: str) -> None:
    made = solution(text, hostile_run(3))

    shown, harmless = made._repr_html_(), solution("x", hostile_run(3))._repr_html_()

    assert Elements(shown).tags == Elements(harmless).tags
    assert shown.isprintable()
    assert not OBEYED.search(repr(made))


# The terminal


def obeyed(text: str) -> set[str]:
    """What a terminal obeys in a text, newlines and tabs excluded."""
    return set(SEQUENCE.findall(text))


@pytest.mark.parametrize("seed", every(5, range(SEEDS)))
@pytest.mark.parametrize("view", [LiveView, ShowView])
def test_a_live_view_emits_its_own_control_sequences_only(view: type[Any], seed: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    now = iter(range(10**9))
    more = {"sleep": lambda seconds: None} if view is ShowView else {}

    with view(console, clock=lambda: next(now), **more) as shown:
        for event in hostile_run(seed):
            shown(event)

    assert obeyed(file.getvalue()) <= DISPLAY
    file.getvalue().encode()


# A browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if program() is None:
        pytest.skip(MISSING)
    with chromium() as running:
        yield running.page()


@pytest.mark.slow
def test_a_browser_runs_nothing_of_a_text(tab: Page, tmp_path: Path) -> None:
    for seed in range(3):
        page = tmp_path / "page.html"
        page.write_text(html_page(page_trace_of("run", enumerate(hostile_run(seed)))), "utf-8")
        tab.blank()
        tab.open(page)
        for panel in range(7):
            tab.evaluate(f"arbor.show({panel})")
            tab.settle()
        assert tab.evaluate("window.hit === undefined && !document.querySelector('img, iframe')")
        assert tab.errors == []
