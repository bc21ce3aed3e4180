"""The page in a real browser: what it shows, how it is moved, and that text of a trace stays
inert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Frame
from support.chromium import MISSING, Browser, Page, chromium, program
from support.fake_run import fake_run, header, tick

from arbor.events import (
    KV,
    Answered,
    Boundary,
    Ended,
    Event,
    Forwarded,
    Opened,
)
from arbor.measure.evaluation.page import index_page
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.write import to_line
from arbor.view import html_page, notebook_frame, read_page_trace, write_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(program() is None, reason=MISSING)]

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'>\u2028\u2029<!--"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    return browser.page()


@pytest.fixture
def page(tab: Page) -> Page:
    """The module's tab, emptied: every test opens a file of its own in it."""
    tab.blank()
    return tab


def written(path: Path, events: Iterator[Event] | list[Event]) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in events:
            writer(event)
    return path


def shown(*traces: Path) -> Path:
    """The page of one trace or two, written next to the first."""
    return write_page(traces[0].with_suffix(".html"), *map(read_page_trace, traces))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "run.arbor.jsonl", fake_run(seed=6, rounds=20))


def cursor(page: Page) -> int:
    event = page.evaluate("arbor.current.event")
    assert isinstance(event, int)
    return event


def types(trace: Path) -> list[str]:
    return [event.name for event in read_trace(trace).events]


def text(page: Page | Frame, selector: str) -> str:
    found = page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
    assert isinstance(found, str)
    return found


def is_seen(page: Page, selector: str) -> bool:
    return bool(page.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()"))


# Opening


def test_it_opens_without_an_error_and_asks_for_nothing_but_itself(page: Page, trace: Path) -> None:
    html = shown(trace)

    page.open(html)
    page.settle()

    assert page.errors == []
    assert page.requests == [html.resolve().as_uri()]
    assert text(page, "#problem") == "4 5 6 10"


def states_of(trace: Path, chosen: list[int]) -> dict[int, dict[str, Any]]:
    """The Python fold after some events, in the form of the page's own."""
    replay, states = Replay(), {}
    for number, _ in enumerate(replay.steps(read_trace(trace))):
        if number in chosen:
            states[number] = {
                "event": number,
                "blocks": [
                    {
                        "id": block.id,
                        "tokens": block.tokens,
                        "device": block.resident,
                        "stored": block.stored,
                        "state": str(block.state),
                        "value": block.value,
                    }
                    for block in replay.blocks.values()
                ],
                "running": list(replay.running),
                "device": replay.kv.device,
                "host": replay.kv.host + replay.kv.disk,
                "compressed": replay.kv.compressed,
            }
    return states


def test_its_state_is_that_of_the_python_fold_where_lower_tiers_take_tokens(
    page: Page, tmp_path: Path
) -> None:
    golden = Path(__file__).parent / "golden" / "tot_tiers.arbor.jsonl"
    trace = Path(shutil.copy(golden, tmp_path))
    handed = '"discard","i":{0},"t":9,"nodes":[[2,1]],"taken":[[3,1]],"kv":'
    lines = trace.read_text(encoding="utf-8").splitlines()
    place = next(at for at, line in enumerate(lines) if '"e":"discard"' in line)
    kv = json.loads(lines[place])["kv"]
    lines.insert(place + 1, '{"e":' + handed.format(place + 1) + json.dumps(kv) + "}")
    trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
    events = range(len(types(trace)))
    states = states_of(trace, list(events))
    assert any(block["stored"] for state in states.values() for block in state["blocks"])

    page.open(shown(trace))

    for number in events:
        assert page.evaluate(f"arbor.seek({number}), arbor.state()") == states[number], number


# Hostile and damaged traces


def test_hostile_text_is_inert(page: Page, tmp_path: Path) -> None:
    events: list[Event] = [
        header(problem=HOSTILE, config={"controller": {"name": HOSTILE}, HOSTILE: HOSTILE}),
        Opened(0, None, 0, 0, 3, HOSTILE),
        Opened(1, 0, 0, 1, 0, ""),
        Boundary(1, (1, 2), HOSTILE, "step", -1.0, 0.5, 0.5),
        Forwarded("decode", 1, 1, 1, 1, KV(5), 5, 0.1),
        Answered(1, (0, 1), HOSTILE, 0.5, None),
        Ended("solved", 2),
    ]
    trace = written(tmp_path / "run.arbor.jsonl", events)
    with trace.open("ab") as file:
        file.write(to_line({"e": HOSTILE, "i": 7, "t": 1.0, "node": 1, "why": HOSTILE}) + b"\n")

    page.open(shown(trace))
    for panel in range(7):
        page.evaluate(f"arbor.show({panel})")
        page.settle()

    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.errors == []
    assert HOSTILE in text(page, "pre.text")


@pytest.mark.parametrize("kind", ["cut", "garbled", "headless", "orphaned"])
def test_a_damaged_trace_opens_with_a_banner(page: Page, trace: Path, kind: str) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    damaged = {
        "cut": b"".join(lines)[: len(b"".join(lines)) * 6 // 10],
        "garbled": b"".join([*lines[:9], b"\xff\x00 nonsense\n", *lines[9:]]),
        "headless": b"".join(lines[1:]),
        "orphaned": b"".join(line for line in lines if b'"node":2,' not in line),
    }
    trace.write_bytes(damaged[kind])

    page.open(shown(trace))
    page.settle()
    for event in range(0, len(types(trace)), 9):
        page.evaluate(f"arbor.seek({event}), arbor.draw()")

    assert page.errors == []
    assert is_seen(page, "#banner") and len(text(page, "#banner")) > 10
    assert page.evaluate("arbor.current.run.count") > 1


def test_a_notebook_frame_shows_it_and_is_shut_off(page: Page, trace: Path, tmp_path: Path) -> None:
    outer = tmp_path / "notebook.html"
    frame = notebook_frame(html_page(read_page_trace(trace)))
    outer.write_text(
        f"<!doctype html><html data-ready='0'><meta charset='utf-8'>{frame}", encoding="utf-8"
    )

    page.open(outer)

    inside = page.frame()
    assert page.errors == []
    assert text(inside, "#problem") == "4 5 6 10"
    assert inside.evaluate("(arbor.setTheme('dark'), arbor.theme)") == "dark", "without a storage"
    assert inside.evaluate("window.origin") == "null"


# Keys, mouse and address


def test_keys_move_the_cursor(page: Page, trace: Path) -> None:
    kinds = types(trace)
    last = len(kinds) - 1
    page.open(shown(trace))

    page.press("End")
    assert cursor(page) == last
    page.press("Home")
    assert cursor(page) == 0
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert cursor(page) == 2
    page.press("ArrowLeft")
    assert cursor(page) == 1
    page.press("Shift+ArrowRight")
    assert cursor(page) == 51
    page.press("End")
    assert cursor(page) == last


# Two runs


def test_two_equal_runs_are_said_to_be_equal_and_shown_at_one_moment(
    page: Page, trace: Path, tmp_path: Path
) -> None:
    run = list(read_trace(trace).events)
    again = written(tmp_path / "again.arbor.jsonl", run)
    page.open(shown(trace, again))
    page.settle()

    said = text(page, "#panels > :last-child p")
    assert "The trees are equal" in said and "So are all events, times aside." in said
    for event in range(0, len(run), 7):
        page.evaluate(f"arbor.seek({event}, {event % 2})")
        assert page.evaluate("arbor.panes.map((pane) => pane.event)") == [event, event]


def test_runs_whose_kv_was_elsewhere_are_said_to_part_there(
    page: Page, trace: Path, tmp_path: Path
) -> None:
    run = list(read_trace(trace).events)
    at = types(trace).index("evict")
    other = written(tmp_path / "other.arbor.jsonl", [*run[:at], *run[at + 1 :]])
    page.open(shown(trace, other))
    page.settle()

    said = text(page, "#panels > :last-child p")
    assert "The trees are equal" in said and "Their events differ, as where KV was." in said
    assert said.endswith(f"A event {at} B event {at}")


# What it says at the size of a laptop

# The page of an evaluation


def sample(name: str, tokens: int) -> dict[str, Any]:
    words = {"id": name, "problem": "Which of these words is the longest one? " * 4}
    return words | {"metrics": {"tokens_generated": tokens}, "trace": f"traces/{name}.gz"}


def samples_page(folder: Path) -> Path:
    rows = [sample("b", 9), sample("a", 1200), sample("c", 40)]
    page = folder / "index.html"
    # the driver waits for this mark
    text = index_page("run", [], rows).replace("<html", "<html data-ready='0'", 1)
    page.write_text(text, encoding="utf-8")
    return page


def test_an_evaluation_is_sorted_by_a_click(page: Page, tmp_path: Path) -> None:
    page.open(samples_page(tmp_path))

    def order_after(column: int) -> list[str]:
        page.evaluate(f"document.querySelectorAll('th button')[{column}].click()")
        found = page.evaluate(
            "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].textContent)"
        )
        assert isinstance(found, list)
        return found

    assert order_after(0) == ["a", "b", "c"]
    assert order_after(0) == ["c", "b", "a"]
    assert order_after(5) == ["b", "c", "a"], "numbers are sorted as numbers"
    assert page.errors == []


# How it looks


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page: Page, trace: Path, theme: str) -> None:
    page.open(shown(trace), f"#theme={theme}")
    colours: dict[str, Any] = page.evaluate("arbor.colours")

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        lighter, darker = sorted((luminance(colours[one]), luminance(colours[other])), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for ink, ground in (
        ("ink", "paper"),
        ("ink", "raised"),
        ("ink", "gone"),
        ("muted", "paper"),
        ("muted", "raised"),
        ("muted", "gone"),
        ("on-active", "active"),
        ("on-idle", "idle"),
        ("on-host", "host"),
        ("budget", "paper"),
        ("mark", "paper"),
        ("full", "paper"),
    ):
        assert contrast(ink, ground) >= 4.5, (ink, ground)
    assert contrast("active", "idle") >= 1.8


def test_every_control_has_a_name(page: Page, trace: Path) -> None:
    page.open(shown(trace))
    page.settle()
    page.send("Accessibility.enable")

    tree = page.send("Accessibility.getFullAXTree")["nodes"]

    roles = {"button", "slider", "searchbox", "combobox", "tab", "img", "spinbutton"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored") and node["role"]["value"] in roles
    ]
    assert len(named) > 20
    assert [role for role, name in named if not name.strip()] == []
