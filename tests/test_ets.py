"""ETS against programs solved by hand and by trying every choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from support.fakes import Thought, hashed, run, scripted

from arbor.controllers.ets import ETS, choose
from arbor.controllers.rebase import Rebase, rebase_widths
from arbor.tree import Node, NodeState, ThoughtTree


def test_ets_on_a_tree_computed_by_hand() -> None:
    """lambda_s = 0, T large: REBASE gives 0, 1 and 2 the shares 2/4, 1/4 and 1/4.

    The thoughts have 1, 1 and 8 tokens, so 2 costs 0.8 of the 10 and the others 0.1 each: 2 is
    worth 0.25 - 0.8 < 0 and is left out. REBASE then gives 0 and 1 two each.
    """
    script = scripted(
        {
            (0,): Thought("a", 0.8, tokens=1),
            (1,): Thought("b", 0.8, tokens=1),
            (2,): Thought("c", 0.8, tokens=8),
            (3,): Thought("d", 0.0),
        }
    )

    done = run(ETS(width=4, softmax_temperature=9.0, lambda_s=0.0), script, max_depth=2)
    rebase = run(Rebase(width=4, softmax_temperature=9.0), script, max_depth=2)

    assert done.asked == [[((), 4)], [((0,), 2), ((1,), 2)]]
    assert rebase.asked[1] == [((0,), 2), ((1,), 1), ((2,), 1)]
    assert done.state(2) is NodeState.PRUNED


def test_covering_clusters_keeps_a_different_thought() -> None:
    """A long thought that no other is similar to is worth lambda_s / K more."""
    script = scripted(
        {
            (0,): Thought("4 + 5 = 9", 0.8, tokens=1),
            (1,): Thought("5 + 4 = 9", 0.8, tokens=1),
            (2,): Thought("10 - 6 = 4", 0.8, tokens=8),
        }
    )

    def grown(lambda_s: float) -> list[tuple[int, ...]]:
        done = run(ETS(width=3, softmax_temperature=9.0, lambda_s=lambda_s), script, max_depth=2)
        return [key for key, _ in done.asked[1]]

    assert grown(0.0) == [(0,), (1,)]
    assert grown(1.5) == [(0,), (1,), (2,)]


def test_without_weights_it_is_rebase() -> None:
    for seed in range(20):
        script = hashed(seed, terminal=0.1)
        ets, rebase = ETS(8, lambda_c=0.0, lambda_s=0.0), Rebase(8)
        assert run(ets, script, 4).asked == run(rebase, script, 4).asked


def block(tree: ThoughtTree, parent: Node, value: float, tokens: int) -> Node:
    child = tree.fork(parent)
    for token in range(tokens):
        tree.append(child, token)
    child.value, child.state = value, NodeState.CLOSED
    return child


def worth(
    leaves: Sequence[Node],
    picked: Sequence[bool],
    widths: Sequence[int],
    clusters: Sequence[int],
    settings: ETS,
) -> float:
    """The objective, term by term."""

    def cost(node: Node) -> float:
        if settings.cost == "blocks":
            return 1.0
        return 0.0 if node.parent is None else len(node.tokens)

    every = {node.id: node for leaf in leaves for node in leaf.path}
    held = {n.id: n for leaf, pick in zip(leaves, picked, strict=True) if pick for n in leaf.path}
    whole = sum(cost(node) for node in every.values()) or 1.0
    gained = sum(w for w, pick in zip(widths, picked, strict=True) if pick) / sum(widths)
    spent = settings.lambda_c * sum(cost(node) for node in held.values()) / whole
    kinds = {cluster for cluster, pick in zip(clusters, picked, strict=True) if pick}
    count = len({*clusters})
    extra = settings.lambda_s * len(kinds) / count if count > 1 else 0.0
    return gained - spent + extra


@pytest.mark.slow
def test_it_finds_what_trying_every_choice_finds_on_random_trees() -> None:
    rng = random.Random(0)
    for number in range(1000):
        tree = ThoughtTree([0] * rng.randint(1, 9))
        frontier = [tree.root]
        for _ in range(rng.randint(1, 3)):
            frontier = [
                block(tree, rng.choice(frontier), rng.random(), rng.randint(0, 9))
                for _ in range(rng.randint(2, 6))
            ]
        widths = rebase_widths([leaf.value for leaf in frontier], rng.randint(2, 20), 0.2)
        clusters = [0] + [rng.randint(0, 2) for _ in frontier[1:]]
        names = sorted({*clusters})
        clusters = [names.index(cluster) for cluster in clusters]
        settings = ETS(
            lambda_c=rng.choice([0.0, 0.5, 1.0, 2.0]),
            lambda_s=rng.choice([0.0, 0.5, 1.5]),
            cost=("tokens", "blocks")[number % 2],  # type: ignore[arg-type]
        )

        picked = choose(frontier, widths, clusters, settings)

        choices = itertools.product([False, True], repeat=len(frontier))
        best = max(worth(frontier, c, widths, clusters, settings) for c in choices if any(c))
        assert any(picked)
        found = worth(frontier, picked, widths, clusters, settings)
        assert math.isclose(found, best, abs_tol=2e-6)
