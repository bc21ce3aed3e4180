"""Monte Carlo tree search against trees computed by hand and a small reading of the sources."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from support.fakes import Key, Script, Thought, grow, hashed, run, scripted

from arbor.controllers.mcts import MCTS, VARIANTS, MCTSSearch
from arbor.errors import UsageError
from arbor.tree import NodeState, ThoughtTree

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


def test_simulations_in_progress_repel_each_other() -> None:
    """Both simulations of round 3 prefer (0,), where Q = 0.9; only virtual losses part them.

    With 9 virtual visits on its path, (0,) has 0.9 x 2 / 11 = 0.16 for the second simulation, and
    (1,) has 0.3.
    """
    script = scripted(
        {
            (0,): Thought("a", 0.9),
            (1,): Thought("b", 0.3),
            (0, 0): Thought("c", 0.9),
            (0, 1): Thought("d", 0.8),
            (1, 0): Thought("e", 0.3),
            (1, 1): Thought("f", 0.2),
        }
    )

    def asked(virtual_loss: int) -> list[list[Key]]:
        settings = MCTS(
            width=2, simulations=5, leaves=2, exploration=0.0, virtual_loss=virtual_loss
        )
        return [[key for key, _ in level] for level in run(settings, script, 4).asked]

    assert asked(0) == [[()], [(0,), (1,)], [(0, 0), (0, 1)]]
    assert asked(9) == [[()], [(0,), (1,)], [(0, 0), (1, 0)]]


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


def test_a_block_of_a_rollout_grows_its_missing_children_later() -> None:
    done = run(MCTS(width=3, simulations=6, leaves=1, rollout=1, exploration=0.0), scripted({}), 3)

    assert done.asked[:2] == [[((), 3)], [((0,), 1)]]
    assert done.asked[2] == [((0,), 2)]
    assert len(done.tree.root.children[0].children) == 3


def test_a_child_that_repeats_a_sibling_is_given_up() -> None:
    script = scripted({(1,): Thought(" a\n", 0.8)}, otherwise=Thought("a", 0.5))

    done = run(MCTS(width=3, simulations=2, leaves=1), script, max_depth=3)

    assert done.asked == [[((), 3)], [((0,), 3)]]  # not (1,), though it is worth more
    assert done.state(1) is done.state(2) is PRUNED


def test_a_step_of_a_rollout_grows_at_most_width_children() -> None:
    done = run(MCTS(width=2, rollout=2, rollout_width=4, simulations=1), scripted({}), max_depth=5)

    assert done.asked == [[((), 2)], [((0,), 2)], [((0, 0), 2)]]


def test_progressive_widening_adds_children_with_the_visits() -> None:
    """With k = 1 and the power 1/2, the root has 1 child at visits 1 to 3, 2 at 4, 3 at 9."""
    done = run(
        MCTS(width=9, simulations=9, leaves=1, widening=1.0, exploration=5.0),
        scripted({}),
        max_depth=9,
    )

    at_root = [number for number, level in enumerate(done.asked, 1) if level == [((), 1)]]
    assert at_root == [1, 4, 9]


def test_a_block_with_nothing_below_it_is_widened_out_of_turn() -> None:
    dead = scripted({}, otherwise=Thought("same", 0.0))
    other = scripted({(2,): Thought("c", 0.5)}, otherwise=Thought("no", 0.0))

    assert run(MCTS(width=3, widening=0.1, simulations=9), dead, 3).blocks == 3
    assert run(MCTS(width=3, widening=0.1, simulations=9), other, 3).blocks == 6


def test_unvisited_children_come_first_where_the_setting_says_so() -> None:
    script = scripted({(0,): Thought("a", 0.9), (1,): Thought("b", 0.1)}, Thought("c", 0.8))

    by_value = run(MCTS(width=2, simulations=3, leaves=1, exploration=0.1), script, 5)
    first = run(
        MCTS(width=2, simulations=3, leaves=1, exploration=0.1, first_play=math.inf), script, 5
    )

    assert [level[0][0] for level in by_value.asked] == [(), (0,), (0, 0)]
    assert [level[0][0] for level in first.asked] == [(), (1,), (0,)]


def test_prospects_are_the_leaves_that_may_still_grow() -> None:
    tree = ThoughtTree([0])
    search = MCTS(width=2, simulations=3, leaves=1).start(tree, 3)
    assert search.prospects() == {}

    search.tell(grow(tree, search.ask(1), scripted(SMALL)))
    ids = [expansion.leaf.id for expansion in search.ask(1)]
    assert ids == [2]
    assert search.prospects() == {1: 1.0}  # one simulation is left, and one leaf

    search.tell(grow(tree, search.ask(1), scripted(SMALL)))
    assert search.prospects() == {}  # no simulation is left


def test_the_tree_is_searched_for_prospects_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []
    right = MCTSSearch._foresee

    def foresee(self: MCTSSearch) -> dict[int, float]:
        counted.append(self)
        return right(self)

    monkeypatch.setattr(MCTSSearch, "_foresee", foresee)
    tree = ThoughtTree([0])
    search = MCTS(width=3, simulations=20, leaves=1).start(tree, 6)
    for _ in range(4):
        search.tell(grow(tree, search.ask(1), hashed(1, terminal=0)))
    assert not counted

    assert search.prospects() == search.prospects() != {}
    assert len(counted) == 1
    search.tell(grow(tree, search.ask(1), hashed(1, terminal=0)))
    search.prospects()
    assert len(counted) == 2


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_variant_has_the_settings_of_its_source(name: str) -> None:
    published = {
        "rap": (1.0, None, 4, 10, None, "mean", "max"),
        "rstar": (2.0, math.inf, 3, 15, None, "last", "mean"),
        "rest-mcts": (0.99, 1.0, 3, 100, 3, "max", "mean"),
    }
    found = VARIANTS[name]

    assert published[name] == (
        found.exploration,
        found.first_play,
        found.width,
        found.simulations,
        found.rollout,
        found.reward,
        found.backup,
    )
    assert found.registered_as == name
    assert found.summary.startswith("`mcts` as in ")
    run(found, hashed(3, terminal=0.2), max_depth=5)


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
        assert asked == [(key, settings.width) for key in read]


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"simulations": 0},
        {"leaves": 0},
        {"virtual_loss": -1},
        {"rollout": -1},
        {"rollout_width": 0},
        {"exploration": -1.0},
        {"exploration": math.nan},
        {"rollout_weight": 2.0},
        {"widening": 0.0},
        {"widening_power": -1.0},
        {"selection": "ucb"},
        {"reward": "sum"},
        {"backup": "sum"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        MCTS(**fields)

    assert caught.value.code == "setting-range"
    assert next(iter(fields)) in caught.value.message
