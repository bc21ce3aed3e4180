"""Searches against scripted trees: hand-computed examples, and what must hold for any tree."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import Key, Script, Thought, grow, hashed, run, scripted

from arbor import components
from arbor.controllers.ab_mcts import ABMCTS
from arbor.controllers.base import Controller, Foresight, Search
from arbor.controllers.beam import Beam
from arbor.controllers.best_first import BestFirst
from arbor.controllers.chain import Chain
from arbor.controllers.dpts import DPTS
from arbor.controllers.dvts import DVTS
from arbor.controllers.ets import ETS
from arbor.controllers.mcts import MCTS
from arbor.controllers.ranking import finished, give_up, mean_logprob
from arbor.controllers.rebase import Rebase
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree

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
        select=st.sampled_from(["greedy", "sample"]),
        threshold=thresholds,
        max_per_state=small,
        max_visited=st.integers(1, 12),
        stop_value=stops,
        seed=st.integers(0, 3),
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
        posterior=st.sampled_from(["gaussian", "beta"]),
        thoughts=st.integers(1, 20),
        leaves=small,
        threshold=thresholds,
        stop_value=stops,
        seed=st.integers(0, 3),
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
        virtual_loss=st.integers(0, 2),
        rollout=st.sampled_from([0, 1, 3, None]),
        rollout_width=small,
        reward=st.sampled_from(["last", "mean", "max"]),
        rollout_weight=st.sampled_from([0.5, 1.0]),
        backup=st.sampled_from(["mean", "max"]),
        widening=st.sampled_from([None, 0.5, 1.0]),
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


# Chain --------------------------------------------------------------------------------------------


def test_a_chain_is_one_path() -> None:
    done = run(Chain(), scripted({(0, 0, 0): Thought("end", 0.0, terminal=True)}), max_depth=9)

    assert done.asked == [[((), 1)], [((0,), 1)], [((0, 0), 1)]]
    assert done.best == [(0, 0, 0)]


def test_chains_grow_together_whatever_they_are_worth() -> None:
    script = scripted(
        {(0,): Thought("a", 0.0), (1,): Thought("a", 0.0), (2,): Thought("b", 1.0, terminal=True)}
    )

    done = run(Chain(samples=3), script, max_depth=2)

    assert done.asked == [[((), 3)], [((0,), 1), ((1,), 1)]]
    assert done.best == [(2,)]
    assert done.state(0) is done.state(0, 0) is PRUNED  # the limit came before an answer


def test_the_best_chain_has_the_highest_value_then_the_likelier_tokens_then_the_first_place() -> (
    None
):
    ends: dict[Key, Thought] = {
        (0,): Thought("a", 0.5, True, logprob=-2.0, tokens=2),
        (1,): Thought("b", 0.5, True, logprob=-2.0, tokens=4),
        (2,): Thought("c", 0.9, True, logprob=-9.0),
        (3,): Thought("d", 0.5, True, logprob=-1.0, tokens=1),
    }

    assert run(Chain(samples=4), scripted(ends), max_depth=2).best == [(2,), (1,), (0,), (3,)]


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


def test_tot_with_proposals_makes_a_block_more_for_every_state_that_grows() -> None:
    for settings in (
        ToT(beam=2, width=3),
        ToT(beam=2, width=1),
        ToT(beam=3, width=2, select="sample"),
        ToT("dfs", width=3, max_per_state=2, max_visited=9),
        ToT("dfs", width=1),
    ):
        proposing = replace(settings, generate="propose")
        done = run(replace(settings, stop_value=None), scripted({}), max_depth=3)
        asked = sum(len(level) for level in done.asked)
        if settings.select == "greedy":
            assert done.blocks == settings.max_blocks(3)
            assert proposing.max_blocks(3) == done.blocks + asked
        assert proposing.max_blocks(3) - settings.max_blocks(3) >= asked
        assert max(map(len, done.asked)) <= proposing.most_proposals(3)
    assert ToT(generate="propose").most_proposals(1) == 1


def test_the_spec_of_tot_names_how_thoughts_are_generated_only_where_they_are_proposed() -> None:
    assert "generate" not in components.spec_of(ToT())
    spec = components.spec_of(ToT(generate="propose"))
    assert spec["generate"] == "propose"
    assert components.build("controller", spec) == ToT(generate="propose")
    assert components.defaults_of(ToT)["generate"] == "sample"
    with pytest.raises(UsageError, match="generate='dream'"):
        ToT(generate="dream")  # type: ignore[arg-type]


def test_a_beam_ends_when_finished_paths_hold_every_place() -> None:
    script = scripted(
        {
            (0,): Thought("a", 0.9, terminal=True),
            (1,): Thought("b", 0.8, terminal=True),
            (2,): Thought("c", 0.7),
        }
    )

    done = run(Beam(beam_size=2, width=2), script, max_depth=5)

    assert len(done.asked) == 1
    assert done.best == [(0,), (1,)]


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


def test_paths_that_say_the_same_hold_one_place_unless_dedup_is_off() -> None:
    same = scripted({}, otherwise=Thought("same", 0.5))

    with_dedup = run(Beam(beam_size=3, width=2), same, max_depth=3)
    without = run(Beam(beam_size=3, width=2, dedup=False), same, max_depth=3)

    assert [len(level) for level in with_dedup.asked] == [1, 1, 1]
    assert [len(level) for level in without.asked] == [1, 3, 3]


# Tree of Thoughts ---------------------------------------------------------------------------------


def test_the_defaults_are_those_of_game_of_24() -> None:
    settings = ToT()

    assert (settings.strategy, settings.beam, settings.select) == ("bfs", 5, "greedy")
    assert settings.max_blocks(3) == 10 + 50 + 50


def test_tot_stops_at_a_proof_and_goes_on_without_one() -> None:
    script = scripted({(1,): Thought("found", 1.0, terminal=True)}, otherwise=Thought("same", 0.9))

    for strategy in ("bfs", "dfs"):
        assert len(run(ToT(strategy, width=2), script, max_depth=4).asked) == 1
        assert len(run(ToT(strategy, width=2, stop_value=None), script, max_depth=4).asked) == 4


def test_a_proof_deep_in_one_branch_leaves_the_other_branches_alone() -> None:
    script = scripted({(0,): Thought("a", 0.9), (0, 1): Thought("found", 1.0, terminal=True)})

    done = run(ToT("dfs", width=2), script, max_depth=4)

    assert done.asked == [[((), 2)], [((0,), 2)]]
    assert done.state(1) is CLOSED  # the search has ended; it was not given up


@pytest.mark.parametrize("controller", [ToT("bfs"), ToT("dfs"), Beam()])
def test_a_thought_of_value_one_that_does_not_end_a_path_does_not_stop_a_search(
    controller: Controller,
) -> None:
    done = run(controller, scripted({}, otherwise=Thought("a", 1.0)), max_depth=3)

    assert len(done.asked) == 3


def test_a_repeated_state_counts_nothing_and_is_chosen_only_below_the_threshold() -> None:
    script = scripted({(2,): Thought("other", 0.1)}, otherwise=Thought("same", 0.9))

    strict = run(ToT(beam=3, width=3), script, max_depth=2)
    released = run(ToT(beam=3, width=3, threshold=-1), script, max_depth=2)

    assert strict.asked[1] == [((0,), 3), ((2,), 3)]
    assert released.asked[1] == [((0,), 3), ((2,), 3), ((1,), 3)]


def test_a_search_with_nothing_above_the_threshold_ends_without_an_answer() -> None:
    for controller in (
        ToT(),
        ToT(select="sample"),
        ToT("dfs"),
        Beam(),
        ToT(select="sample", threshold=-1),
    ):
        done = run(controller, scripted({}, otherwise=Thought("no", 0.0)), max_depth=3)

        assert len(done.asked) == 1
        assert done.best == []
        assert all(node.state is PRUNED for node in list(done.tree)[1:])


def test_sampling_draws_in_proportion_to_value_and_with_replacement() -> None:
    script = scripted({(0,): Thought("a", 0.2), (1,): Thought("b", 0.6), (2,): Thought("c", 0.0)})
    drawn: Counter[Key] = Counter()

    for seed in range(150):
        done = run(ToT(select="sample", beam=5, width=3, seed=seed), script, max_depth=2)
        assert sum(width for _, width in done.asked[1]) == 5 * 3
        drawn.update({key: width // 3 for key, width in done.asked[1]})

    assert drawn[(2,)] == 0
    assert drawn[(1,)] / (5 * 150) == pytest.approx(0.75, abs=0.05)


def test_each_level_has_its_own_draws() -> None:
    """Equal values at different places of the tree are not drawn alike."""
    early = scripted({(2,): Thought("no", 0.0)})
    late = scripted({(0,): Thought("no", 0.0)})

    def widths(seed: int, script: Script) -> list[int]:
        done = run(ToT(select="sample", width=3, seed=seed), script, max_depth=2)
        return [width for _, width in done.asked[1]]

    assert any(widths(seed, early) != widths(seed, late) for seed in range(20))


def test_sampling_does_not_touch_the_global_generator() -> None:
    random.seed(5)
    before = random.getstate()

    run(ToT(select="sample"), hashed(1), max_depth=3)

    assert random.getstate() == before


def test_dfs_grows_at_most_so_many_states() -> None:
    done = run(ToT("dfs", width=2, max_visited=4), scripted({}), max_depth=9)

    assert len(done.asked) == 4
    assert done.blocks == 8


# Any controller, any tree -------------------------------------------------------------------------


@given(controllers, scripts, depths)
def test_a_search_makes_at_most_max_blocks(
    controller: Controller, script: Script, max_depth: int
) -> None:
    assert run(controller, script, max_depth).blocks <= controller.max_blocks(max_depth)


def test_some_search_makes_exactly_max_blocks() -> None:
    endless = scripted({})  # all thoughts differ, are worth the same, and none ends a path
    sizes = list(itertools.product((1, 2, 3), repeat=2))
    every: list[Controller] = [
        *(Chain(samples) for samples in (1, 3)),
        *(Beam(beam_size, width) for beam_size, width in sizes),
        *(DVTS(subtrees, width) for subtrees, width in sizes),
        *(Rebase(width) for width in (1, 2, 5)),
        *(ETS(width, lambda_c=0.0) for width in (1, 2, 5)),
        *(BestFirst(width, expansions) for width, expansions in sizes),
        *(ABMCTS(thoughts=thoughts, leaves=leaves) for thoughts, leaves in sizes),
        *(MCTS(width=width, simulations=simulations) for width, simulations in sizes),
        *(ToT(beam=beam, width=width) for beam, width in sizes),
        *(
            ToT("dfs", width=width, max_per_state=visited, max_visited=most)
            for width, visited in sizes
            for most in (1, 2, 5, 100)
        ),
    ]

    for controller, max_depth in itertools.product(every, (1, 2, 3, 4)):
        assert run(controller, endless, max_depth).blocks == controller.max_blocks(max_depth)


@given(small, small, depths, st.integers(0, 9))
def test_sampling_makes_max_blocks_whatever_is_drawn(
    beam: int, width: int, max_depth: int, seed: int
) -> None:
    controller = ToT(beam=beam, width=width, select="sample", seed=seed)

    assert run(controller, scripted({}), max_depth).blocks == controller.max_blocks(max_depth)


@pytest.mark.parametrize(
    "controller",
    [
        Chain(3),
        Beam(2, 2),
        ToT(beam=2, width=3),
        ToT("dfs", width=3),
        DVTS(2, 2),
        Rebase(4),
        ETS(4, lambda_c=0.0),
        DPTS(2, 2, continuous=False),
    ],
)
def test_equal_values_go_by_id_in_any_order_of_the_children(controller: Controller) -> None:
    equal = scripted({})

    search = run(controller, equal, max_depth=3)
    reverse = run(controller, equal, max_depth=3, shuffle=lambda nodes: nodes[::-1])

    assert search.asked == reverse.asked
    assert all(
        [key for key, _ in level] == sorted(key for key, _ in level) for level in search.asked
    )


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
        assert len(leaves) == len(set(leaves))
        search.tell(grow(tree, expansions, script))

    if isinstance(controller, GROWS_AGAIN):
        most = getattr(controller, "width", len(tree))
        assert max(len(node.children) for node in tree) <= most
    else:
        assert len(grown) == len(set(grown))


@given(controllers, scripts, depths)
def test_what_is_given_up_is_never_grown_and_holds_nothing_finished(
    controller: Controller,
    script: Script,
    max_depth: int,
) -> None:
    tree = ThoughtTree([0])
    search = controller.start(tree, max_depth)
    pruned: dict[int, Node] = {}

    while expansions := search.ask(2):
        assert not any(node.id in pruned for e in expansions for node in e.leaf.path)
        search.tell(grow(tree, expansions, script))
        assert all(node.state is PRUNED for node in pruned.values())
        pruned.update({node.id: node for node in tree if node.state is PRUNED})

    assert tree.root.state is CLOSED
    for node in pruned.values():
        assert all(child.state is PRUNED for child in node.children)


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


@given(controllers)
def test_asking_twice_asks_the_same(controller: Controller) -> None:
    search = controller.start(ThoughtTree([0]), 3)
    first = search.ask(1)

    first_copy = list(first)
    first.clear()

    assert search.ask(8) == first_copy
    assert isinstance(controller, Controller)
    assert isinstance(search, Search)


@given(controllers, scripts)
def test_a_step_that_grew_nothing_ends_or_backtracks(
    controller: Controller, script: Script
) -> None:
    tree = ThoughtTree([0])
    search = controller.start(tree, 3)
    search.tell(grow(tree, search.ask(1), script))

    for _ in range(20):
        if not search.ask(1):
            break
        search.tell([])

    assert not search.ask(1)


@given(controllers, scripts, depths, st.randoms(use_true_random=False))
def test_a_search_goes_on_with_fewer_children_than_it_asked_for(
    controller: Controller, script: Script, max_depth: int, rng: random.Random
) -> None:
    """What an interruption or a limit cuts off is PRUNED or was never made."""
    tree = ThoughtTree([0])
    search = controller.start(tree, max_depth)

    for _ in range(500):
        expansions = search.ask(2)
        if not expansions:
            break
        assert all(each.leaf.state is CLOSED for each in expansions)
        children = grow(tree, expansions[: rng.randint(0, len(expansions))], script)
        lost = [child for child in children if rng.random() < 0.3]
        for child in lost:
            child.state = PRUNED
        search.tell([child for child in children if child.state is not PRUNED])

    assert not search.ask(2)
    assert len(tree) - 1 <= controller.max_blocks(max_depth)
    assert all(leaf.state is TERMINAL for leaf in search.best())


@given(controllers, scripts, depths)
def test_prospects_are_probabilities_of_blocks_that_can_grow_later(
    controller: Controller, script: Script, max_depth: int
) -> None:
    tree = ThoughtTree([0])
    search = controller.start(tree, max_depth)

    while expansions := search.ask(2):
        assert isinstance(search, Foresight)
        later = dict(search.prospects())
        assert not any(expansion.leaf.id in later for expansion in expansions)
        for number, likely in later.items():
            assert 0 <= likely <= 1
            assert tree[number].state is CLOSED
            assert tree[number].depth < max_depth
        search.tell(grow(tree, expansions, script))


@given(scripts, depths)
def test_bfs_and_beam_ask_once_per_level(script: Script, max_depth: int) -> None:
    for controller in (ToT(beam=2, width=3), Beam(2, 3), Chain(4), Rebase(6), ETS(6), DVTS(2, 3)):
        for level, asked in enumerate(run(controller, script, max_depth).asked):
            assert all(len(key) == level for key, _ in asked)


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Chain, {"samples": 0}),
        (Beam, {"beam_size": 0}),
        (Beam, {"width": 0}),
        (ToT, {"beam": 0}),
        (ToT, {"width": -1}),
        (ToT, {"max_per_state": 0}),
        (ToT, {"max_visited": 0}),
        (ToT, {"strategy": "mcts"}),
        (ToT, {"select": "best"}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(cls: type, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        cls(**fields)

    assert caught.value.code == "setting-range"
    assert next(iter(fields)) in caught.value.message


# Ranking ------------------------------------------------------------------------------------------


def test_giving_a_block_up_gives_up_what_only_led_to_it() -> None:
    tree = ThoughtTree([0])
    a, b = grow(tree, Chain(2).start(tree, 3).ask(1), scripted({}))
    first, second = tree.fork(a), tree.fork(a)
    only = tree.fork(second)
    for node in (first, second, only):
        node.state = CLOSED

    give_up([only])
    assert (only.state, second.state) == (PRUNED, PRUNED)
    assert (a.state, b.state) == (CLOSED, CLOSED)

    give_up([first, b])
    assert (a.state, b.state, tree.root.state) == (PRUNED, PRUNED, CLOSED)


def test_a_path_without_tokens_ranks_below_any_with_some() -> None:
    tree = ThoughtTree([0])
    silent, _ = grow(
        tree,
        Chain(2).start(tree, 3).ask(1),
        scripted(
            {(0,): Thought("", 0.5, True, 0.0, tokens=0), (1,): Thought("a", 0.5, True, -50.0)}
        ),
    )

    assert mean_logprob(silent) == float("-inf")
    assert [leaf.key for leaf in finished(tree)] == [(1,), (0,)]


def test_depth_first_says_what_it_will_come_back_to_and_the_others_nothing() -> None:
    tree = ThoughtTree([1, 2])
    search = ToT(strategy="dfs", width=3, stop_value=None).start(tree, 4)
    children = [tree.fork(tree.root) for _ in range(3)]
    for child, value in zip(children, (0.2, 0.9, 0.5), strict=True):
        child.state, child.value, child.text = NodeState.CLOSED, value, str(value)
    assert search.prospects() == {}
    search.tell(children)

    (running,) = (expansion.leaf for expansion in search.ask(8))
    assert running is children[1]
    assert search.prospects() == {children[2].id: 0.5, children[0].id: 0.25}
    for quiet in (ToT(), Beam(), Chain()):
        assert quiet.start(ThoughtTree([1]), 4).prospects() == {}
