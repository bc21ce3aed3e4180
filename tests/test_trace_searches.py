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
    IN_PIECES,
    MODES,
    POLICIES,
    PREEMPTED,
    TASKS,
    Model,
    Search,
    model,
)

from arbor.events import KV, Boundary, Detail, Evicted, Forwarded, Opened, Rehydrated
from arbor.trace import Replay, Trace, read_trace
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


def moved_while_open(trace: Trace) -> int:
    """Number of evictions and rehydrations of a block before its boundary."""
    opened: set[int] = set()
    found = 0
    for event in trace.events:
        if isinstance(event, Opened) and event.parent is not None:
            opened.add(event.node)
        elif isinstance(event, Boundary):
            opened.discard(event.node)
        elif isinstance(event, Evicted | Rehydrated):
            found += sum(node in opened for node, _ in event.nodes)
    return found


def pieces(trace: Trace) -> int:
    """Number of forward passes that computed the prompt."""
    return sum(isinstance(e, Forwarded) and e.kind == "prefill" for e in trace.events[:20])


def test_a_block_may_lose_tokens_before_its_boundary(sapling: Model, tmp_path: Path) -> None:
    trace = read_trace(sapling.trace(PREEMPTED, tmp_path / "run.arbor.jsonl"))

    replay = Replay.of(trace)

    assert moved_while_open(trace) > 0
    assert replay.problems == []


def test_a_prompt_longer_than_the_budget_is_computed_in_pieces(
    sapling: Model, tmp_path: Path
) -> None:
    trace = read_trace(sapling.trace(IN_PIECES, tmp_path / "run.arbor.jsonl"))

    replay = Replay()
    held = []
    for event in replay.steps(trace):
        if isinstance(getattr(event, "kv", None), KV) and not replay.open_blocks:
            held.append((replay.blocks[0].resident, replay.kv.device))
        if replay.running:
            break
    replay = Replay.of(trace)

    assert pieces(trace) > 2
    assert all(resident == device for resident, device in held) and len(held) > 2
    assert replay.problems == []


# to shrink takes minutes
@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(search=SEARCHES)
def test_the_trace_of_any_search_is_consistent(
    sapling: Model, tmp_path_factory: pytest.TempPathFactory, search: Search
) -> None:
    check(sapling, tmp_path_factory.mktemp("runs"), search)


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
@given(search=SEARCHES)
def test_the_traces_of_many_searches_are_consistent(
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
