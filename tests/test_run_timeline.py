"""The run over time: folded from traces, and kept on the page of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fake_run
from test_batch import PROBLEMS, solver_of

import arbor.measure.evaluation.run_timeline as module
from arbor import Solver
from arbor.events import Event, Header
from arbor.measure.evaluation.page import index_page
from arbor.measure.evaluation.run_timeline import (
    BINS,
    MOST_TICKS,
    RunTimeline,
    _Ticks,
    as_attributes,
    from_page,
    run_timeline,
    timeline_key,
)
from arbor.trace import TraceWriter, read_trace

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def write(
    folder: Path, name: str, after: float, seconds: float, pool: int = 0, **plan: int
) -> dict[str, Any]:
    """A row of a sample whose search began and lasted so many seconds, and its trace.

    Args:
        folder: of the run.
        name: of the sample.
        after: seconds from the beginning of the run.
        seconds: of the search, its events equally far from each other.
        pool: slots of all searches next to this one's own; 0: it is alone.
        plan: of the header.
    """
    created = (BEGAN + timedelta(seconds=after)).isoformat(timespec="milliseconds")
    events: list[Event] = []
    for event in fake_run(3):
        kv = getattr(event, "kv", None)
        if isinstance(event, Header):
            event = replace(event, created=created, kv={"budget_tokens": 200, **plan})
        elif kv is not None and pool:
            event = replace(event, kv=replace(kv, pool=kv.device + pool))
        events.append(event)
    clock = iter(place * seconds / (len(events) - 1) for place in range(len(events)))
    trace = f"traces/{name}.arbor.jsonl.gz"
    (folder / "traces").mkdir(exist_ok=True)
    with TraceWriter(folder / trace, clock=lambda: next(clock)) as writer:
        for event in events:
            writer(event)
    return {"id": name, "problem": name, "trace": trace, "correct": True, "answer": "1"}


def held(folder: Path, rows: list[dict[str, Any]]) -> int:
    """The most slots that the events report."""
    events = [event for row in rows for event in read_trace(folder / row["trace"]).events]
    slots = [event.kv for event in events if not isinstance(event, Header) and hasattr(event, "kv")]
    return max(kv.pool or kv.device for kv in slots)


def test_samples_at_a_time_have_lanes_and_share_a_budget(tmp_path: Path) -> None:
    shared = {"pool_tokens": 900}
    rows = [
        write(tmp_path, "a", 0, 10, pool=300, **shared),
        write(tmp_path, "b", 1, 3, pool=100, **shared),
        write(tmp_path, "c", 4.0, 5, pool=700, **shared),
        write(tmp_path, "d", 5, 2, **shared),
    ]
    found = run_timeline(tmp_path, rows)

    assert found is not None
    assert [(bar.row, bar.start_s, bar.seconds, bar.lane) for bar in found.bars] == [
        (0, 0.0, 10.0, 0),
        (1, 1.0, 3.0, 1),
        (2, 4.0, 5.0, 1),
        (3, 5.0, 2.0, 2),
    ]
    assert found.seconds == 10.0 and found.pauses_s == ()
    assert len(found.used) == len(found.budget) == BINS
    assert max(found.used) == held(tmp_path, rows) > 700
    assert set(found.budget) == {900}
    first = found.used[: BINS // 10]
    assert max(first) < 700, "the third had not begun"


def test_a_search_that_is_alone_holds_its_own_slots(tmp_path: Path) -> None:
    rows = [write(tmp_path, "a", 0, 2), write(tmp_path, "b", 2.0, 2, budget_tokens=150)]
    found = run_timeline(tmp_path, rows)

    assert found is not None
    assert [bar.lane for bar in found.bars] == [0, 0]
    assert max(found.used) == held(tmp_path, rows)
    assert (found.budget[0], found.budget[-1]) == (200, 150)


def test_the_moment_between_two_searches_has_a_budget(tmp_path: Path) -> None:
    rows = [write(tmp_path, name, 0.53 * place, 0.5) for place, name in enumerate("abc")]
    found = run_timeline(tmp_path, rows)

    assert found is not None
    assert [bar.lane for bar in found.bars] == [0, 0, 0]
    assert found.seconds == pytest.approx(1.56) and set(found.budget) == {200}


def test_a_time_without_a_search_is_left_out(tmp_path: Path) -> None:
    rows = [write(tmp_path, "a", 0, 2), write(tmp_path, "b", 30, 2), write(tmp_path, "c", 9000, 4)]
    found = run_timeline(tmp_path, rows)

    assert found is not None
    assert found.seconds == 8.0
    assert [(bar.start_s, bar.seconds) for bar in found.bars] == [(0, 2), (2, 2), (4, 4)]
    assert found.pauses_s == (4.0,), "half a minute is too short for a pause"


def test_a_trace_that_cannot_be_read_has_no_bar(tmp_path: Path) -> None:
    rows = [write(tmp_path, name, place, 2) for place, name in enumerate("abcdef")]
    (tmp_path / rows[0]["trace"]).write_bytes(b"")
    (tmp_path / rows[1]["trace"]).write_bytes(b"not a trace\n")
    (tmp_path / rows[2]["trace"]).unlink()
    rows[3]["trace"] = None
    rows[4]["trace"] = "../elsewhere.gz"
    found = run_timeline(tmp_path, rows)

    assert found is not None
    assert [bar.row for bar in found.bars] == [5]
    assert run_timeline(tmp_path, rows[:5]) is None
    assert timeline_key(tmp_path, rows)
    page = index_page("run", [], rows, timeline=found, key="k")
    assert "5 of 6 samples have no readable trace and no bar." in page
    assert "drawn from traces; there is none" in index_page("run", [], rows[:5])


@pytest.mark.parametrize("end", [0.3, 0.7])
def test_a_trace_that_was_cut_off_has_a_bar_as_far_as_it_goes(tmp_path: Path, end: float) -> None:
    row = write(tmp_path, "a", 0, 10)
    path = tmp_path / row["trace"]
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * end)])
    found = run_timeline(tmp_path, [row])

    assert found is not None
    assert 0 < found.seconds < 10


def test_words_that_look_like_slots_are_none(tmp_path: Path) -> None:
    row = write(tmp_path, "a", 0, 2)
    path = tmp_path / "traces" / "b.arbor.jsonl.gz"
    words = '"kv":{"device":99999,"pool":99999}'
    with TraceWriter(path, clock=iter(range(10**6)).__next__) as writer:
        for event in read_trace(tmp_path / row["trace"]).events:
            writer(replace(event, text=words) if hasattr(event, "text") else event)
    found = run_timeline(tmp_path, [row | {"trace": "traces/b.arbor.jsonl.gz"}])

    assert found is not None
    assert max(found.used) < 1000


def test_many_values_take_bounded_memory_and_keep_the_most() -> None:
    ticks = _Ticks()
    for number in range(3 * MOST_TICKS):
        ticks.add(1e9 + number / 100, number % 1000)
    assert len(ticks.values) <= MOST_TICKS
    assert max(most for most, _, _ in ticks.values.values()) == 999
    assert max(ticks.values.values(), key=lambda each: each[1])[2] == (3 * MOST_TICKS - 1) % 1000


def test_a_page_keeps_its_timeline_while_its_traces_are_the_same(tmp_path: Path) -> None:
    rows = [write(tmp_path, "a", 0, 2), write(tmp_path, "b", 1, 2)]
    found, key = run_timeline(tmp_path, rows), timeline_key(tmp_path, rows)
    assert found is not None
    page = tmp_path / "index.html"
    page.write_text(index_page("run", [], rows, timeline=found, key=key), encoding="utf-8")

    assert from_page(page, key) == found
    rows.append(write(tmp_path, "c", 2, 2))
    assert from_page(page, timeline_key(tmp_path, rows)) is None
    assert from_page(tmp_path / "none.html", key) is None
    for damaged in ('data-run="{}"', 'data-run="x"', 'data-run="[1]"'):
        page.write_text(f'data-key="{key}" {damaged}', encoding="utf-8")
        assert from_page(page, key) is None


def test_a_timeline_survives_json_and_html() -> None:
    found = RunTimeline(1.5, (1, 2), (3, 4), (module.Bar(0, 0.0, 1.5, 2),), (0.5,))

    assert RunTimeline.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["bars"] == [[0, 0.0, 1.5, 2]]
    assert '"' not in as_attributes("k", found).replace('data-key="k"', "").replace(
        'data-run="', "", 1
    ).removesuffix('"')


# Real searches


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A folder with the traces of problems searched two at a time, and their rows."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "traces").mkdir()
    rows = [{"id": f"{n}", "trace": f"traces/{n}.arbor.jsonl.gz"} for n in range(len(PROBLEMS))]
    with Solver() as first:
        solver = solver_of(first.checkpoint)
        jobs = [
            (problem, {"trace": folder / str(row["trace"]), "budget": 0.9})
            for problem, row in zip(PROBLEMS, rows, strict=True)
        ]
        list(solver.as_completed(jobs, concurrency=2))
    yield folder, rows


def test_a_real_run_has_two_lanes_and_never_exceeds_its_budget(
    traced: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, rows = traced
    found = run_timeline(folder, rows)

    assert found is not None
    assert {bar.lane for bar in found.bars} == {0, 1}
    assert sorted(bar.row for bar in found.bars) == list(range(len(rows)))
    assert all(used <= limit for used, limit in zip(found.used, found.budget, strict=True))
    assert max(found.used) == held(folder, rows)
