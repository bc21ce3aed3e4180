"""The run over time: folded from traces, and kept on the page of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fake_run
from test_batch import PROBLEMS, solver_of

from arbor import Solver
from arbor.events import Event, Header
from arbor.measure.evaluation.run_timeline import (
    BINS,
    run_timeline,
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
