"""Dynamic Parallel Tree Search: by hand, against the faults of the released code, and for real."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import Key, Run, Script, Thought, grow, hashed, run, scripted

from arbor import Solver
from arbor.controllers.base import Continuous, Expansion, Foresight, Search
from arbor.controllers.dpts import DPTS, DPTSSearch
from arbor.errors import InputError, UsageError
from arbor.events import Boundary, Event, Selected, Transition, Verified
from arbor.measure.replay import Recording, replay
from arbor.model.checkpoint import Checkpoint
from arbor.trace import Replay, read_trace
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Inquiry
from arbor.verifiers.self_eval import SelfEval

CLOSED, PRUNED, TERMINAL = NodeState.CLOSED, NodeState.PRUNED, NodeState.TERMINAL


def overlapped(
    controller: DPTS,
    script: Script,
    max_depth: int,
    *,
    ticks: Callable[[Key], int] = lambda key: 1,
    rooms: Callable[[int], int] = lambda step: 99,
    shuffle: Callable[[list[Node]], list[Node]] = list,
    watch: Callable[[DPTSSearch, list[Expansion]], None] = lambda search, asked: None,
    limit: int = 500,
) -> Run:
    """A whole search whose leaves take different times.

    Args:
        ticks: how long the leaf with this key grows.
        watch: called with what each ask returned.
    """
    tree = ThoughtTree([0, 1, 2], "prompt")
    search = controller.start(tree, max_depth)
    done = Run(tree, search)
    growing: list[tuple[int, int, Expansion]] = []  # a heap of (end, order, what grows)
    now = order = 0
    for step in range(limit):
        expansions = search.ask(rooms(step))
        watch(search, expansions)
        if expansions:
            done.asked.append([(e.leaf.key, e.width) for e in expansions])
        for expansion in expansions:
            heapq.heappush(growing, (now + ticks(expansion.leaf.key), order, expansion))
            order += 1
        if not growing:
            return done
        now = growing[0][0]
        ended = []
        while growing and growing[0][0] == now:
            ended.append(heapq.heappop(growing)[2])
        search.tell(shuffle(grow(tree, ended, script)))
    raise AssertionError(f"the search did not end within {limit} asks")


def keys(done: Run) -> list[list[Key]]:
    return [[key for key, _ in asked] for asked in done.asked]


def inner(done: Run) -> DPTSSearch:
    assert isinstance(done.search, DPTSSearch)
    return done.search


# Computed by hand ---------------------------------------------------------------------------------

BY_HAND = scripted(
    {
        (0,): Thought("a", 0.6),
        (1,): Thought("b", 0.5),
        (0, 0): Thought("c", 0.2),
        (0, 1): Thought("d", 0.25),
        (1, 0): Thought("e", 0.9),
        (1, 1): Thought("f", 0.15),
        (1, 0, 0): Thought("g", 0.7, terminal=True),
        (1, 0, 1): Thought("h", 0.95),
        (0, 1, 0): Thought("i", 0.5),
        (0, 1, 1): Thought("j", 0.4),
        (1, 0, 1, 0): Thought("k", 0.3, terminal=True),
        (1, 0, 1, 1): Thought("l", 0.6, terminal=True),
        (0, 1, 0, 0): Thought("m", 0.05),
        (0, 1, 0, 1): Thought("n", 0.02),
        (0, 1, 1, 0): Thought("o", 0.9, terminal=True),
        (0, 1, 1, 1): Thought("p", 0.8, terminal=True),
        (1, 1, 0): Thought("q", 0.01),
        (1, 1, 1): Thought("r", 0.01),
    }
)
TWO = {"width": 2, "parallel": 2, "stop_value": None}


def test_rounds_on_a_tree_computed_by_hand() -> None:
    done = run(DPTS(**TWO, max_visited=9, continuous=False), BY_HAND, max_depth=9)

    # theta of the second round is 0.8 x 0.375: (0, 1) is below it, (1, 0) above; then 0.8 x 0.44
    # is below both best thoughts, so both slots exploit; then both paths end, (1, 0, 1) with
    # thoughts that end it, (0, 1, 0) below 0.8 x 0.164. (1, 1) comes before (0, 0), which is worth
    # more, as three paths have ended below its parent: 0.15 sqrt(5) > 0.2 sqrt(2)
    assert keys(done) == [
        [()],
        [(0,), (1,)],
        [(1, 0), (0, 1)],
        [(1, 0, 1), (0, 1, 0)],
        [(0, 1, 1), (1, 1)],
    ]
    assert (inner(done).early_stops, inner(done).deep_seeks) == (2, 2)
    assert done.best == [(0, 1, 1, 0), (0, 1, 1, 1), (1, 0, 0), (1, 0, 1, 1), (1, 0, 1, 0)]


def test_a_slot_goes_on_while_another_grows_on_a_tree_computed_by_hand() -> None:
    ticks = {(): 1, (0,): 5, (1,): 2, (1, 0): 2, (1, 0, 1): 3, (0, 1): 2}
    done = overlapped(DPTS(**TWO, max_visited=8), BY_HAND, 9, ticks=lambda key: ticks.get(key, 1))

    # (0,) grows from 1 to 6, and (1,), (1, 0) and (1, 0, 1) meanwhile, to 3, 5 and 8. At 6 the
    # candidates are (1, 1), (0, 0) and (0, 1): theta is 0.8 x 0.2, and (0,) goes on
    assert keys(done) == [
        [()],
        [(0,), (1,)],
        [(1, 0)],
        [(1, 0, 1)],
        [(0, 1)],
        [(0, 1, 0), (0, 1, 1)],
    ]
    assert inner(done).deep_seeks == 1
    assert done.search.best()[0].key == (0, 1, 1, 0)


def test_a_finished_path_adds_to_its_ancestors() -> None:
    done = run(DPTS(**TWO, max_visited=9, continuous=False), BY_HAND, max_depth=9)
    search, tree = inner(done), done.tree
    one = tree.root.children[1]

    # below (1,): 0.7, 0.3 and 0.6; Q / N = 1.6 / 4, and its parent has five paths in all
    expected = 1.6 / 4 + math.sqrt(0.5) * math.sqrt(1 + 6) * 0.5 / 5
    assert search.score(one) == pytest.approx(expected)
    leaf = tree.root.children[0].children[0]
    above = 3  # (0,) has two finished paths below it
    assert search.score(leaf) == pytest.approx(math.sqrt(0.5) * math.sqrt(1 + above) * 0.2 / 2)


# Faults of the released code ----------------------------------------------------------------------


def test_a_search_with_any_setting_runs_to_its_end() -> None:
    """Released (a): an attribute that is defined nowhere is read on the first problem."""
    for changed in (
        {},
        {"adaptive": True},
        {"hard_split": True},
        {"keep_stopped": False},
        {"mean": "kept"},
        {"t_unit": "finished"},
        {"dominance": True},
        {"continuous": False},
    ):
        assert overlapped(DPTS(**changed), hashed(1, terminal=0.3), 5).search.best()  # type: ignore[arg-type]


def test_deep_seek_has_a_factor_of_its_own() -> None:
    """Released (b): lambda_es stands in its place."""
    shy = run(DPTS(**TWO, lambda_ds=9.0, continuous=False), BY_HAND, 9)
    bold = run(DPTS(**TWO, lambda_ds=0.0, continuous=False), BY_HAND, 9)
    strict = run(DPTS(**TWO, lambda_es=9.0, continuous=False), BY_HAND, 9)

    assert inner(shy).deep_seeks == 0 < inner(strict).deep_seeks < inner(bold).deep_seeks
    assert inner(strict).early_stops > inner(bold).early_stops


def test_t_star_makes_the_threshold_the_highest_value_and_does_not_end_the_search() -> None:
    """Released (c): the search ends when five paths have finished and none in a slot is better."""
    script = scripted(
        {
            (0,): Thought("a", 0.9),
            (1,): Thought("b", 0.8),
            (0, 0): Thought("c", 0.75),
            (0, 1): Thought("d", 0.1),
        },
        otherwise=Thought("end", 0.95, terminal=True),
    )

    def asked(t_star: int) -> list[list[Key]]:
        settings: dict[str, Any] = {**TWO, "parallel": 1, "exploit": 1.0}
        return keys(run(DPTS(**settings, t_star=t_star, continuous=False), script, 9))

    # (0, 0) is above 0.8 x the mean, and below (1,), the best candidate
    assert asked(5)[:4] == [[()], [(0,)], [(0, 0)], [(1,)]]
    assert asked(1)[:4] == [[()], [(0,)], [(1,)], [(0, 0)]]
    # (0, 1) is worth less than every finished path
    assert [(0, 1)] in asked(5)
    assert [(0, 1)] in asked(1)


@pytest.mark.parametrize(
    ("unit", "t_star", "ends", "stops"),
    [
        ("ticks", 1, False, 1),  # the first grown leaf after the root is in the second tick
        ("ticks", 2, False, 0),
        ("finished", 0, False, 0),
        ("finished", 0, True, 1),
        ("finished", 1, True, 0),
    ],
)
def test_t_star_counts_ticks_or_finished_paths(
    unit: Any, t_star: int, ends: bool, stops: int
) -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.6),
            (1,): Thought("b", 0.5),  # the highest when (0, 0) is judged, whose value is the next
            (0, 0): Thought("c", 0.45),
            (0, 1): Thought("d", 0.1, terminal=ends),
        }
    )
    made = DPTS(2, 1, exploit=1.0, max_visited=2, continuous=False, t_star=t_star, t_unit=unit)

    assert inner(run(made, script, 9)).early_stops == stops


def test_a_leaf_in_a_slot_keeps_it_and_its_role() -> None:
    """Released (d): one exploiting leaf in seven became an exploring one, and slots stayed free."""
    roles: dict[int, bool] = {}
    every: list[bool] = []

    def watch(search: DPTSSearch, asked: list[Expansion]) -> None:
        for leaf, exploits in search._growing.items():
            assert roles.setdefault(leaf, exploits) == exploits
        visited = search._visited < 30
        if visited and search._candidates:
            assert len(search._growing) == 3

    for seed in range(20):
        roles.clear()
        draw = random.Random(seed)
        overlapped(
            DPTS(3, 3, exploit=0.4, max_visited=30, stop_value=None),
            hashed(seed, terminal=0.2),
            5,
            ticks=lambda key, draw=draw: draw.randint(1, 6),  # type: ignore[misc]
            watch=watch,
        )
        every += roles.values()
    assert {True, False} == set(every)
    assert len(every) > 200


def test_the_best_child_of_the_root_goes_on() -> None:
    """Released (d): the root's role is overwritten, so nothing goes on from the first iteration."""
    tree = ThoughtTree([0])
    search = DPTS(2, 2).start(tree, 5)
    search.tell(grow(tree, search.ask(9), BY_HAND))

    assert [node.key for node in search._kept] == [(0,)]


@given(st.integers(0, 10**6), st.integers(0, 99))
def test_the_same_search_twice_is_the_same(seed: int, times: int) -> None:
    """Released (h): nodes are in sets ordered by address, so the tree changes from run to run."""
    script = hashed(seed, terminal=0.2, values=3)

    def once() -> tuple[Any, ...]:
        draw = random.Random(times)
        done = overlapped(
            DPTS(3, 3, max_visited=20), script, 5, ticks=lambda key: draw.randint(1, 4)
        )
        return done.asked, done.best, [node.state for node in done.tree]

    assert once() == once()


def test_the_root_has_no_value_that_a_path_could_take_over() -> None:
    """Released (i): the root's 0.2 is in the list of every path, so no minimum is above it."""
    tree = ThoughtTree([0])
    tree.root.value = 0.2
    search = DPTS(2, 2, stop_value=None).start(tree, 5)
    script = scripted({(0,): Thought("a", 0.9, True), (1,): Thought("b", 0.1, True)})
    search.tell(grow(tree, search.ask(9), script))

    assert [leaf.value for leaf in search.best()] == [0.9, 0.1]


def test_a_root_that_never_grew_ends_the_search_without_an_error() -> None:
    """Released (m): the best of no children is an error."""
    for continuous in (False, True):
        search = DPTS(continuous=continuous).start(ThoughtTree([0]), 5)
        assert search.best() == []
        search.ask(9)
        search.tell([])
        assert search.ask(9) == []
        assert search.best() == []


def test_every_thought_that_ends_a_path_is_finished_at_once() -> None:
    """Released: only the best child; the others take a slot later."""
    script = scripted(
        {(0,): Thought("a", 0.9, True), (1,): Thought("b", 0.3, True), (2,): Thought("c", 0.5)}
    )
    tree = ThoughtTree([0])
    search = DPTS(3, 2, stop_value=None).start(tree, 5)
    search.tell(grow(tree, search.ask(9), script))

    assert search._finished == 2
    assert [e.leaf.key for e in search.ask(9)] == [(2,)]


# The settings -------------------------------------------------------------------------------------


def test_what_stopped_early_stays_a_candidate_or_is_given_up() -> None:
    kept = run(DPTS(**TWO, max_visited=9, continuous=False), BY_HAND, 9)
    gone = run(DPTS(**TWO, max_visited=9, continuous=False, keep_stopped=False), BY_HAND, 9)

    assert kept.asked[2][1][0] == (0, 1)  # of the path that stopped
    assert gone.state(0, 0) is gone.state(0, 1) is gone.state(0) is PRUNED
    assert not any(key[:1] == (0,) for asked in keys(gone)[2:] for key in asked)


def test_a_hard_split_keeps_slots_for_exploring() -> None:
    def most(**settings: Any) -> int:
        counts = []

        def watch(search: DPTSSearch, asked: list[Expansion]) -> None:
            counts.append(sum(search._growing.values()))

        overlapped(DPTS(3, 4, max_visited=30, **settings), hashed(4, terminal=0.0), 5, watch=watch)
        return max(counts)

    assert most(hard_split=True) == 2 < most()
    assert most(hard_split=True, exploit=0.0) == 1  # the root's own path


def test_adaptive_width_follows_the_room_and_the_default_does_not() -> None:
    def widths(room: int, **settings: Any) -> set[int]:
        seen: set[int] = set()

        def watch(search: DPTSSearch, asked: list[Expansion]) -> None:
            seen.add(len(search._growing))

        overlapped(
            DPTS(2, 3, max_visited=20, **settings),
            hashed(4, terminal=0.0),
            5,
            rooms=lambda step: room,
            watch=watch,
        )
        return seen

    assert max(widths(5, adaptive=True)) == 2
    assert max(widths(1, adaptive=True)) == 1
    assert max(widths(99, adaptive=True)) == max(widths(1)) == 3


def test_a_narrower_room_returns_what_has_no_slot_to_the_candidates() -> None:
    tree = ThoughtTree([0])
    search = DPTS(2, 2, adaptive=True, lambda_ds=0.0).start(tree, 9)
    search.tell(grow(tree, search.ask(9), BY_HAND))
    search.tell(grow(tree, search.ask(9), BY_HAND))
    search._kept.append(search._candidates.pop(search._tree.root.children[0].children[1].id))
    asked = search.ask(2)

    assert [e.leaf.key for e in asked] == [(1, 0)]
    assert (0, 1) in [node.key for node in search._candidates.values()]


def test_dominance_ends_a_search_that_cannot_improve() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.9),
            (1,): Thought("b", 0.5),
            (0, 0): Thought("c", 0.8, True),
            (0, 1): Thought("d", 0.7),
        }
    )
    settings: dict[str, Any] = {**TWO, "parallel": 1, "t_star": 1, "max_visited": 9}
    ended = overlapped(DPTS(**settings, dominance=True), script, 9)
    going_on = overlapped(DPTS(**settings), script, 9)

    assert keys(ended) == [[()], [(0,)]]
    assert len(keys(going_on)) == 9


def test_the_mean_is_over_candidates_or_over_what_was_kept() -> None:
    script = scripted({(0,): Thought("a", 0.9), (1,): Thought("b", 0.1)}, Thought("c", 0.5))
    settings: dict[str, Any] = {**TWO, "parallel": 1, "exploit": 1.0, "dedup": False}

    def stops(mean: str) -> int:
        made = DPTS(**settings, mean=mean, max_visited=2, continuous=False)  # type: ignore[arg-type]
        return inner(run(made, script, 9)).early_stops

    # 0.5 is above 0.8 x the mean of 0.1, 0.5 and 0.5, and below 0.8 x 0.9
    assert (stops("candidates"), stops("kept")) == (0, 1)


def test_a_proof_ends_the_search_once_what_grows_has_ended() -> None:
    script = scripted({(0, 0): Thought("proof", 1.0, terminal=True)})
    done = overlapped(DPTS(2, 2), script, 5, ticks=lambda key: 9 if key == (1,) else 1)

    assert keys(done) == [[()], [(0,), (1,)]]
    assert done.best[0] == (0, 0)
    assert done.tree.root.children[1].children  # it has grown to its end


def test_prospects_halve_with_every_set_of_slots() -> None:
    tree = ThoughtTree([0])
    search = DPTS(4, 2, max_visited=3).start(tree, 9)
    assert search.prospects() == {}
    search.tell(
        grow(tree, search.ask(9), scripted({(i,): Thought(f"{i}", 0.5 - i / 10) for i in range(4)}))
    )
    a, b, c, d = tree.root.children
    assert search.prospects() == {a.id: 1.0, b.id: 0.5, c.id: 0.5, d.id: 0.25}
    search.ask(9)
    assert search.prospects() == {}  # nothing else may grow


def test_the_search_is_continuous_unless_it_is_to_go_in_rounds() -> None:
    for continuous in (False, True):
        search = DPTS(continuous=continuous).start(ThoughtTree([0]), 5)
        assert isinstance(search, Search)
        assert isinstance(search, Foresight)
        assert isinstance(search, Continuous)
        assert search.continuous == continuous


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"parallel": 0},
        {"max_visited": 0},
        {"t_star": -1},
        {"exploit": 1.5},
        {"exploration": -1.0},
        {"lambda_es": math.nan},
        {"lambda_ds": math.inf},
        {"t_unit": "seconds"},
        {"mean": "all"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))) as caught:
        DPTS(**fields)

    assert caught.value.code == "setting-range"


# Any tree -----------------------------------------------------------------------------------------

small = st.integers(1, 4)
searches = st.builds(
    DPTS,
    width=small,
    parallel=small,
    exploit=st.sampled_from([0.0, 0.5, 1.0]),
    t_star=st.integers(0, 4),
    t_unit=st.sampled_from(["ticks", "finished"]),
    mean=st.sampled_from(["candidates", "kept"]),
    hard_split=st.booleans(),
    keep_stopped=st.booleans(),
    adaptive=st.booleans(),
    dominance=st.booleans(),
    dedup=st.booleans(),
    threshold=st.sampled_from([-1.0, 0.0, 0.5]),
    stop_value=st.sampled_from([None, 0.5, 1.0]),
    max_visited=st.integers(1, 20),
)
scripts = st.builds(
    hashed,
    st.integers(0, 10**6),
    words=st.sampled_from([2, 5, 1000]),
    terminal=st.sampled_from([0.0, 0.1, 0.5]),
    values=st.sampled_from([1, 2, 8]),
)
depths = st.integers(1, 5)


@given(searches, scripts, depths, st.integers(0, 99))
def test_only_live_leaves_grow_once_and_never_more_than_there_are_slots(
    controller: DPTS, script: Script, max_depth: int, seed: int
) -> None:
    draw = random.Random(seed)
    grown: set[int] = set()
    pruned: set[int] = set()

    def watch(search: DPTSSearch, asked: list[Expansion]) -> None:
        for expansion in asked:
            leaf = expansion.leaf
            assert leaf.state is CLOSED
            assert not leaf.children
            assert leaf.depth < max_depth
            assert not {node.id for node in leaf.path} & pruned
            assert leaf.id not in grown
            grown.add(leaf.id)
        assert len(search._growing) <= controller.parallel
        pruned.update(node.id for node in search._tree if node.state is PRUNED)

    done = overlapped(
        controller,
        script,
        max_depth,
        ticks=lambda key: draw.randint(1, 5),
        rooms=lambda step: draw.randint(1, 20),
        watch=watch,
    )

    assert done.blocks <= controller.max_blocks(max_depth)
    assert len(grown) <= controller.max_visited
    assert {n.key for n in done.search.best()} == {n.key for n in done.tree if n.state is TERMINAL}
    for node in done.tree:
        if node.state is PRUNED:
            assert all(child.state is PRUNED for child in node.children)


@given(searches, scripts, depths, st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_order_of_children_in_a_report_changes_nothing(
    controller: DPTS, script: Script, max_depth: int, seed: int, rng: random.Random
) -> None:
    def once(shuffle: Callable[[list[Node]], list[Node]]) -> tuple[Any, ...]:
        draw = random.Random(seed)
        done = overlapped(
            controller, script, max_depth, ticks=lambda key: draw.randint(1, 3), shuffle=shuffle
        )
        return done.asked, done.best, [node.state for node in done.tree]

    assert once(list) == once(lambda children: rng.sample(children, len(children)))


@given(searches, scripts, depths)
def test_leaves_that_take_the_same_time_grow_as_in_rounds(
    controller: DPTS, script: Script, max_depth: int
) -> None:
    rounds = dataclasses.replace(controller, continuous=False)

    together = overlapped(controller, script, max_depth, rooms=lambda step: 7)

    assert together.asked == run(rounds, script, max_depth, rooms=lambda step: 7).asked


def test_max_blocks_is_reached() -> None:
    endless = scripted({})
    for width in (1, 2, 3):
        for most in (1, 2, 5, 100):
            for depth in (1, 2, 3):
                controller = DPTS(width, 2, max_visited=most, lambda_es=0.0, lambda_ds=0.0)
                done = overlapped(controller, endless, depth)
                assert done.blocks == controller.max_blocks(depth)


# For real -----------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "task": "reasoning,shots=0",
    "controller": {"name": "dpts", "width": 3, "parallel": 3, "max_visited": 9, "stop_value": None},
    "step_tokens": 24,
    "max_depth": 4,
    "deterministic": True,
}
PROBLEMS = tuple(f"What is {a}+{b}?" for a, b in ((2, 3), (14, 5), (7, 7), (120, 31)))
HANDS = ("4 5 6 10", "1 2 4 6", "2 3 4 6", "3 4 5 6")


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    """The built-in model, loaded once, with the same sums in every batch."""
    with Solver(deterministic=True) as first:
        first.load()
        yield first.checkpoint


def solver_of(checkpoint: Checkpoint, **settings: Any) -> Solver:
    made = Solver(**SETTINGS | settings)
    made.checkpoint = checkpoint
    return made


def shape(events: Sequence[Event]) -> tuple[Any, ...]:
    """The tree, its values and the order of the search."""
    replayed = Replay()
    for event in events:
        replayed(event)
    blocks = [
        (b.id, b.parent, b.tokens, b.text, b.value, b.state) for b in replayed.blocks.values()
    ]
    return blocks, [e.leaves for e in events if isinstance(e, Selected)]


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [
        ("reentry", "self"),
        pytest.param("lru", "exact", marks=pytest.mark.slow),
        pytest.param("reentry", "exact", marks=pytest.mark.slow),
        pytest.param("lru", "self", marks=pytest.mark.slow),
    ],
)
def test_the_tree_is_the_same_at_any_budget(
    verifier: str, policy: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    width, problem = (6, "2 3 4 6") if verifier == "exact" else (4, "4 5 6 10")
    task = {"task": "game24", "controller": SETTINGS["controller"] | {"width": width}}
    shapes, recomputed = [], 0
    with solver_of(checkpoint, verifier=verifier, policy=policy, **task) as solver:
        plan = solver.plan(problem, budget="full")
        for budget in ("full", 0.6, f"{plan.enough_tokens}tok"):
            path = tmp_path / f"{budget}.arbor.jsonl"
            solution = solver.solve(problem, budget=budget, trace=path)
            recomputed += solution.metrics.tokens_recomputed
            trace = read_trace(path)
            assert Replay.of(trace).problems == []
            shapes.append(shape(trace.events))
    assert shapes[0] == shapes[1] == shapes[2]
    assert recomputed > 0
    transitions = [e for e in trace.events if isinstance(e, Transition)]
    assert sum(bool({*e.leaves} & {*e.previous}) for e in transitions) > 1  # no rounds


@pytest.mark.parametrize("verifier", [pytest.param("self", marks=pytest.mark.slow), "exact"])
def test_the_tree_does_not_depend_on_other_searches(verifier: str, checkpoint: Checkpoint) -> None:
    exact = {"task": "game24", "controller": SETTINGS["controller"] | {"width": 6}}
    problems = HANDS if verifier == "exact" else PROBLEMS

    def shapes(concurrency: int, budget: Any) -> list[Any]:
        settings: dict[str, Any] = (
            exact if verifier == "exact" else {"max_expansions": 5, "step_tokens": 12}
        )
        solver = solver_of(checkpoint, verifier=verifier, record_bytes=1 << 24, **settings)
        solutions = solver.solve_batch(problems, concurrency=concurrency, budget=budget)
        assert all(solution.recording is not None for solution in solutions)
        return [shape([event for _, event in s.recording or ()]) for s in solutions]

    alone = shapes(1, "full")

    assert shapes(4, "full") == alone
    assert shapes(4, 0.7) == alone
    assert len({str(each) for each in alone}) == len(PROBLEMS)


@pytest.mark.parametrize("continuous", [True, False])
def test_limits_and_interruptions_end_it_with_what_was_found(
    continuous: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    controller = SETTINGS["controller"] | {"continuous": continuous}
    ends = []
    with solver_of(checkpoint, verifier="self", controller=controller) as solver:
        for name, limit in (("a", {"max_tokens": 60}), ("b", {"timeout": 0.05})):
            path = tmp_path / f"{name}.arbor.jsonl"
            ends.append(solver.solve(PROBLEMS[0], trace=path, **limit).finish_reason)  # type: ignore[arg-type]
            assert Replay.of(read_trace(path)).problems == []
        solver.engine.memory.check()
    with solver_of(checkpoint, max_expansions=4, controller=controller) as solver:
        solution = solver.solve(PROBLEMS[0])
        assert solution.metrics.expansions == 4
        ends.append(solution.finish_reason)
    assert ends == ["limit", "timeout", "limit"]


def test_a_recorded_search_is_replayed_with_its_counters(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with solver_of(checkpoint, verifier="self") as solver:
        solution = solver.solve(PROBLEMS[1], trace=path)
        events = read_trace(path).events
        tokenizer = solver.engine.tokenizer
        slots = solution.metrics.peak_tokens
        again = replay(Recording.of(events), tokenizer, policy="lru", slots=slots)
        for policy in ("belady", "reentry"):
            tight = replay(Recording.of(events), tokenizer, policy=policy, slots=slots // 2)
            assert tight.tokens_generated == solution.metrics.tokens_generated
        cut = [e for e in events if isinstance(e, Verified)][3]
        short = replay(
            Recording.of(events[: events.index(cut)]), tokenizer, policy="lru", slots=slots
        )
    for name in ("nodes", "rounds", "expansions", "tokens_generated", "verified", "asked"):
        assert getattr(again, name) == getattr(solution.metrics, name), name
    assert 0 < short.expansions < again.expansions


@pytest.mark.parametrize(
    "mode",
    [
        ("lossy", "off"),
        pytest.param(("lossy", "selective"), marks=pytest.mark.slow),
        ("lossless", "span"),
    ],
    ids=str,
)
def test_every_mode_runs_it_in_the_smallest_budget(
    mode: tuple[Any, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    settings = {"mode": mode[0], "rehydrate": mode[1], "policy": "h2o"}
    solver = solver_of(checkpoint, verifier="self", step_tokens=8, max_expansions=6, **settings)
    plan = solver.plan(PROBLEMS[1], budget="full")

    solver.solve(PROBLEMS[1], budget=f"{plan.enough_tokens}tok", trace=path)

    assert Replay.of(read_trace(path)).problems == []
    solver.engine.memory.check()


class Failing(SelfEval):
    """A verifier that refuses its fourth batch, in the middle of other expansions."""

    batches: ClassVar[list[int]] = []

    def inquire(self, *given: Any) -> Inquiry:
        self.batches.append(1)
        if len(self.batches) == 4:
            raise InputError("problem-too-long", "too long.", "Use another.")
        return super().inquire(*given)


def test_an_error_in_one_expansion_gives_the_others_up(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    task = {"task": "game24", "controller": SETTINGS["controller"] | {"width": 4}}
    solver = solver_of(checkpoint, verifier=Failing(), **task)

    with pytest.raises(InputError) as caught:
        solver.solve("4 5 6 10", trace=path)

    assert "answer" in caught.value.data
    trace = read_trace(path)
    replayed = Replay.of(trace)
    assert replayed.problems == []
    assert replayed.open_blocks == 0
    given_up = [b for b in replayed.blocks.values() if not b.verified and b.parent is not None]
    assert {block.state for block in given_up if block.resident == 0} == {PRUNED}
    solver.engine.memory.check()
    assert not solver.engine.busy
    assert solver.solve("4 5 6 10").metrics.expansions > 4


def test_a_listener_that_raises_ends_it_and_the_engine_goes_on(checkpoint: Checkpoint) -> None:
    solver = solver_of(checkpoint, verifier="self")
    left = [12]

    def listener(event: Event) -> None:
        left[0] -= isinstance(event, Boundary)
        if left[0] == 0:
            raise ZeroDivisionError

    solver.listeners = (listener,)
    with pytest.raises(ZeroDivisionError):
        solver.solve(PROBLEMS[0])
    assert not solver.engine.busy
    solver.engine.memory.check()
    solver.listeners = ()
    assert solver.solve(PROBLEMS[0]).finish_reason in ("solved", "exhausted", "cut")
