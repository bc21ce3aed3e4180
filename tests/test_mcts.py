"""Monte Carlo tree search against trees computed by hand and a small reading of the sources."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from support.fakes import Key, Script, Thought, hashed, run, scripted

from arbor.controllers.base import Scores
from arbor.controllers.mcts import MCTS
from arbor.tree import NodeState

CLOSED, PRUNED, TERMINAL = NodeState.CLOSED, NodeState.PRUNED, NodeState.TERMINAL

SMALL = {
    (0,): Thought("a", 0.5),
    (1,): Thought("b", 0.6),
    (1, 0): Thought("c", 0.2),
    (1, 1): Thought("d", 0.1),
    (0, 0): Thought("e", 0.9, terminal=True),
    (0, 1): Thought("f", 0.3),
    (0, 1, 0): Thought("g", 0.8, terminal=True),
    (0, 1, 1): Thought("h", 0.0),
}


def test_uct_on_a_tree_computed_by_hand() -> None:
    """Simulation 2: ln 1 = 0, so the values decide: 1 before 0.

    Simulation 3: 0 has 0.5 + sqrt(ln 2) = 1.33, 1 has (0.6 + 0.2) / 2 + sqrt(ln 2 / 2) = 0.99.
    Simulation 4: 0 has 0.9 + sqrt(ln 3) = 1.95, 1 has 0.4 + sqrt(ln 3 / 2) = 1.14; below 0 only
    (0, 1) goes on. Simulation 5: 0 has (0.9 + 0.8) / 2 + sqrt(ln 4 / 2) = 1.68, but nothing grows
    below it any more.
    """
    done = run(MCTS(width=2, simulations=5, leaves=1), scripted(SMALL), max_depth=3)

    assert done.asked == [[((), 2)], [((1,), 2)], [((0,), 2)], [((0, 1), 2)], [((1, 0), 2)]]
    assert done.best == [(0, 0), (0, 1, 0)]
    assert done.state(0, 1, 1) is PRUNED
    assert done.state(1, 1) is CLOSED


def test_scores_are_what_selection_maximises_and_finite() -> None:
    """After simulation 2: 1 has two visits of the root's two, the others one or none."""
    search = run(MCTS(width=2, simulations=2, leaves=1), scripted(SMALL), max_depth=2).search
    first = run(
        MCTS(width=2, simulations=2, leaves=1, first_play=math.inf), scripted(SMALL), max_depth=2
    ).search

    assert isinstance(search, Scores) and isinstance(first, Scores)
    above = math.sqrt(math.log(2))
    wanted = {1: 0.5 + above, 2: 0.4 + above / math.sqrt(2), 3: 0.2 + above, 4: 0.1 + above}
    assert search.scores() == pytest.approx(wanted)
    found = first.scores()
    assert all(map(math.isfinite, found.values())) and found[4] == max(found.values())
    last = run(
        MCTS(width=2, simulations=2, leaves=1, first_play=-math.inf), scripted(SMALL), max_depth=2
    ).search
    assert isinstance(last, Scores)
    found = last.scores()
    assert all(map(math.isfinite, found.values())) and found[4] == min(found.values())


def test_a_rollout_follows_the_best_child_and_is_backed_up_as_the_source_says() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.5),
            (1,): Thought("b", 0.4),
            (0, 0): Thought("c", 0.3),
            (0, 0, 0): Thought("d", 0.1),
        }
    )

    def search(**settings: Any) -> Any:
        controller = MCTS(
            width=2, simulations=1, leaves=1, rollout=None, stop_value=None, **settings
        )
        return run(controller, script, max_depth=3)

    done = search()
    assert done.asked == [[((), 2)], [((0,), 1)], [((0, 0), 1)]]
    rewards = {name: search(reward=name).search._rewards for name in ("last", "max", "mean")}
    root, a, c, d = 0, 1, 3, 4
    assert rewards["last"] == pytest.approx({root: 0.1, a: 0.1, c: 0.1, d: 0.1})
    assert rewards["max"] == pytest.approx({root: 0.3, a: 0.3, c: 0.3, d: 0.3})
    assert rewards["mean"] == pytest.approx({root: 0.3, a: 0.3, c: 0.2, d: 0.1})
    half = search(reward="max", rollout_weight=0.5).search._rewards
    assert half == pytest.approx({root: 0.4, a: 0.4, c: 0.4, d: 0.4})


def test_the_last_simulation_goes_on_to_an_end_if_no_path_has_one() -> None:
    values = {(0,): 0.5, (0, 0): 0.4, (0, 0, 0): 0.3}

    def script(key: Key) -> Thought:
        ends = len(key) == 4 or key == ends_at
        return Thought(str(key), values.get(key, 0.1), terminal=ends)

    ends_at: Key = ()
    settings = MCTS(width=2, simulations=2, leaves=1, stop_value=None)
    done = run(settings, script, max_depth=6)
    assert done.asked == [[((), 2)], [((0,), 2)], [((0, 0), 1)], [((0, 0, 0), 1)]]
    assert done.best == [(0, 0, 0, 0)]

    ends_at = (1,)
    done = run(settings, script, max_depth=6)
    assert done.asked == [[((), 2)], [((0,), 2)]] and done.best == [(1,)]


# Agreement ----------------------------------------------------------------------------------------


def read_from_the_paper(script: Script, settings: MCTS, max_depth: int) -> list[Key]:
    """Blocks in the order in which sequential MCTS grows them; by keys, without a tree."""
    width = settings.width
    grown: list[Key] = []
    visits: dict[Key, int] = {}
    total: dict[Key, list[float]] = {}

    def children(key: Key) -> list[Key]:
        return [(*key, place) for place in range(width)]

    def grows(key: Key) -> bool:
        thought = script(key) if key else Thought("", 1.0)
        return not thought.terminal and len(key) < max_depth and thought.value > 0

    def alive(key: Key) -> bool:
        return grows(key) and (key not in grown or any(alive(each) for each in children(key)))

    def score(parent: Key, key: Key) -> float:
        n, value = visits.get(key, 0), script(key).value
        if n:
            value = max(total[key]) if settings.backup == "max" else sum(total[key]) / n
        if settings.selection == "uct":
            return value + settings.exploration * math.sqrt(math.log(visits[parent]) / max(1, n))
        prior = [math.exp(script(each).logprob / script(each).tokens) for each in children(parent)]
        share = prior[key[-1]] / sum(prior)
        return value + settings.exploration * share * math.sqrt(visits[parent]) / (1 + n)

    for _ in range(settings.simulations):
        if not alive(()):
            break
        path: list[Key] = [()]
        while path[-1] in grown:
            parent = path[-1]
            scores = {each: score(parent, each) for each in children(parent) if alive(each)}
            highest = max(scores.values())
            level = [each for each in scores if scores[each] == highest]
            path.append(max(level, key=lambda each: (script(each).value, -each[-1])))
        grown.append(path[-1])
        new = children(path[-1])
        path.append(max(new, key=lambda each: (script(each).value, -each[-1])))
        for each in path:
            visits[each] = visits.get(each, 0) + 1
            total.setdefault(each, []).append(script(path[-1]).value)
    return grown


@pytest.mark.parametrize("selection", ["uct", "puct"])
@pytest.mark.parametrize("backup", ["mean", "max"])
def test_it_agrees_with_a_reading_of_the_paper_on_random_trees(selection: Any, backup: Any) -> None:
    for seed in range(250):
        settings = MCTS(
            selection=selection,
            backup=backup,
            exploration=(0.3, 1.0, 2.0)[seed % 3],
            width=1 + seed % 4,
            simulations=1 + seed % 11,
            leaves=1,
            stop_value=None,
        )
        script = cache(hashed(seed, words=10**9, terminal=0.2, values=1 + seed % 7))
        depth = 2 + seed % 4

        done = run(settings, script, depth)

        asked = [(key, width) for level in done.asked for key, width in level]
        read = read_from_the_paper(script, settings, depth)
        assert asked[: len(read)] == [(key, settings.width) for key in read]
        for (above, _), (key, width) in pairwise(asked[len(read) - 1 :]):  # the last rolls out
            assert key[:-1] == above and width == 1
