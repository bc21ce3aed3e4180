"""The trace of any search is consistent: tasks, controllers, policies, budgets, interruptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.searches import (
    CONTROLLERS,
    MODES,
    POLICIES,
    TASKS,
    Model,
    Search,
    model,
)

from arbor.events import Detail
from arbor.trace import Replay, read_trace
from arbor.trace.repair import repair_trace
from arbor.tree import NodeState

SEARCHES = st.builds(
    Search,
    task=st.sampled_from(TASKS),
    controller=st.sampled_from(CONTROLLERS),
    policy=st.sampled_from(POLICIES),
    kept=st.sampled_from(MODES),
    share=st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.4, 1.0]),
    depth=st.integers(1, 3),
    step_tokens=st.sampled_from([4, 12, 24]),
    seed=st.integers(0, 1000),
    detail=st.sampled_from(get_args(Detail)),
    max_tokens=st.sampled_from([None, None, 40, 100]),
    stop_at=st.none() | st.integers(1, 150),
)


@pytest.fixture(scope="module")
def sapling() -> Iterator[Model]:
    with model() as loaded:
        yield loaded


# to shrink takes minutes
@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(search=SEARCHES)
def test_the_trace_of_any_search_is_consistent(
    sapling: Model, tmp_path_factory: pytest.TempPathFactory, search: Search
) -> None:
    check(sapling, tmp_path_factory.mktemp("runs"), search)


def check(sapling: Model, folder: Path, search: Search) -> None:
    """Runs a search; its trace, and any first part of it once repaired, is consistent."""
    live = Replay()

    path = sapling.trace(search, folder / "run.arbor.jsonl", listeners=[live])

    trace = read_trace(path)
    replay = Replay.of(trace)
    assert replay.problems == []
    assert live.problems == []
    assert all(0 <= block.resident <= block.tokens for block in replay.blocks.values())
    assert sum(b.resident for b in replay.blocks.values()) <= replay.kv.device + replay.kv.shared
    assert not any(b.state is NodeState.OPEN for b in replay.blocks.values())
    cut = folder / "cut.arbor.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[: 1 + search.seed % len(lines)]))
    repaired = repair_trace(cut)
    assert Replay.of(read_trace(repaired.path)).problems == []
