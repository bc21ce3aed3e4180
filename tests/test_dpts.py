"""Dynamic Parallel Tree Search: by hand, against the faults of the released code, and for real."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import Key, Run, Script, Thought, grow, hashed, run, scripted
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.base import Expansion
from arbor.controllers.dpts import DPTS, DPTSSearch
from arbor.controllers.search import mean
from arbor.events import Verified
from arbor.measure.replay import RecordedSearch, replay
from arbor.model.checkpoint import Checkpoint
from arbor.trace import Replay, read_trace
from arbor.tree import Node, NodeState, ThoughtTree

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


def test_scores_are_those_of_leaves_that_grow_or_may_and_of_the_blocks_above_them() -> None:
    def watch(search: DPTSSearch, asked: list[Expansion]) -> None:
        leaves = [*search._candidates, *search._growing, *(node.id for node in search._kept)]
        known = {node.id for leaf in leaves for node in search._tree[leaf].path[1:]}
        assert search.scores() == {each: search.score(search._tree[each]) for each in known}
        seen.append(len(known))

    seen: list[int] = []
    overlapped(DPTS(**TWO, max_visited=9), BY_HAND, 9, watch=watch)
    assert max(seen) > 3


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


def test_values_whose_sum_is_beyond_any_float_are_no_error() -> None:
    done = run(
        DPTS(**TWO, max_visited=9, continuous=False),
        lambda key: replace(BY_HAND(key), value=1e308),
        max_depth=9,
    )

    assert all(map(math.isfinite, inner(done).scores().values()))
    assert mean([1e308, 1.7e308, 1.5e308]) == 1.4e308 and mean([]) == 0


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


# For real -----------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "task": "reasoning,shots=0",
    "controller": {"name": "dpts", "width": 3, "parallel": 3, "max_visited": 9, "stop_value": None},
    "step_tokens": 24,
    "max_depth": 4,
    "deterministic": True,
}
PROBLEMS = tuple(f"What is {a}+{b}?" for a, b in ((2, 3), (14, 5), (7, 7), (120, 31)))


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


@pytest.mark.parametrize("continuous", every(2, [True, False]))
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


@pytest.mark.slow
def test_a_recorded_search_is_replayed_with_its_counters(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with solver_of(checkpoint, verifier="self") as solver:
        solution = solver.solve(PROBLEMS[1], trace=path)
        events = read_trace(path).events
        tokenizer = solver.engine.tokenizer
        slots = solution.metrics.peak_tokens
        again = replay(RecordedSearch.of(events), tokenizer, policy="lru", slots=slots)
        for policy in ("belady", "reentry"):
            tight = replay(RecordedSearch.of(events), tokenizer, policy=policy, slots=slots // 2)
            assert tight.tokens_generated == solution.metrics.tokens_generated
        cut = [e for e in events if isinstance(e, Verified)][3]
        short = replay(
            RecordedSearch.of(events[: events.index(cut)]), tokenizer, policy="lru", slots=slots
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


def test_a_share_of_the_slots_is_the_decimal_that_was_given() -> None:
    for exploit, slots, most in (
        (0.58, 50, 29),
        (0.29, 100, 29),
        (0.5, 3, 1),
        (1, 7, 7),
        (0, 7, 0),
    ):
        assert DPTS(exploit=exploit).exploiting(slots) == most
