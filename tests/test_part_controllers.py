"""A part of full retention under every controller: its trees, whatever is fetched or shared."""

from __future__ import annotations

import pytest
from support.slow_cases import every

from arbor import Solver
from arbor.events import Boundary, Event, Forwarded, Limited
from arbor.registry import names

PUZZLES = [
    "4 5 6 10",
    "2 3 7 12",
    "1 3 4 6",
    "3 3 8 8",
    "1 5 5 5",
    "2 4 7 7",
    "1 2 7 7",
    "4 4 10 10",
]


def searched(
    controller: str, count: int, **budget: float | str
) -> tuple[list[object], list[Event]]:
    """What the searches of the first puzzles found and thought, and their events."""
    events: list[Event] = []
    listeners = (events.append,)
    with Solver(controller=controller, max_expansions=8, listeners=listeners, **budget) as solver:
        found = solver.solve_batch(PUZZLES[:count], concurrency=count)
    thoughts = sorted(event.ids for event in events if isinstance(event, Boundary))
    return [[(one.answer, one.score) for one in found], thoughts], events


@pytest.mark.parametrize(
    ("controller", "count"), every(6, [(name, n) for n in (1, 8) for name in names("controller")])
)
def test_every_controller_has_its_trees_at_a_tenth(controller: str, count: int) -> None:
    full, _ = searched(controller, count, budget="full")
    for host in ({}, {"host": "150tok"}):
        found, events = searched(controller, count, budget=0.1, **host)
        allowed = [event.tokens for event in events if isinstance(event, Limited)]
        held = [event.peak for event in events if isinstance(event, Forwarded)]

        assert found == full
        assert max(held) <= max(allowed)
