"""The KV of full retention, folded from the events of a search at any budget."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor import Solver
from arbor.events import Boundary, Ended, Event, Evicted, Opened, Pressure, Pruned, Verified
from arbor.measure.replay import Recording, replay
from arbor.run.full_retention import FullRetention
from arbor.trace import read_trace

pytestmark = pytest.mark.usefixtures("loaded_once")

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.arbor.jsonl"))


def folded(events: Iterable[Event]) -> FullRetention:
    full = FullRetention()
    for event in events:
        full(event)
    return full


def by_hand(events: list[Event]) -> int:
    """The same peak, counted anew after every event."""
    most = 0
    for number in range(1, len(events) + 1):
        past = events[:number]
        gone = {node for each in past if isinstance(each, Pruned) for node in each.nodes}
        closed = [each for each in past if isinstance(each, Boundary) and each.node not in gone]
        most = max(most, sum(len(each.ids) for each in closed))
    return most


def closed(node: int, tokens: int) -> Boundary:
    return Boundary(node, tuple(range(tokens)), "", "step", 0.0, 0.5, 0.5)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden_traces_fold_to_what_a_count_by_hand_gives(path: Path) -> None:
    events = list(read_trace(path).events)

    assert folded(events).peak == by_hand(events) > 0


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=40))
def test_any_order_of_boundaries_and_prunings_folds_like_a_count_by_hand(
    blocks: list[tuple[int, bool]],
) -> None:
    events: list[Event] = [Opened(0, None, 0, 0, 7, "")]
    for node, (tokens, pruned) in enumerate(blocks, 1):
        events.append(closed(node, tokens))
        if pruned:
            events.append(Pruned((node // 2 + 1,)))
    seen: set[int] = set()
    events = [e for e in events if not (isinstance(e, Pruned) and _again(e.nodes[0], seen))]

    full = folded(events)

    assert full.peak == by_hand(events) >= full.held >= 0


def _again(node: int, seen: set[int]) -> bool:
    known = node in seen
    seen.add(node)
    return known


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.booleans()), max_size=30),
    st.lists(st.integers(0, 99), min_size=2, max_size=2, unique=True),
)
def test_blocks_that_overlap_give_one_count_whatever_the_order_of_their_ends(
    blocks: list[tuple[int, int, bool]], seeds: list[int]
) -> None:
    peaks = []
    for seed in seeds:
        draw = random.Random(seed)
        events: list[Event] = [Opened(0, None, 0, 0, 7, "")]
        growing: list[tuple[int, int]] = []
        for node, (tokens, lag, pruned) in enumerate(blocks, 1):
            events.append(Opened(node, 0, node - 1, 1, 0, ""))
            growing.append((node, tokens))
            # what is pruned has ended long before; the others end at any time
            late = [each for each in growing if each[0] >= node - lag]
            for each in [each for each in growing if each not in late or draw.random() < 0.5]:
                growing.remove(each)
                events.append(closed(*each))
            if pruned and node > 4:
                events.append(Pruned((node - 4,)))
        events += [closed(*each) for each in growing]
        peaks.append(folded(events).peak)
        closing = [e for e in events if isinstance(e, Opened)][1:]
        in_step = [closed(e.node, blocks[e.node - 1][0]) for e in closing]
        by_step = [events[0]]
        for event in events[1:]:
            if isinstance(event, Opened):  # ends at once, as in a round
                by_step.append(in_step[event.node - 1])
            elif isinstance(event, Pruned):
                by_step.append(event)
        assert peaks[-1] == by_hand(by_step)

    assert peaks[0] == peaks[1]


def test_a_new_search_starts_from_nothing() -> None:
    root = Opened(0, None, 0, 0, 7, "")

    full = folded([root, closed(1, 30), root, closed(1, 2)])

    assert (full.held, full.peak) == (2, 2)


SEARCHES: tuple[dict[str, Any], ...] = (
    {"controller": {"name": "tot", "beam": 3, "width": 5}},
    {"controller": {"name": "tot", "strategy": "dfs", "width": 4, "max_visited": 20}},
    {"controller": {"name": "beam", "beam_size": 4, "width": 4}},
    {"controller": {"name": "mcts", "width": 4, "simulations": 12}},
)


def solved(**settings: Any) -> tuple[list[Event], Any]:
    """The events of a search, and the model's tokenizer."""
    events: list[Event] = []
    with Solver(listeners=(events.append,), deterministic=True, **settings) as solver:
        solver.solve("4 5 6 10")
        return events, solver.tokenizer


@pytest.mark.parametrize(
    "search",
    [pytest.param(each, marks=[pytest.mark.slow] * bool(i)) for i, each in enumerate(SEARCHES)],
)
def test_every_budget_shows_the_same_full_retention(search: dict[str, Any]) -> None:
    whole, _ = solved(**search)
    small, _ = solved(budget="115tok", **search)

    assert folded(whole).peak == folded(small).peak
    assert any(isinstance(event, Pressure) for event in small), "the smaller budget was reached"


def replayed(record: Recording, tokenizer: Any, slots: int) -> tuple[int, int]:
    """Evictions of what is not pruned, and recomputed tokens."""
    found: list[Event] = []
    cost = replay(record, tokenizer, policy="lru", slots=slots, listen=found.append)
    gone = [each for each in found if isinstance(each, Evicted) and each.cause != "close"]
    return len(gone), cost.tokens_recomputed


@pytest.mark.parametrize("search", SEARCHES)
def test_the_folded_peak_holds_the_whole_search_and_one_slot_less_does_not(
    search: dict[str, Any],
) -> None:
    events, tokenizer = solved(verifier="exact", share="prompts", **search)
    record = Recording.of(events)
    peak = folded(events).peak + record.prompt

    assert replayed(record, tokenizer, peak) == (0, 0)
    assert replayed(record, tokenizer, peak - 1)[0] > 0


@pytest.mark.parametrize("search", SEARCHES)
def test_a_run_at_full_retention_holds_that_and_its_other_questions(search: dict[str, Any]) -> None:
    events, _ = solved(share="prompts", **search)
    record = Recording.of(events)
    (end,) = (each for each in events if isinstance(each, Ended))
    question = int(record.header.kv["question_tokens"])
    together = max(each.asked for each in events if isinstance(each, Verified))

    peak = folded(events).peak + record.prompt + question

    assert peak <= end.metrics["peak_tokens"] <= peak + (together - 1) * question
