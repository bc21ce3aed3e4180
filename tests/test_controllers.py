"""Searches against scripted trees: hand-computed examples, and what must hold for any tree."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import Script, Thought, grow, hashed, run, scripted

from arbor.controllers.ab_mcts import ABMCTS
from arbor.controllers.base import Controller, Expansion
from arbor.controllers.beam import Beam
from arbor.controllers.best_first import BestFirst
from arbor.controllers.chain import Chain
from arbor.controllers.dpts import DPTS
from arbor.controllers.dvts import DVTS
from arbor.controllers.eptree import EPTree
from arbor.controllers.ets import ETS
from arbor.controllers.mcts import MCTS
from arbor.controllers.rebase import Rebase
from arbor.controllers.search import mean_logprob
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.tree import NodeState, ThoughtTree

CLOSED, PRUNED, TERMINAL = NodeState.CLOSED, NodeState.PRUNED, NodeState.TERMINAL

# controllers that add children to a block that has some
GROWS_AGAIN = (ABMCTS, MCTS)

small = st.integers(1, 4)
stops = st.sampled_from([None, 0.5, 1.0])
thresholds = st.sampled_from([-1.0, 0.0, 0.5])
controllers: st.SearchStrategy[Controller] = st.one_of(
    st.builds(Chain, samples=small),
    st.builds(
        Beam,
        beam_size=small,
        width=small,
        dedup=st.booleans(),
        threshold=thresholds,
        stop_value=stops,
    ),
    st.builds(
        ToT,
        strategy=st.sampled_from(["bfs", "dfs"]),
        beam=small,
        width=small,
        threshold=thresholds,
        max_per_state=small,
        max_visited=st.integers(1, 12),
        stop_value=stops,
    ),
    st.builds(
        DPTS,
        width=small,
        parallel=small,
        exploit=st.sampled_from([0.0, 0.5, 1.0]),
        t_star=st.integers(0, 4),
        t_unit=st.sampled_from(["ticks", "finished"]),
        mean=st.sampled_from(["candidates", "kept"]),
        hard_split=st.booleans(),
        keep_stopped=st.booleans(),
        dominance=st.booleans(),
        dedup=st.booleans(),
        threshold=thresholds,
        stop_value=stops,
        max_visited=st.integers(1, 12),
        continuous=st.just(False),
    ),
    st.builds(
        BestFirst,
        width=small,
        expansions=st.integers(1, 12),
        leaves=small,
        threshold=thresholds,
        stop_value=stops,
    ),
    st.builds(
        ABMCTS,
        thoughts=st.integers(1, 20),
        leaves=small,
        threshold=thresholds,
        stop_value=stops,
        seed=st.integers(0, 3),
    ),
    st.builds(
        EPTree,
        chains=small,
        forks=small,
        width=small,
        rounds=st.integers(0, 2),
        at=st.sampled_from(["token", "thought"]),
    ),
    st.builds(DVTS, subtrees=small, width=small, threshold=thresholds, stop_value=stops),
    st.builds(
        Rebase,
        width=st.integers(1, 9),
        softmax_temperature=st.sampled_from([0.01, 0.2, 5.0]),
        dedup=st.booleans(),
        threshold=thresholds,
        stop_value=stops,
    ),
    st.builds(
        ETS,
        width=st.integers(1, 6),
        softmax_temperature=st.sampled_from([0.2, 5.0]),
        lambda_c=st.sampled_from([0.0, 1.0]),
        lambda_s=st.sampled_from([0.0, 1.5]),
        cost=st.sampled_from(["tokens", "blocks"]),
        dedup=st.booleans(),
        threshold=thresholds,
        stop_value=stops,
    ),
    st.builds(
        MCTS,
        selection=st.sampled_from(["uct", "puct"]),
        exploration=st.sampled_from([0.0, 1.0, 3.0]),
        first_play=st.sampled_from([None, 1.0, float("inf")]),
        width=small,
        simulations=st.integers(1, 12),
        leaves=small,
        rollout=st.sampled_from([0, 1, 3, None]),
        rollout_width=small,
        reward=st.sampled_from(["last", "mean", "max"]),
        rollout_weight=st.sampled_from([0.5, 1.0]),
        backup=st.sampled_from(["mean", "max"]),
        threshold=thresholds,
        stop_value=stops,
    ),
)
scripts: st.SearchStrategy[Script] = st.builds(
    hashed,
    st.integers(0, 10**6),
    words=st.sampled_from([2, 5, 1000]),
    terminal=st.sampled_from([0.0, 0.1, 0.5]),
    values=st.sampled_from([1, 2, 8]),
)
depths = st.integers(1, 4)


# Golden: trees computed by hand -------------------------------------------------------------------


def test_tot_bfs_on_a_tree_computed_by_hand() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.5),
            (1,): Thought("b", 0.9),
            (2,): Thought("c", 0.5),  # ties with a, which came first
            (1, 0): Thought("end early", 0.4, terminal=True),
            (1, 1): Thought("d", 0.8),
            (1, 2): Thought(" d\n", 0.8),  # repeats (1, 1)
            (0, 0): Thought("d", 0.8),  # the same words on another path are another state
            (0, 1): Thought("f", 0.1),
            (0, 2): Thought("g", 0.0),  # refuted
            (1, 1, 0): Thought("x", 0.7, terminal=True, logprob=-2),
            (1, 1, 1): Thought("y", 0.7, terminal=True, logprob=-1),
            (1, 1, 2): Thought("z", 0.95),  # does not end, and is as deep as can be
            (0, 0, 0): Thought("x", 0.9, terminal=True, logprob=-9),
            (0, 0, 1): Thought("y", 0.3),
            (0, 0, 2): Thought("z", 0.3),
        }
    )

    done = run(ToT(beam=2, width=3), script, max_depth=3)

    assert done.asked == [
        [((), 3)],
        [((1,), 3), ((0,), 3)],  # one ask for the level, best first
        [((1, 1), 3), ((0, 0), 3)],
    ]
    assert done.best == [(0, 0, 0), (1, 1, 1), (1, 1, 0), (1, 0)]
    assert {node.key: node.state for node in done.tree} == {
        (): CLOSED,
        (0,): CLOSED,
        (1,): CLOSED,
        (2,): PRUNED,
        (1, 0): TERMINAL,
        (1, 1): CLOSED,
        (1, 2): PRUNED,
        (0, 0): CLOSED,
        (0, 1): PRUNED,
        (0, 2): PRUNED,
        (1, 1, 0): TERMINAL,
        (1, 1, 1): TERMINAL,
        (1, 1, 2): PRUNED,
        (0, 0, 0): TERMINAL,
        (0, 0, 1): PRUNED,
        (0, 0, 2): PRUNED,
    }


def test_tot_dfs_on_a_tree_computed_by_hand() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.5),
            (1,): Thought("b", 0.9),
            (2,): Thought("c", 0.5),  # third: not visited
            (1, 0): Thought("d", 0.2),  # not above the threshold
            (1, 1): Thought("e", 0.6),
            (1, 2): Thought("e", 0.6),  # repeats (1, 1)
            (1, 1, 0): Thought("f", 0.9),
            (1, 1, 1): Thought("g", 0.9),
            (1, 1, 2): Thought("h", 0.9),
            (0, 0): Thought("i", 0.3),
            (0, 1): Thought("j", 0.8, terminal=True),
            (0, 2): Thought("k", 0.4),
            (0, 2, 0): Thought("l", 0.9, terminal=True),
        },
        otherwise=Thought("m", 0.1),
    )

    done = run(
        ToT("dfs", width=3, max_per_state=2, threshold=0.25, stop_value=None), script, max_depth=3
    )

    assert [keys for [(keys, _)] in done.asked] == [(), (1,), (1, 1), (0,), (0, 2), (0, 0)]
    assert done.best == [(0, 2, 0), (0, 1)]
    assert [done.state(*key) for key in ((1,), (1, 1), (1, 1, 0), (2,))] == [PRUNED] * 4
    assert [done.state(*key) for key in ((0,), (0, 2))] == [CLOSED] * 2  # they lead to an answer
    assert done.state(0, 0) is PRUNED


def test_beam_on_a_tree_computed_by_hand() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.4),
            (1,): Thought("b", 0.9, terminal=True),
            (2,): Thought("c", 0.6),
            (3,): Thought("d", 0.4),
            (2, 0): Thought("e", 0.5),
            (2, 1): Thought("f", 0.7),
            (2, 1, 0): Thought("g", 0.95, terminal=True),
            (2, 1, 1): Thought("h", 0.92),
        }
    )

    done = run(Beam(beam_size=2, width=2), script, max_depth=3)

    assert done.asked == [
        [((), 4)],
        [
            ((2,), 2)
        ],  # b holds one of the two places, so one path goes on; it is not inflated to two
        [((2, 1), 2)],
    ]
    assert done.best == [(2, 1, 0), (1,)]
    assert done.state(0) is done.state(3) is done.state(2, 0) is done.state(2, 1, 1) is PRUNED


# Beam ---------------------------------------------------------------------------------------------


def test_tot_proposes_at_every_state_or_at_none() -> None:
    for strategy in ("bfs", "dfs"):
        for generate in ("sample", "propose"):
            settings = ToT(strategy, width=2, beam=2, generate=generate)
            tree = ThoughtTree([0])
            search = settings.start(tree, 3)
            while expansions := search.ask(4):
                assert {each.generate for each in expansions} == {generate}
                most = settings.most_proposals(3)
                assert most == 0 if generate == "sample" else len(expansions) <= most
                search.tell(grow(tree, expansions, hashed(1, terminal=0.0)))


def test_a_finished_path_of_little_worth_gives_its_place_up_but_is_not_forgotten() -> None:
    script = scripted(
        {
            (0,): Thought("wrong", 0.0, terminal=True),
            (1,): Thought("b", 0.8),
            (1, 0): Thought("c", 0.8),
            (1, 1): Thought("d", 0.8),
            (1, 2): Thought("e", 0.8),
        },
        otherwise=Thought("end", 0.7, terminal=True),
    )

    done = run(Beam(beam_size=2, width=2, threshold=0.1), script, max_depth=3)

    assert done.asked[1:] == [[((1,), 2), ((2,), 2)][:1], [((1, 0), 2), ((1, 1), 2)]]
    assert done.best[-1] == (0,)


# Tree of Thoughts ---------------------------------------------------------------------------------


def test_a_search_with_nothing_above_the_threshold_ends_without_an_answer() -> None:
    for controller in (ToT(), ToT("dfs"), Beam()):
        done = run(controller, scripted({}, otherwise=Thought("no", 0.0)), max_depth=3)

        assert len(done.asked) == 1
        assert done.best == []
        assert all(node.state is PRUNED for node in list(done.tree)[1:])


# Any controller, any tree -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "controller",
    [ToT("dfs", width=1), BestFirst(width=1), MCTS(width=1), MCTS(width=1, rollout=1)],
)
def test_a_state_that_grew_nothing_is_given_up(controller: Controller) -> None:
    tree = ThoughtTree([0])
    search = controller.start(tree, 3)
    [child] = grow(tree, search.ask(1), scripted({}))
    search.tell([child])

    search.tell([])

    assert child.state is PRUNED


@pytest.mark.parametrize(
    "controller",
    [
        BestFirst(width=2, leaves=2),
        MCTS(width=2, leaves=2, rollout=0),
        DPTS(width=2, parallel=2, continuous=False),
    ],
)
def test_a_leaf_that_a_limit_left_out_grows_later(controller: Controller) -> None:
    script = scripted({(0,): Thought("a", 0.6), (1,): Thought("b", 0.5)}, Thought("c", 0.1))
    tree = ThoughtTree([0])
    search = controller.start(tree, 3)
    search.tell(grow(tree, search.ask(4), script))
    first, second = (expansion.leaf for expansion in search.ask(4))

    search.tell(grow(tree, [Expansion(first, 2)], script))

    assert second.state is not PRUNED
    assert second in [expansion.leaf for expansion in search.ask(4)]


@given(controllers, scripts, depths)
def test_only_live_blocks_grow_once_and_within_the_depth(
    controller: Controller,
    script: Script,
    max_depth: int,
) -> None:
    tree = ThoughtTree([0])
    search = controller.start(tree, max_depth)
    grown: list[int] = []

    while expansions := search.ask(2):
        for expansion in expansions:
            assert expansion.leaf.state is CLOSED
            assert expansion.leaf.depth < max_depth
            assert expansion.width >= 1
            grown.append(expansion.leaf.id)
        leaves = [expansion.leaf.id for expansion in expansions]
        assert len(leaves) == len(set(leaves)) or isinstance(controller, EPTree)
        search.tell(grow(tree, expansions, script))

    if isinstance(controller, EPTree):
        assert len([node for node in tree if not node.children]) == controller.leaves
    elif isinstance(controller, GROWS_AGAIN):
        most = getattr(controller, "width", len(tree))
        assert max(len(node.children) for node in tree) <= most
    else:
        assert len(grown) == len(set(grown))


@given(controllers, scripts, depths)
def test_an_exhausted_search_has_given_up_all_that_leads_nowhere(
    controller: Controller,
    script: Script,
    max_depth: int,
) -> None:
    done = run(controller, script, max_depth)
    stopped = getattr(controller, "stop_value", None)
    if any(stopped is not None and leaf.value >= stopped for leaf in done.search.best()):
        return
    if isinstance(controller, ToT) and len(done.asked) == controller.max_visited:
        return
    if isinstance(controller, DPTS) and controller.dominance:
        return
    if isinstance(controller, ABMCTS):  # any block may grow another thought
        return
    if isinstance(controller, BestFirst) and done.search._left <= 0:  # type: ignore[attr-defined]
        return
    if isinstance(controller, MCTS) and done.search._started == controller.simulations:  # type: ignore[attr-defined]
        return

    assert all(node.children for node in done.tree if node.state is CLOSED and node.parent)


@given(controllers, scripts, depths)
def test_the_best_are_all_finished_paths_in_order_of_value(
    controller: Controller,
    script: Script,
    max_depth: int,
) -> None:
    done = run(controller, script, max_depth)
    best = done.search.best()

    assert sorted(leaf.id for leaf in best) == [n.id for n in done.tree if n.state is TERMINAL]
    ranks = [(-leaf.value, -mean_logprob(leaf), leaf.id) for leaf in best]
    assert ranks == sorted(ranks)


@given(controllers, scripts, depths, st.randoms(use_true_random=False))
def test_room_and_the_order_of_telling_change_nothing(
    controller: Controller,
    script: Script,
    max_depth: int,
    rng: random.Random,
) -> None:
    first = run(controller, script, max_depth)
    second = run(
        controller,
        script,
        max_depth,
        rooms=lambda step: rng.randint(1, 99),
        shuffle=lambda children: rng.sample(children, len(children)),
    )

    assert first.asked == second.asked
    assert first.best == second.best
    assert [n.state for n in first.tree] == [n.state for n in second.tree]


@pytest.mark.parametrize(
    "cls", [ABMCTS, Beam, BestFirst, Chain, DPTS, DVTS, EPTree, ETS, MCTS, Rebase, ToT]
)
def test_settings_out_of_range_are_refused_by_name(cls: Any) -> None:
    anything = ("threshold", "stop_value", "seed", "first_play", "registered_as")
    for setting in dataclasses.fields(cls):
        if isinstance(setting.default, bool) or setting.name in anything:
            continue
        word = isinstance(setting.default, str)
        floats = (math.nan, math.inf) if isinstance(setting.default, float) else ()
        for wrong in ("no",) if word else (-1, *floats):
            with pytest.raises(UsageError) as caught:
                cls(**{setting.name: wrong})
            assert caught.value.code == "setting-range"
            assert caught.value.message.startswith(f"{setting.name}=")


@pytest.mark.parametrize(
    ("cls", "settings", "said"),
    [
        (ToT, {"width": 10**9}, "width=1000000000: width"),
        (ToT, {"width": 10**9, "strategy": "dfs"}, "width=1000000000: width"),
        (Chain, {"samples": 10**12}, "samples=1000000000000: samples"),
        (
            Beam,
            {"beam_size": 1000, "width": 101},
            "beam_size=1000, width=101: beam_size times width",
        ),
        (DVTS, {"subtrees": 1000, "width": 101}, "subtrees=1000, width=101: subtrees times width"),
        (EPTree, {"chains": 100_001}, "chains=100001: chains"),
        (EPTree, {"forks": 1000, "width": 101}, "forks=1000, width=101: forks times width"),
        *((cls, {"width": 100_001}, "width=100001: width") for cls in (BestFirst, DPTS, ETS)),
        *((cls, {"width": 100_001}, "width=100001: width") for cls in (MCTS, Rebase)),
    ],
)
def test_more_children_at_once_than_a_machine_can_begin_are_refused(
    cls: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=rf"setting-range\] {said} must be at most 100,000\."):
        cls(**settings)


@pytest.mark.parametrize(
    ("controller", "blocks"),
    [
        (ToT(width=3, beam=2), 3 + 6 * (10**30 - 1)),
        (ToT(width=3, beam=2, generate="propose"), 4 + 8 * (10**30 - 1)),
        (ToT(width=1, beam=9), 10**30),
        (ToT(width=2, beam=10**12), 2 * (2**40 - 1 + (10**30 - 40) * 10**12)),
        (ToT(width=1, strategy="dfs", max_visited=10**12), 10**12),
        (DPTS(width=1, max_visited=10**12), 10**12),
        (BestFirst(width=1, expansions=10**12), 10**12),
        (MCTS(width=1, rollout=0, simulations=10**12), 10**30),
    ],
)
@pytest.mark.timeout(20)
def test_the_blocks_of_endless_paths_are_known_at_once(controller: Controller, blocks: int) -> None:
    assert controller.max_blocks(10**30) == blocks
