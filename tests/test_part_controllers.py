"""A part of full retention under every controller, in both modes, whatever is fetched or shared."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.slow_cases import only

from arbor import Solver
from arbor.events import Boundary, Event, Evicted, Forwarded, Limited
from arbor.model.fetch_costs import FORM, FetchCosts, Run
from arbor.registry import names

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLES = [
    "4 5 6 10",
    "2 3 7 12",
    "1 3 4 6",
    "3 3 8 8",
]


@pytest.fixture(autouse=True)
def what_is_fetched_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn at random rather than by what it costs."""
    choices = random.Random(0)

    def fetched(costs: FetchCosts, runs: Sequence[Run], rows: int) -> list[bool]:
        return [choices.random() < 0.5 for _ in runs]

    monkeypatch.setattr(FetchCosts, "fetched", fetched)


def searched(
    controller: str, count: int, **settings: float | str
) -> tuple[list[object], list[Event]]:
    """What the searches of the first puzzles found and thought, and their events."""
    events: list[Event] = []
    with Solver(
        controller=controller,
        max_expansions=8,
        fetch=FORM,
        listeners=(events.append,),
        **settings,
    ) as solver:
        found = solver.solve_batch(PUZZLES[:count], concurrency=count)
    thoughts = sorted(event.ids for event in events if isinstance(event, Boundary))
    return [[(one.answer, one.score) for one in found], thoughts], events


def check_limits(events: Sequence[Event]) -> None:
    """No more was held than was allowed."""
    allowed = [event.tokens for event in events if isinstance(event, Limited)]
    held = [event.peak for event in events if isinstance(event, Forwarded)]
    assert max(held) <= max(allowed)


@pytest.mark.parametrize(
    ("controller", "count"),
    only(
        [("dpts", 1), ("chain", 4)],
        [(name, n) for n in (1, 4) for name in names("controller")],
    ),
)
def test_every_controller_has_its_trees_at_a_tenth(controller: str, count: int) -> None:
    full, _ = searched(controller, count, budget="full")
    for host in ({}, {"host": "20tok"}, {"host": "1000tok"}):
        found, events = searched(controller, count, budget=0.1, **host)

        assert found == full
        check_limits(events)


@pytest.mark.parametrize(
    ("controller", "count"),
    only(
        [("mcts", 1), ("chain", 4)],
        [(name, n) for n in (1, 4) for name in names("controller")],
    ),
)
def test_every_controller_ends_within_a_tenth_in_lossy_mode(controller: str, count: int) -> None:
    lost = {"mode": "lossy", "policy": "ends", "budget": 0.1}
    back = {"rehydrate": "selective"}
    for kept in ({}, back, back | {"host": "100tok"}):
        _, events = searched(controller, count, **lost, **kept)

        assert any(isinstance(event, Evicted) for event in events)
        check_limits(events)
