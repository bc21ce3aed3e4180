"""The page in a real browser: what it shows, how it is moved, and that text of a trace stays
inert."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import runpy
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Frame
from support.chromium import FLAGS, MISSING, Browser, Page, chromium, program
from support.fake_run import fake_run, header, tick
from support.searches import IN_PIECES, PREEMPTED, Search, model

from arbor.events import (
    KV,
    Allocated,
    Answered,
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Opened,
    Rehydrated,
    Terminal,
    Transition,
    Verified,
)
from arbor.measure.evaluation.compare import ArmRuns, compare_arms
from arbor.measure.evaluation.compare_page import compare_page
from arbor.measure.evaluation.page import ComparedRun, index_page
from arbor.measure.evaluation.run_timeline import BINS, Bar, RunTimeline
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.write import to_line
from arbor.view import html_page, notebook_frame, read_page_trace, write_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(program() is None, reason=MISSING)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
SIMULATION = runpy.run_path(str(SCRIPTS / "bench_view.py"))["Simulation"]
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


def test_it_opens_in_a_plain_headless_browser(trace: Path, tmp_path: Path) -> None:
    found = program()
    assert found is not None
    command = [found, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=8000", "--dump-dom", shown(trace).resolve().as_uri()]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert re.search(r'<html[^>]* data-ready="\d+"', done.stdout)
    assert f" / {len(types(trace)) - 1}" in done.stdout


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


@pytest.mark.parametrize("seed", range(5))
def test_its_state_is_that_of_the_python_fold(page: Page, tmp_path: Path, seed: int) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", fake_run(seed, rounds=25))
    chosen = random.Random(seed).sample(range(len(types(trace))), 50)
    states = states_of(trace, chosen)

    page.open(shown(trace))

    for number in chosen:  # in no order: forwards, backwards, across keyframes
        assert page.evaluate(f"arbor.seek({number}), arbor.state()") == states[number], number


@pytest.mark.parametrize("search", [PREEMPTED, IN_PIECES], ids=["preempted", "in pieces"])
def test_its_state_is_that_of_the_python_fold_where_blocks_lose_tokens_before_their_boundary(
    page: Page, tmp_path: Path, search: Search
) -> None:
    with model() as sapling:
        trace = sapling.trace(search, tmp_path / "run.arbor.jsonl")
    events = range(len(types(trace)))
    states = states_of(trace, list(events))

    page.open(shown(trace))

    for number in events:
        assert page.evaluate(f"arbor.seek({number}), arbor.state()") == states[number], number


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


@pytest.mark.parametrize("nodes", [1281, pytest.param(10_001, marks=pytest.mark.slow)])
def test_a_large_tree_opens_and_is_right_at_any_event(
    page: Page, tmp_path: Path, nodes: int
) -> None:
    """The simulated search of scripts/bench_view.py, which measures the time."""
    simulated = SIMULATION(nodes, seed=3)
    trace = written(tmp_path / "run.arbor.jsonl", simulated.events())
    last = len(types(trace)) - 1
    chosen = [last, 0, *random.Random(nodes).sample(range(last), 4)]
    states = states_of(trace, chosen)
    assert len(states[last]["blocks"]) == nodes

    page.open(shown(trace))
    page.settle()

    for number in chosen:
        assert page.evaluate(f"arbor.seek({number}), arbor.draw(), arbor.state()") == states[number]
    page.press("End")
    assert cursor(page) == last
    page.press("Home")
    assert cursor(page) == 0
    assert page.errors == []


def test_the_fold_is_right_across_keyframes(page: Page, tmp_path: Path) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", fake_run(7, rounds=90))
    last = len(types(trace)) - 1
    assert last > 3 * 256, "the run has several keyframes"

    page.open(shown(trace))
    forwards = page.evaluate(
        f"Array.from({{length: {last + 1}}}, (_, i) => (arbor.seek(i), JSON.stringify(arbor.state())))"
    )
    backwards = page.evaluate(
        f"Array.from({{length: {last + 1}}}, (_, i) => (arbor.seek({last} - i), JSON.stringify(arbor.state())))"
    )

    assert forwards == backwards[::-1]
    assert len(set(forwards)) == last + 1


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


def test_a_whole_trace_has_no_banner(page: Page, trace: Path) -> None:
    page.open(shown(trace))

    assert not is_seen(page, "#banner")


def test_a_trace_without_blocks_opens(page: Page, tmp_path: Path) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", [header(), Ended("exhausted", 0)])

    page.open(shown(trace))
    for key in ("h", "a", "r", "f", "m", "m", "Home"):
        page.press(key)

    assert page.errors == []


def test_events_of_unknown_types_are_shown_by_their_fields(page: Page, trace: Path) -> None:
    record = {
        "e": "retain",
        "i": 0,
        "t": 9.0,
        "policy": "new",
        "nodes": [1, 2],
        "score": [0.25, 0.5],
    }
    record |= {"reason": {"1": "far away", "2": "near"}}
    with trace.open("ab") as file:
        file.write(to_line(record) + b"\n")

    page.open(shown(trace), f"#e={len(types(trace)) - 1}&tab=3")
    page.settle()
    listed = text(page, ".space")
    page.evaluate("arbor.select(1)")
    page.settle()
    panel = text(page, "#panel-0")

    assert "retain" in listed and "policy=new" in listed
    assert "far away" in panel and "0.25" in panel and "near" not in panel


def anything(draw: random.Random, depth: int = 0) -> Any:
    """Some JSON value; block ids are among its numbers."""
    simple = (None, True, -1, 0, 1, 2, 3, 10**18, 0.5, -1e300, "", "a\n", HOSTILE, "__proto__")
    if depth > 2 or draw.random() < 0.5:
        return draw.choice(simple)
    if draw.random() < 0.6:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = ("node", "1", "__proto__", "toString", "x")
    return {draw.choice(keys): anything(draw, depth + 1) for _ in range(draw.randrange(3))}


@pytest.mark.parametrize("seed", range(2))
def test_no_event_of_a_later_version_breaks_it(page: Page, trace: Path, seed: int) -> None:
    draw = random.Random(seed)
    fields = ("node", "nodes", "leaves", "path", "keep", "text", "kv", "score", "reason", "dur")
    names = ("retain", "demote", "offload", "toString", "__proto__", "")
    known = [json.loads(line) for line in trace.read_bytes().splitlines()]
    records = []
    for record in known:
        # what this version knows has fields that it does not know
        records.append(record | {f"new_{draw.choice(fields)}": anything(draw)})
        if draw.random() < 0.5:
            extra = {name: anything(draw) for name in draw.sample(fields, 4)}
            records.append(
                {"e": draw.choice(names), "i": 0, "t": draw.choice((-1, 0.5, 1e9))} | extra
            )
    trace.write_bytes(b"".join(to_line(record) + b"\n" for record in records))
    html = shown(trace)
    assert len(read_page_trace(trace).records) > len(known) * 1.2, "they are in the page"

    page.open(html)
    for panel in range(7):
        page.evaluate(f"arbor.show({panel})")
        for event in range(panel, len(records) - 20, 37):
            page.evaluate(f"arbor.seek({event}), arbor.select({event} % 8), arbor.draw()")

    assert page.errors == []
    assert page.evaluate("window.hit") is None


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


@pytest.mark.parametrize("width", [500, 700, 880, 920, 1400])
def test_a_notebook_frame_has_room_for_the_controls(
    page: Page, trace: Path, tmp_path: Path, width: int
) -> None:
    outer = tmp_path / "notebook.html"
    frame = notebook_frame(html_page(read_page_trace(trace)))
    outer.write_text(
        f"<!doctype html><html data-ready='0'><meta charset='utf-8'><body style='margin:0'>{frame}",
        encoding="utf-8",
    )

    page.open(outer, size=(width, 1200))

    inside = page.frame()
    height = inside.evaluate("innerHeight")
    assert inside.evaluate("innerWidth") == width
    for control in ("#map-bar", "#slide", "#play-bar"):
        bottom = inside.evaluate(
            f"document.querySelector('{control}').getBoundingClientRect().bottom"
        )
        assert bottom <= height, control


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


@pytest.mark.parametrize(("key", "kind"), [("p", "pressure"), ("r", "rehydrate")])
def test_keys_jump_to_what_moved_kv(page: Page, trace: Path, key: str, kind: str) -> None:
    places = [number for number, name in enumerate(types(trace)) if name == kind]
    assert len(places) > 1, "the run has two of them"
    page.open(shown(trace), "#e=0")

    page.press(key)
    first = cursor(page)
    page.press(key)
    second = cursor(page)
    page.press(f"Shift+{key.upper()}")
    back = cursor(page)

    assert [first, second, back] == [places[0], places[1], places[0]]


def test_backtracks_are_transitions_that_leave_the_path(page: Page, trace: Path) -> None:
    events = read_trace(trace).events
    parent = {event.node: event.parent for event in events if isinstance(event, Opened)}

    def above(node: int | None) -> Iterator[int]:
        while node is not None:
            yield node
            node = parent[node]

    expected = [
        number
        for number, event in enumerate(events)
        if event.name == "transition"
        and any(not set(above(leaf)) & set(event.previous) for leaf in event.leaves)  # type: ignore[union-attr]
    ]
    page.open(shown(trace), "#e=0")

    found = []
    for _ in expected:
        page.press("b")
        found.append(cursor(page))

    assert found == expected != []


def test_neither_the_first_transition_nor_going_on_below_is_a_backtrack(
    page: Page, tmp_path: Path
) -> None:
    events: list[Event] = [header(), Opened(0, None, 0, 0, 3, "prompt")]
    events += [Transition((0,), (), 0), Opened(1, 0, 0, 1, 0, ""), Opened(2, 0, 1, 1, 0, "")]
    events += [Transition((1,), (0,), 1), Transition((2,), (1,), 2), Ended("exhausted", 3)]

    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)))

    assert page.evaluate("arbor.current.run.backtracks") == [6]


def test_keys_walk_the_tree(page: Page, trace: Path) -> None:
    children = [e.node for e in read_trace(trace).events if isinstance(e, Opened) and e.parent == 0]
    page.open(shown(trace), "#n=0")

    walked = []
    for key in ("l", "j", "k", "h"):
        page.press(key)
        walked.append(page.evaluate("arbor.current.run.id[arbor.current.selected]"))

    assert walked == [children[0], children[1], children[0], 0]


def test_the_answer_key_selects_the_answers_block(page: Page, trace: Path) -> None:
    (answer,) = (event for event in read_trace(trace).events if isinstance(event, Answered))
    page.open(shown(trace), "#n=0")

    page.press("a")

    assert page.evaluate("arbor.current.run.id[arbor.current.selected]") == answer.node


def test_keys_in_a_field_are_text(page: Page, trace: Path) -> None:
    page.open(shown(trace), "#e=5")

    page.press("/")
    page.press("r")

    assert page.evaluate("document.getElementById('filter').value") == "r"
    assert cursor(page) == 5


def test_playing_moves_on_and_stops_at_the_end(page: Page, trace: Path) -> None:
    page.open(shown(trace), "#e=0")
    page.evaluate("document.getElementById('speed').value = '16'")

    page.press("Space")
    page.wait("arbor.current.event > 0")
    page.wait("!arbor.playing")

    assert cursor(page) == len(types(trace)) - 1


def test_a_click_on_the_strip_seeks(page: Page, trace: Path) -> None:
    page.open(shown(trace))
    box = page.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])(arbor.current.strip.canvas.getBoundingClientRect())"
    )
    last = len(types(trace)) - 1
    x = page.evaluate(f"arbor.current.strip.x({last // 3})")

    page.click(box[0] + x + 0.4, box[1] + 30)

    assert abs(cursor(page) - last // 3) <= 1


def test_the_wheel_zooms_a_drag_pans_and_a_click_selects(page: Page, trace: Path) -> None:
    page.open(shown(trace), "#n=0")
    where = """(() => { const map = arbor.current.map, box = map.canvas.getBoundingClientRect(), block = 3;
      return [box.x + map.sx(map.x0(block)) + 3, box.y + map.sy(map.layout.row[block] + 0.5)]; })()"""
    view = "({...arbor.current.map.view})"

    page.click(*page.evaluate(where))
    selected = page.evaluate("arbor.current.selected")
    before = page.evaluate(view)
    page.wheel(400, 300, by=-200)
    page.wait(f"arbor.current.map.view.ky > {before['ky']}")
    zoomed = page.evaluate(view)
    page.drag((400, 300), (360, 330))
    panned = page.evaluate(view)
    page.press("f")

    assert selected == 3
    assert zoomed["kx"] == before["kx"]
    assert panned["x"] > zoomed["x"] and panned["y"] < zoomed["y"]
    assert page.evaluate("arbor.current.selected") == 3, "a drag is not a click"
    assert page.evaluate(view) == before


def test_the_address_keeps_event_and_block(page: Page, trace: Path) -> None:
    html = shown(trace)
    page.open(html)
    page.evaluate("arbor.seek(17), arbor.select(2)")
    page.press("m")

    page.wait("location.hash === '#e=17&n=2&m=icicle'")
    page.blank()
    page.open(html, "#e=17&n=2&m=icicle")

    assert cursor(page) == 17
    assert page.evaluate("[arbor.current.selected, arbor.mode]") == [2, "icicle"]


@pytest.mark.parametrize("address", ["#e=99999&n=99999", "#e=-1", "#t=9&m=x&x=y&tab=99", "#%%%"])
def test_a_wrong_address_does_no_harm(page: Page, trace: Path, address: str) -> None:
    page.open(shown(trace), address)
    page.settle()

    assert page.errors == []
    assert 0 <= cursor(page) < len(types(trace))


@pytest.mark.parametrize(
    ("asked", "test"),
    [
        ("#4", "run.id[block] === 4"),
        ("thought", "run.text(block).includes('thought')"),
        ("v>0.5", "state.value[block] > 0.5"),
        ("v<=0.5", "state.value[block] <= 0.5"),
        ("pruned", "state.state[block] === 3"),
        ("tier:gone", "state.tokens[block] > 0 && state.device[block] === 0"),
        ("answer", "run.answerPath[block] === 1"),
        ("running", "state.active[block] === 1"),
    ],
)
def test_blocks_are_found(page: Page, trace: Path, asked: str, test: str) -> None:
    page.open(shown(trace))
    expected = page.evaluate(
        f"""(() => {{ const {{run, state}} = arbor.current;
          return Array.from({{length: run.count}}, (_, block) => block).filter((block) => {test}); }})()"""
    )
    assert 0 < len(expected) < page.evaluate("arbor.current.run.count"), (
        "it selects some blocks only"
    )

    page.evaluate(f"arbor.setFilter({json.dumps(asked)})")

    assert page.evaluate("arbor.current.hits") == expected
    assert text(page, "#found") == str(len(expected))


def test_the_list_of_events_is_filtered_by_type(page: Page, trace: Path) -> None:
    kinds = types(trace)
    page.open(shown(trace), "#tab=3")
    page.settle()

    page.evaluate(
        "[...document.querySelectorAll('button.filter')].find((b) => b.textContent.startsWith('node')).click()"
    )
    page.settle()

    assert page.evaluate("arbor.panels[2].shown.length") == len(kinds) - kinds.count("node")


def test_regret_counts_what_was_given_up_and_needed_again(page: Page, tmp_path: Path) -> None:
    events: list[Event] = [
        header(),
        Opened(0, None, 0, 0, 10, "prompt"),
        Evicted("pressure", ((0, 6),), KV(4)),
        Forwarded("decode", 1, 1, 1, 1, KV(4), 10, 0.1),
    ]
    events += [Rehydrated(((0, 6),), "recompute", KV(10)), Ended("exhausted", 1)]
    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)), "#tab=4")
    page.settle()

    said = text(page, "#panel-3")
    page.evaluate(
        "(() => { const field = document.querySelector('.within input'); field.value = 1; field.dispatchEvent(new Event('input')); })()"
    )

    assert "6 tokens returned within 100 events: 100 % of 6 evicted." in said
    assert "0 tokens returned within 1 event: 0 %" in text(page, "#panel-3")


def test_an_exit_strip_shows_where_verification_left(page: Page, trace: Path) -> None:
    record = {"e": "verify", "i": 0, "t": 9.0, "verifier": "self", "nodes": [1], "values": [0.5]}
    record |= {
        "asked": 1,
        "elapsed_s": 0.1,
        "exit_layer": [2],
        "layers": 4,
        "entropy": [[3.0, 2.0, 0.5]],
    }
    with trace.open("ab") as file:
        file.write(to_line(record) + b"\n")

    page.open(shown(trace), f"#e={len(types(trace))}&n=1")
    page.settle()

    cells = page.evaluate(
        "[...document.querySelectorAll('.exits i')].map((cell) => cell.className)"
    )
    assert cells == ["", "", "exit", "skipped"]


def test_the_decision_of_a_retention_policy_appears_at_its_block(
    page: Page, tmp_path: Path
) -> None:
    events: list[Event] = [header(), Opened(0, None, 0, 0, 15, "prompt")]
    signals = {"score": [0.2403], "last_used": [1234], "next_use": [None]}
    events += [Allocated("arborkv", "pressure", 25, 3, ((0, 15, 9),), signals, 0.001)]
    events += [Evicted("pressure", ((0, 6),), KV(9)), Ended("exhausted", 1)]

    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)), "#n=0")
    page.settle()

    shown_text = text(page, "#panel-0")
    assert "arborkv" in shown_text and "9 of 15 tokens" in shown_text and "0.240" in shown_text
    assert "25 for 3 blocks" in shown_text
    assert re.search(r"score\s*0\.240\s*last read\s*1,234\s*next recorded read\s*none", shown_text)
    page.evaluate("arbor.seek(1)")
    page.settle()
    assert "arborkv, " not in text(page, "#panel-0"), "it has not decided yet"


def test_a_trace_without_words_has_an_answer_that_is_left_out(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with TraceWriter(path, clock=tick(), text="none") as writer:
        for event in fake_run(6):
            writer(event)

    page.open(shown(path))
    page.evaluate("arbor.seek(1e9), arbor.draw()")  # the end: the page opens before it

    for panel in range(7):
        page.evaluate(f"arbor.show({panel})")
        page.settle()
        assert "no answer" not in page.evaluate("document.body.innerText")
    assert "(left out)" in text(page, "#outcome")
    assert text(page, "#panel-4").count("(left out)") == 2, "the answer, and that of its path"


def test_a_trace_without_words_and_without_an_answer_has_none(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with TraceWriter(path, clock=tick(), text="none") as writer:
        for event in fake_run(6):
            if isinstance(event, Answered):
                event = Answered(None, (), None, 0.0, None)
            writer(event)

    page.open(shown(path))
    page.settle()

    assert text(page, "#outcome") == "no answer"


def test_tokens_on_the_host_have_a_strip_of_their_own(page: Page, tmp_path: Path) -> None:
    plain = written(tmp_path / "plain.arbor.jsonl", fake_run(6))
    hosted = tmp_path / "hosted.arbor.jsonl"
    hosted.write_text(
        plain.read_text(encoding="utf-8").replace('"host":0', '"host":7'), encoding="utf-8"
    )
    tall = "arbor.current.strip.canvas.getBoundingClientRect().height"

    page.open(shown(plain))
    without = page.evaluate(tall)
    page.open(shown(hosted))

    assert page.evaluate(tall) > without + 20
    assert page.evaluate("arbor.state().host") == 7
    assert "on host" in text(page, "#legend")


# Two runs


def test_two_runs_move_together(page: Page, tmp_path: Path) -> None:
    first = written(tmp_path / "a.arbor.jsonl", fake_run(6, rounds=20))
    second = written(tmp_path / "b.arbor.jsonl", fake_run(6, rounds=20))
    lines = second.read_text(encoding="utf-8").splitlines(keepends=True)
    second.write_text("".join(lines[:1] + lines[3:]), encoding="utf-8")  # two events fewer

    page.open(shown(first, second))
    page.settle()
    page.evaluate("arbor.seek(40, 0)")
    closed = page.evaluate("arbor.panes.map(({run, event}) => run.closedAt[event])")
    page.press("End")
    ends = page.evaluate("arbor.panes.map(({run, event}) => run.events - 1 - event)")

    assert page.errors == []
    assert closed[0] == closed[1] > 0
    assert ends == [0, 0]
    assert page.evaluate(
        "arbor.panes.map(({strip}) => strip.axisEnd).every((end, _, all) => end === all[0])"
    )


def test_two_runs_say_where_they_part(page: Page, tmp_path: Path) -> None:
    first = written(tmp_path / "a.arbor.jsonl", fake_run(3))
    second = written(tmp_path / "b.arbor.jsonl", fake_run(3))
    second.write_text(
        second.read_text(encoding="utf-8").replace("thought 2\\n", "another\\n"), encoding="utf-8"
    )

    page.open(shown(first, second))
    page.settle()

    assert "The trees differ from block #2 on." in text(page, "#panel-7")


def test_equal_runs_are_reported_equal(page: Page, tmp_path: Path) -> None:
    first = written(tmp_path / "a.arbor.jsonl", fake_run(3))
    second = written(tmp_path / "b.arbor.jsonl.gz", fake_run(3))

    page.open(shown(first, second))
    page.settle()

    assert "The trees are equal" in text(page, "#panel-7")


def test_a_run_without_words_is_compared_by_its_lengths(page: Page, tmp_path: Path) -> None:
    full = written(tmp_path / "a.arbor.jsonl", fake_run(3))
    none = tmp_path / "b.arbor.jsonl"
    with TraceWriter(none, clock=tick(), text="none") as writer:
        for event in fake_run(3):
            writer(event)

    page.open(shown(full, none))
    page.settle()

    assert "the same lengths (texts are left out)" in text(page, "#panel-7")


# What it says at the size of a laptop

LAPTOP = (1400, 900)


@pytest.mark.parametrize("size", [(360, 740), (1280, 800), LAPTOP])
@pytest.mark.parametrize("nodes", [55, 193, 1281])
def test_the_answers_path_carries_its_words_at_any_size(
    page: Page, tmp_path: Path, nodes: int, size: tuple[int, int]
) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", SIMULATION(nodes, seed=3).events())
    replay = Replay.of(read_trace(trace))
    assert replay.answered is not None

    page.open(shown(trace), f"#e={len(types(trace)) - 1}&tab=2", size=size)
    page.settle()

    steps = "[...document.querySelectorAll('.step')].map((step) => step.textContent)"
    for node, step in zip(replay.answered.path[1:], page.evaluate(steps), strict=True):
        assert replay.blocks[node].text.strip() in step
        assert f"value {replay.blocks[node].value:.2f}" in step
    if size[0] == 360 or nodes > 193:
        return  # the tree has no free place for every label
    words = page.evaluate(
        "arbor.current.map.words.map((word) => ({...word, id: arbor.current.run.id[word.block]}))"
    )
    wide = page.evaluate("arbor.current.map.canvas.getBoundingClientRect().width")
    for node in replay.answered.path[1:]:
        block = replay.blocks[node]
        own = [word for word in words if word["id"] == node]
        assert any(block.text.startswith(word["text"].rstrip("…")) for word in own), node
        assert f"{block.value:.2f}" in [word["text"] for word in own]
        assert all(word["left"] < wide for word in own)
    assert any("✓ 42" in word["text"] for word in words), "the answer is in the tree"


@pytest.mark.parametrize("nodes", [193, 1281])
def test_labels_cover_neither_each_other_nor_a_bar(page: Page, tmp_path: Path, nodes: int) -> None:
    trace = written(tmp_path / "run.arbor.jsonl", SIMULATION(nodes, seed=3).events())

    page.open(shown(trace), f"#e={len(types(trace)) - 1}", size=LAPTOP)
    page.settle()

    labels = page.evaluate("arbor.current.map.chips")
    bars = page.evaluate(
        "[...arbor.current.run.order].map((block) => arbor.current.map._box(block)).map((box) =>"
        "({left: box.left, top: box.top, width: box.width, height: box.tall}))"
    )
    assert len(labels) >= 3
    for number, one in enumerate(labels):
        for other in labels[:number] + bars:
            apart = (
                one["left"] >= other["left"] + other["width"]
                or other["left"] >= one["left"] + one["width"]
                or one["top"] >= other["top"] + other["height"]
                or other["top"] >= one["top"] + one["height"]
            )
            assert apart, (one, other)


SENTENCE = "The train covers the rest of the way in three quarters of an hour, so {}. "


def prose(stop: Literal["step", "length"] = "length") -> list[Event]:
    """A search with a long prompt and thoughts of several lines; a limit cuts its only path."""
    events: list[Event] = [header(), Opened(0, None, 0, 0, 900, "prompt")]
    for node in (1, 2, 3):
        events.append(Opened(node, node - 1, 0, node, 0, ""))
        words = f"{node}. " + "\n".join(SENTENCE.format(line) for line in range(4))
        ids = tuple(range(60))
        ended = stop if node == 3 else "step"
        events.append(Boundary(node, ids, words, ended, -1.0, 0.5, 0.5))
        events.append(Verified("self", (node,), (0.25 * node,), 0, 0.0))
    events.append(Terminal(3, "2", cut=stop == "length"))
    return [*events, Answered(3, (0, 1, 2, 3), "2", 0.75, True), Ended("solved", 4)]


def test_prose_opens_as_one_text_with_values_and_cuts(page: Page, tmp_path: Path) -> None:
    page.open(shown(written(tmp_path / "run.arbor.jsonl", prose())))
    page.settle()

    panel = text(page, "#panel-1")
    assert is_seen(page, "#panel-1")
    assert cursor(page) == len(prose()) - 1, "nothing was evicted: it opens at the answer"
    for node in (1, 2, 3):
        assert f"value {0.25 * node:.2f}" in panel
    assert all(panel.count(SENTENCE.format(line).strip()) == 3 for line in range(4))
    assert "cut at the longest thought" in panel and "a limit of paths cut" in panel
    page.evaluate("document.querySelectorAll('.step .chip')[0].click()")
    page.settle()
    assert text(page, ".step.now .chip") == "#1"
    assert is_seen(page, "#panel-1") and len(text(page, "#panel-1")) == len(panel)


def test_thoughts_that_are_not_cut_have_no_mark(page: Page, tmp_path: Path) -> None:
    page.open(shown(written(tmp_path / "run.arbor.jsonl", prose("step"))))
    page.settle()

    assert page.evaluate("document.querySelectorAll('.cut').length") == 0


def test_short_thoughts_open_at_their_block(page: Page, trace: Path) -> None:
    page.open(shown(trace))
    page.settle()

    assert is_seen(page, "#panel-0") and not is_seen(page, "#panel-1")


def test_a_long_prompt_leaves_the_width_to_the_thoughts(page: Page, tmp_path: Path) -> None:
    page.open(shown(written(tmp_path / "run.arbor.jsonl", prose())))
    page.settle()

    widths = page.evaluate("[1, 2, 3].map((block) => arbor.current.map._box(block).width)")
    wide = page.evaluate("arbor.current.map.canvas.getBoundingClientRect().width")
    assert sum(widths) > 0.55 * wide
    page.press("h")
    assert page.errors == []


def test_table_and_events_have_the_whole_text(page: Page, tmp_path: Path) -> None:
    page.open(shown(written(tmp_path / "run.arbor.jsonl", prose())), "#e=3&tab=6")
    page.settle()
    assert all(text(page, ".tree").count(SENTENCE.format(line).strip()) == 3 for line in range(4))
    seen = page.evaluate(
        "[...document.querySelectorAll('.tree .says td')].every((cell) =>"
        "cell.scrollWidth <= cell.clientWidth)"
    )
    assert seen

    page.evaluate("arbor.show(2)")
    page.settle()

    assert all(SENTENCE.format(line).strip() in text(page, ".whole") for line in range(4))


def test_it_never_opens_at_a_block_that_is_not_opened_yet(page: Page, tmp_path: Path) -> None:
    events = prose()
    middle = next(at for at, event in enumerate(events) if event.name == "verify") + 1
    events[middle:middle] = [
        Evicted("pressure", ((1, 20),), KV(5)),
        Rehydrated(((1, 20),), "recompute", KV(9)),
    ]

    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)))
    page.settle()

    assert cursor(page) == middle + 1
    assert page.evaluate("arbor.current.run.id[arbor.current.selected]") == 1
    assert text(page, ".step.now .chip") == "#1"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chosen_mode_is_readable_under_the_pointer(
    page: Page, trace: Path, theme: Literal["light", "dark"]
) -> None:
    page.open(shown(trace), f"#theme={theme}")
    page.settle()
    chosen = "document.querySelector('[data-mode=icicle]')"
    box = page.evaluate(f"(({{left, top}}) => ({{left, top}}))({chosen}.getBoundingClientRect())")

    page.click(box["left"] + 8, box["top"] + 8)  # the pointer stays
    page.wait(
        f"getComputedStyle({chosen}).backgroundColor === getComputedStyle(document.body).color"
    )

    assert page.evaluate(f"{chosen}.matches(':hover')")
    assert page.evaluate(f"{chosen}.getAttribute('aria-pressed')") == "true"


def siblings(texts: list[str]) -> list[Event]:
    """A search whose only thoughts have these texts; the last one is the answer."""
    events: list[Event] = [header(), Opened(0, None, 0, 0, 3, "prompt")]
    for node, _ in enumerate(texts, start=1):
        events.append(Opened(node, 0, node - 1, 1, 0, ""))
    for node, words in enumerate(texts, start=1):
        events.append(Boundary(node, (1, 2), words, "step", -1.0, 0.5, 0.5))
        events.append(Terminal(node, words))
    last = len(texts)
    return [*events, Answered(last, (0, last), texts[-1], 0.5, True), Ended("solved", last)]


def test_equal_siblings_are_one_bar_with_their_number(page: Page, tmp_path: Path) -> None:
    events = siblings(["a + b", "a - b", "a + b", "a + b"])

    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)), "#e=99&tab=5")
    page.settle()

    drawn = page.evaluate("arbor.current.map.words.map(({text}) => text)")
    assert page.evaluate("arbor.current.map.layout.rows") == 2
    assert drawn.count("a + b ×3") == 1 and "✓ a + b" in drawn
    rows = page.evaluate(
        "[...document.querySelectorAll('#panel-4 tbody tr')].map((row) => row.lastChild.textContent)"
    )
    assert sorted(rows) == ["a + b ×3", "a - b"]
    page.press("k")
    assert page.evaluate("arbor.current.run.id[arbor.current.selected]") == 3, "each is selectable"


def test_it_opens_where_evicted_blocks_return(page: Page, trace: Path) -> None:
    events = read_trace(trace).events
    page.open(shown(trace), size=LAPTOP)
    page.settle()

    opening = events[cursor(page)]
    assert isinstance(opening, Rehydrated)
    tokens = sum(count for _, count in opening.nodes)
    assert "The search returns to" in text(page, "#now")
    assert f"{tokens} token" in text(page, "#now")

    assert is_seen(page, "#to-end")
    page.evaluate("document.querySelector('#to-end').click()")
    page.settle()
    assert cursor(page) == len(events) - 1
    assert not is_seen(page, "#to-end")


def test_a_run_without_a_return_opens_at_its_most_kv(page: Page, tmp_path: Path) -> None:
    events: list[Event] = [header(), Opened(0, None, 0, 0, 9, "prompt")]
    events += [Forwarded("prefill", 1, 1, 1, 1, KV(9), 9, 0.1)]
    events += [Evicted("close", ((0, 4),), KV(5)), Ended("exhausted", 1)]

    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)))
    page.settle()

    assert cursor(page) == 2
    assert "The most KV at once: 9 of 200 tokens" in text(page, "#now")


def test_two_runs_open_at_the_one_that_returns(page: Page, tmp_path: Path) -> None:
    events = [header(), Opened(0, None, 0, 0, 9, "prompt"), Ended("exhausted", 1)]
    plain = written(tmp_path / "a.arbor.jsonl", events)
    returning = written(tmp_path / "b.arbor.jsonl", fake_run(6, rounds=20))

    page.open(shown(plain, returning))
    page.settle()

    assert page.evaluate("arbor.active") == 1
    assert "The search returns to" in text(page, "#now")


def test_a_budget_far_above_use_leaves_the_strip(page: Page, tmp_path: Path) -> None:
    plan = {"budget_tokens": 3533, "full_tokens": 3533, "smallest_tokens": 50}
    events = [
        header(kv={**plan, "bytes_per_token": 64}) if event.name == "header" else event
        for event in fake_run(6, rounds=20)
    ]
    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)))

    used = page.evaluate("Math.max(...arbor.current.run.deviceAt)")

    assert page.evaluate("arbor.current.strip.most") <= 1.5 * used


def test_a_problem_among_others_shows_its_own_kv_and_that_of_all(
    page: Page, tmp_path: Path
) -> None:
    plan = {"budget_tokens": 200, "pool_tokens": 800, "full_tokens": 1000, "smallest_tokens": 50}
    events = []
    for event in fake_run(6, rounds=20):
        kv = getattr(event, "kv", None)
        if isinstance(event, Header):
            event = header(kv={**plan, "bytes_per_token": 64})
        elif kv is not None:
            event = replace(event, kv=replace(kv, pool=kv.device + 550))
        events.append(event)
    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)))
    page.settle()

    run = "arbor.current.run"
    end = page.evaluate(f"{run}.deviceAt.at(-1)")
    assert page.evaluate(f"{run}.poolAt.at(-1)") == end + 550
    assert page.evaluate(f"Math.max(...{run}.poolAt) - Math.max(...{run}.deviceAt)") == 550
    assert page.evaluate("arbor.current.strip.most") > 750, "the strip has room for all"
    assert page.evaluate(f"{run}.budget") == 800
    page.press("End")
    label = page.evaluate("arbor.current.strip.canvas.getAttribute('aria-label')")
    assert f"{end} of 800 tokens" in label and f"{end + 550} of all problems" in label
    assert page.errors == []


def test_a_problem_alone_shows_no_other(page: Page, trace: Path) -> None:
    page.open(shown(trace))
    page.settle()

    assert page.evaluate("arbor.current.run.shares") is False
    assert page.evaluate("arbor.current.run.poolAt.join() === arbor.current.run.deviceAt.join()")
    label = page.evaluate("arbor.current.strip.canvas.getAttribute('aria-label')")
    assert "all problems" not in label


def test_the_run_has_the_worst_case_of_full_retention(page: Page, tmp_path: Path) -> None:
    plan = {"budget_tokens": 172, "full_tokens": 3533, "smallest_tokens": 50}
    events = [
        header(kv={**plan, "bytes_per_token": 64}) if event.name == "header" else event
        for event in fake_run(6, rounds=20)
    ]
    page.open(shown(written(tmp_path / "run.arbor.jsonl", events)), "#tab=7")
    page.settle()

    panels = "".join(text(page, f"#panel-{number}") for number in range(7))

    assert "full retention, at most3,533 tokens" in panels


@pytest.mark.parametrize("wide", [1280, 1400, 1440, 1920])
def test_no_control_wraps_alone_and_no_hint_is_cut(page: Page, trace: Path, wide: int) -> None:
    page.open(shown(trace), size=(wide, 900))
    page.settle()

    for bar in ("#map-bar", "#play-bar"):
        tops = page.evaluate(
            f"[...document.querySelectorAll('{bar} > *')].map((each) => {{"
            "const box = each.getBoundingClientRect(); return (box.top + box.bottom) / 2; })"
        )
        assert max(tops) - min(tops) < 10, bar
    hint = """(() => { const input = document.getElementById('filter'), style = getComputedStyle(input);
      const pen = document.createElement('canvas').getContext('2d'); pen.font = style.font;
      return input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)
        - pen.measureText(input.placeholder).width; })()"""
    assert page.evaluate(hint) >= 0
    picked = """(() => { const select = document.getElementById('axis'), style = getComputedStyle(select);
      const pen = document.createElement('canvas').getContext('2d'); pen.font = style.font;
      return select.clientWidth - pen.measureText('seconds').width; })()"""
    assert page.evaluate(picked) >= 0


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


def test_an_evaluations_columns_are_readable_on_a_narrow_screen(page: Page, tmp_path: Path) -> None:
    page.open(samples_page(tmp_path), size=(400, 800))
    page.settle()

    widths = page.evaluate(
        "[...document.querySelector('tbody tr').cells].map((cell) => cell.getBoundingClientRect().width)"
    )
    assert min(widths[:5]) > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= 400, "the table scrolls alone"


def evaluation(folder: Path, samples: int, lanes: int = 3) -> Path:
    """The page of a run with so many samples, each of a second, and every third wrong."""
    rows, bars = [], []
    for place in range(samples):
        name = f"s{place:05}"
        row = {"id": name, "problem": f"Problem {place} of these", "answer": "1", "expected": "1"}
        row |= {"correct": place % 3 != 0, "trace": f"traces/{name}.arbor.jsonl.gz"}
        rows.append(row)
        bars.append(Bar(place, place // lanes * 1.0, 1.0, place % lanes))
    seconds = bars[-1].start_s + 1
    used = tuple(place % 500 for place in range(BINS))
    timeline = RunTimeline(seconds, used, (600,) * BINS, tuple(bars), (seconds / 2,))
    page = folder / "index.html"
    pages = {row["trace"]: f"traces/{row['id']}.html" for row in rows}
    accuracy = (0.667, 0.6, 0.7)
    text = index_page("run", [], rows, pages, accuracy=accuracy, timeline=timeline, key="k")
    page.write_text(text, encoding="utf-8")
    return page


LISTED = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].textContent)"


def test_an_evaluations_samples_are_found(page: Page, tmp_path: Path) -> None:
    page.open(evaluation(tmp_path, 1000))

    def choose(name: str, value: str) -> list[str]:
        event = "change" if name == "outcome" else "input"
        page.evaluate(f"document.getElementById('{name}').value = {value!r}")
        page.evaluate(f"document.getElementById('{name}').dispatchEvent(new Event('{event}'))")
        found = page.evaluate(LISTED)
        assert isinstance(found, list)
        return found

    assert 400 <= len(page.evaluate(LISTED)) < 1000, "the rest waits"
    assert choose("find", "problem 777") == ["s00777"], "one that waits is found"
    assert choose("find", "s0099") == [f"s{place:05}" for place in range(990, 1000)]
    assert choose("outcome", "wrong") == [f"s{place:05}" for place in range(990, 1000, 3)]
    assert page.evaluate("document.getElementById('found').textContent") == "4 of 1,000"
    choose("outcome", "")
    page.evaluate("document.querySelectorAll('th button')[0].click()")
    page.evaluate("document.querySelectorAll('th button')[0].click()")
    assert page.evaluate(LISTED) == [f"s{place:05}" for place in range(999, 989, -1)]
    choose("find", "")
    assert page.evaluate(LISTED)[0] == "s00999"
    page.wait(f"(more.scrollIntoView(), {LISTED}.length === 1000)")
    assert page.errors == [] and len(page.requests) == 1


def test_a_bar_of_the_run_is_a_link_to_its_search(page: Page, tmp_path: Path) -> None:
    page.open(evaluation(tmp_path, 30))
    page.settle()
    box = page.evaluate("(({ x, y, width }) => [x, y, width])(times.getBoundingClientRect())")
    left, wide = box[0] + 70, box[2] - 86

    def at(second: float, lane: int) -> tuple[float, float]:
        return left + wide * second / 10, box[1] + 84 + 10 + 14 * lane + 7

    page.wheel(*at(4.5, 2), 0)  # moves there
    assert page.evaluate("bar.getAttribute('href')") == "traces/s00014.html"
    assert page.evaluate("at.textContent").startswith("s00014: right, 1.0 s from 4.0 s")
    assert page.evaluate(f"document.elementFromPoint{at(4.5, 2)}.id") == "bar", "a link is there"
    page.evaluate("bar.focus()")
    page.press("ArrowRight")
    assert page.evaluate("bar.getAttribute('href')") == "traces/s00015.html"
    page.press("End")
    assert page.evaluate("bar.getAttribute('aria-label')").startswith("s00029: right")

    page.wheel(left + wide * 0.45, box[1] + 50, 0)
    assert page.evaluate("at.textContent").startswith("4.5 s: up to 40 of 600 slots, 3 in progress")
    page.drag((left + wide * 0.2, box[1] + 40), (left + wide * 0.4, box[1] + 40))
    page.settle()
    assert page.evaluate("whole.hidden") is False
    page.wheel(left + wide / 2 + 20, at(0, 0)[1], 0)
    assert page.evaluate("at.textContent").startswith("s00009: wrong, 1.0 s from 3.0 s")
    page.evaluate("whole.click()")
    assert page.evaluate("whole.hidden") is True
    assert page.errors == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_an_evaluation_has_the_viewers_colours(
    page: Page, tmp_path: Path, colours: Literal["light", "dark"]
) -> None:
    page.emulate(colours)
    page.open(evaluation(tmp_path, 5))
    page.settle()

    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 21, 26)"}[colours]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    assert page.evaluate(
        "getComputedStyle(document.querySelector('.accuracy .part')).width"
    ).startswith("426.")


def test_an_evaluation_of_ten_thousand_samples_lays_out_few_rows(
    page: Page, tmp_path: Path
) -> None:
    page.open(evaluation(tmp_path, 10_000, lanes=8), size=(1280, 800))
    page.settle()

    assert page.evaluate("document.querySelectorAll('tbody tr').length") <= 800
    assert page.evaluate("document.getElementById('more').hidden") is False
    assert page.errors == []


def compared(folder: Path) -> Path:
    """The page of a comparison of three arms on nine problems, on some of which they differ; the
    second one's searches have pages."""
    searches = folder / "arms/second/400-tokens-seed-0/traces"
    searches.mkdir(parents=True)
    for place in range(9):
        (searches / f"s{place}.html").touch()
    arms = []
    for label in ("first", "second", "third"):
        rows = {}
        for place in range(9):
            right = place < 6 if label != "second" else place % 3 == 0
            metrics = {"tokens_generated": 100 * place, "peak_tokens": 50 + place}
            rows[f"s{place}"] = {"id": f"s{place}", "problem": f"Problem {place}"} | {
                "correct": right,
                "answer": f"{label} {place}",
                "trace": f"traces/s{place}.arbor.jsonl.gz",
                "metrics": metrics,
            }
        arms.append(ArmRuns(label, 400, (0,), (f"arms/{label}/400-tokens-seed-0",), (rows,)))
    found = {"dataset": "game24", "samples": 9, "budgets": [[400, "full"]]}
    page = folder / "index.html"
    text = compare_page(found | {"table": compare_arms(arms)}, arms, folder)
    page.write_text(text, encoding="utf-8")
    return page


def test_problems_on_which_arms_differ_are_chosen_and_sorted(page: Page, tmp_path: Path) -> None:
    page.open(compared(tmp_path))
    listed = (
        "[...document.querySelectorAll('#list tbody tr')].map((row) => row.cells[0].textContent)"
    )

    def choose(outcome: str) -> list[str]:
        page.evaluate(f"document.getElementById('outcome').value = {outcome!r}")
        page.evaluate("document.getElementById('outcome').dispatchEvent(new Event('change'))")
        found = page.evaluate(listed)
        assert isinstance(found, list)
        return found

    assert choose("all right") == ["s0", "s3"]
    assert choose("none right") == ["s7", "s8"]
    assert choose("arms differ") == ["s1", "s2", "s4", "s5", "s6"]
    for _ in range(2):
        page.evaluate("document.querySelectorAll('#list th button')[4].click()")
    assert page.evaluate(listed) == ["s6", "s5", "s4", "s2", "s1"]
    href = page.evaluate("document.querySelector('#list tbody tr').cells[5].firstChild.href")
    assert href.endswith("/arms/second/400-tokens-seed-0/traces/s6.html")
    shown = page.evaluate(
        "[3, 5].map((at) => document.querySelector('#list tbody tr').cells[at].innerText)"
    )
    assert [each.split() for each in shown] == [["wrong", "first", "6"], ["right", "second", "6"]]
    assert page.evaluate("document.querySelectorAll('a[href*=\".gz\"]').length") == 0
    assert page.errors == [] and len(page.requests) == 1


def test_the_table_of_the_arms_scrolls_alone(page: Page, tmp_path: Path) -> None:
    page.open(compared(tmp_path), size=(700, 800))
    page.settle()

    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    marks = page.evaluate("document.querySelectorAll('.plot .mark').length")
    assert marks == 2 * (3 + 3), "points and the legend, in both plots"


def saved(page: Page, button: str) -> str:
    """What a button saves, as text."""
    page.evaluate("window.kept = []")
    page.evaluate(
        "URL.createObjectURL = (blob) => (blob.text().then((text) => kept.push(text)), '#')"
    )
    page.evaluate(f"[...document.querySelectorAll('button.save')].find({button}).click()")
    page.wait("kept.length === 1")
    text = page.evaluate("kept[0]")
    assert isinstance(text, str)
    return text


def test_tables_are_saved_as_csv(page: Page, tmp_path: Path) -> None:
    page.open(compared(tmp_path))
    page.evaluate(
        "((box) => (box.value = 's4', box.dispatchEvent(new Event('input'))))(document.getElementById('find'))"
    )

    listed = list(csv.reader(io.StringIO(saved(page, "(each) => each.closest('.tools')"))))
    arms = list(csv.reader(io.StringIO(saved(page, "(each) => !each.closest('.tools, .plot')"))))

    assert listed[0][:4] == ["sample", "problem", "key", "first"]
    assert [row[0] for row in listed[1:]] == ["s4"], "what is found"
    assert listed[1][3] == "right first 4"
    assert [row[0].split()[0] for row in arms] == ["arm", "first", "second", "third"]
    assert arms[2][2:4] == ["9", "33.3 (7.5 to 70.1)"]
    assert page.errors == []


def test_a_plot_is_saved_as_a_drawing_of_its_own(page: Page, tmp_path: Path) -> None:
    page.open(compared(tmp_path))

    drawing = saved(page, "(each) => each.closest('.plot')")

    (tmp_path / "plot.svg").write_text(drawing, encoding="utf-8")
    root = ElementTree.fromstring(drawing)
    words = [each.text for each in root.iter() if each.tag.endswith("}text")]
    assert {"first", "second", "third"} <= set(words)
    assert "Success by tokens generated, mean of a search" in words
    assert "var(" not in "".join(each.get("fill", "") for each in root.iter())
    marks = [each for each in root.iter() if each.get("class") == "mark"]
    assert len(marks) == 3 and all(each.get("fill", "").startswith("rgb") for each in marks)
    assert page.errors == []


def test_nothing_of_the_arms_is_clipped_on_a_laptop(page: Page, tmp_path: Path) -> None:
    page.open(compared(tmp_path), size=(1440, 900))
    page.settle()

    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
    )


def test_a_long_title_and_its_hint_fit_a_phone(page: Page, tmp_path: Path) -> None:
    path = evaluation(tmp_path, 3)
    text = path.read_text("utf-8").replace("<h1>run</h1>", f"<h1>{'data/' * 30}</h1>")
    path.write_text(text, encoding="utf-8")

    page.open(path, size=(390, 844))
    page.settle()

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("at.scrollWidth <= at.clientWidth")


def test_an_evaluation_next_to_another_one(page: Page, tmp_path: Path) -> None:
    here = [{"id": f"s{n}", "problem": "p", "correct": n < 2, "answer": "1"} for n in range(4)]
    there = {
        f"s{n}": {"correct": n % 2 == 0, "answer": "1", "trace": f"traces/s{n}.arbor.jsonl.gz"}
        for n in range(4)
    }
    pages = {row["trace"]: f"traces/{name}.html" for name, row in there.items()}
    other = ComparedRun("../other", there, pages, (0.5, 0.1, 0.9))
    text = index_page("run", [], here, accuracy=(0.5, 0.1, 0.9), other=other)
    path = tmp_path / "index.html"
    path.write_text(text.replace("<html", "<html data-ready='0'", 1), encoding="utf-8")
    page.open(path)

    for outcome, found in (
        ("only here right", ["s1"]),
        ("only there right", ["s2"]),
        ("right", ["s0", "s1"]),
        ("wrong", ["s2", "s3"]),
    ):
        page.evaluate(f"document.getElementById('outcome').value = {outcome!r}")
        page.evaluate("document.getElementById('outcome').dispatchEvent(new Event('change'))")
        assert page.evaluate(LISTED) == found
    assert page.evaluate("document.querySelectorAll('.accuracy').length") == 2
    link = page.evaluate("document.querySelector('#list tbody tr').cells[10].firstChild.href")
    assert link.endswith("/other/traces/s2.html")
    assert page.errors == []


# How it looks


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(
    page: Page, trace: Path, theme: Literal["light", "dark"]
) -> None:
    html = shown(trace)
    other = "light" if theme == "dark" else "dark"
    page.emulate(theme)
    page.open(html)
    page.evaluate("localStorage.clear()")
    page.reload()

    shown_theme = "document.documentElement.dataset.theme"
    at_first = page.evaluate(shown_theme)
    page.press("d")
    pressed = page.evaluate(shown_theme)
    kept = page.evaluate("localStorage.getItem('arbor-theme')")

    assert (at_first, pressed, kept) == (theme, other, other)
    # Chromium sends what a page stores to another process, and a page left at once may lose it
    for _ in range(5):
        time.sleep(0.2)
        page.reload()
        if page.evaluate(shown_theme) == other:
            return
        page.press("d")
    raise AssertionError("a chosen theme is not kept over a reload")


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


@pytest.mark.parametrize("count", [1, 2])
def test_it_fits_on_a_narrow_screen(page: Page, tmp_path: Path, count: int) -> None:
    traces = [written(tmp_path / f"{i}.arbor.jsonl", fake_run(3)) for i in range(count)]

    page.open(shown(*traces), size=(320, 640))
    page.settle()
    for panel in range(7 + (count > 1)):
        page.evaluate(f"arbor.show({panel})")
        page.settle()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 320, f"panel {panel} makes the page {wide} wide"

    assert page.evaluate("arbor.current.map.canvas.getBoundingClientRect().height") > 200


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


def test_the_table_lists_what_the_picture_shows(page: Page, trace: Path) -> None:
    replay = Replay.of(read_trace(trace))

    page.open(shown(trace), f"#e={len(types(trace)) - 1}&tab=6")
    page.settle()

    rows = page.evaluate(
        "[...document.querySelectorAll('.tree tbody tr:not(.says)')].map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    listed = {row[0]: row[1:4] for row in rows}
    assert listed == {
        f"#{block.id}": [
            str(block.state),
            f"{block.resident}/{block.tokens}",
            f"{block.value:.2f}" if block.verified else "–",
        ]
        for block in replay.blocks.values()
    }


def test_it_prints_in_light_colours(page: Page, trace: Path) -> None:
    page.open(shown(trace), "#theme=dark")

    printed = page.send("Page.printToPDF")["data"]

    assert len(printed) > 10_000
    assert page.errors == []
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
