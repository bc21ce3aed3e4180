"""Best-first search against a tree computed by hand."""

from __future__ import annotations

from functools import cache

import pytest
from support.fakes import Key, Thought, grow, hashed, run, scripted

from arbor.controllers.best_first import BestFirst
from arbor.errors import UsageError
from arbor.tree import NodeState, ThoughtTree

SMALL = scripted(
    {
        (0,): Thought("a", 0.5),
        (1,): Thought("b", 0.7),
        (2,): Thought("a", 0.5),  # repeats (0,)
        (1, 0): Thought("c", 0.5),  # ties with (0,), but is deeper
        (1, 1): Thought("d", 0.6, terminal=True),
        (1, 2): Thought("e", 0.0),
        (0, 0): Thought("f", 0.9),
    },
    otherwise=Thought("g", 0.1),
)


def test_best_first_on_a_tree_computed_by_hand() -> None:
    done = run(BestFirst(width=3, expansions=5, leaves=1), SMALL, max_depth=3)

    assert [keys for [(keys, _)] in done.asked] == [(), (1,), (1, 0), (0,), (0, 0)]
    assert done.best == [(1, 1)]
    assert done.state(2) is done.state(1, 2) is NodeState.PRUNED


def test_leaves_grow_together_within_the_expansions() -> None:
    done = run(BestFirst(width=3, expansions=4, leaves=2), SMALL, max_depth=3)

    assert [[key for key, _ in level] for level in done.asked] == [[()], [(1,), (0,)], [(0, 0)]]


def test_prospects_halve_with_each_round() -> None:
    tree = ThoughtTree([0])
    search = BestFirst(width=4, expansions=4, leaves=1).start(tree, 3)
    values = {(place,): Thought(str(place), 0.9 - place / 10) for place in range(4)}
    search.tell(grow(tree, search.ask(1), scripted(values)))

    assert [each.leaf.id for each in search.ask(1)] == [1]
    assert search.prospects() == {2: 0.5, 3: 0.25}  # of 4 expansions, 2 are left


def test_it_agrees_with_a_priority_queue_on_random_trees() -> None:
    for seed in range(300):
        width, expansions = 1 + seed % 4, 1 + seed % 15
        script = cache(hashed(seed, words=10**9, terminal=0.2, values=1 + seed % 6))
        queue: list[Key] = [()]
        order: list[Key] = []  # of creation
        grown: list[Key] = []
        while queue and len(grown) < expansions:
            queue.sort(key=lambda key: (-script(key).value if key else 0, -len(key)))
            best = queue[0]
            level = [key for key in queue if key == best or _equal(script, key, best)]
            best = min(level, key=lambda key: order.index(key) if key else -1)
            queue.remove(best)
            grown.append(best)
            for place in range(width):
                child = (*best, place)
                order.append(child)
                thought = script(child)
                if not thought.terminal and thought.value > 0 and len(child) < 4:
                    queue.append(child)

        done = run(
            BestFirst(width=width, expansions=expansions, leaves=1, stop_value=None), script, 4
        )

        assert [key for [(key, _)] in done.asked] == grown


def _equal(script: object, one: Key, other: Key) -> bool:
    assert callable(script)
    return len(one) == len(other) and bool(script(one).value == script(other).value)


@pytest.mark.parametrize("name", ["width", "expansions", "leaves"])
def test_settings_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=0"):
        BestFirst(**{name: 0})
