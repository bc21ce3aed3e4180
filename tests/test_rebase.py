"""REBASE against a tree computed by hand and a small reading of its rule."""

from __future__ import annotations

import math
from functools import cache

from support.fakes import Key, Script, Thought, hashed, run, scripted

from arbor.controllers.rebase import Rebase
from arbor.tree import NodeState


def test_rebase_on_a_tree_computed_by_hand() -> None:
    """T = 1. Level 1: one path is finished, so W = 3; e^0.8 / (e^0.8 + e^0.6 + e^0.2) = 0.42.

    3 x 0.42 = 1.27, so (0,) grows 2; of the remaining W = 1, e^0.6 / (e^0.6 + e^0.2) = 0.60, so
    (1,) grows 1; nothing is left for (2,). Level 2: still W = 3 for 0.5, 0.5 and 0.5, 1 each.
    """
    script = scripted(
        {
            (0,): Thought("a", 0.8),
            (1,): Thought("b", 0.6),
            (2,): Thought("c", 0.2),
            (3,): Thought("d", 0.8, terminal=True),
        }
    )

    done = run(Rebase(width=4, softmax_temperature=1.0), script, max_depth=3)

    assert done.asked == [
        [((), 4)],
        [((0,), 2), ((1,), 1)],
        [((0, 0), 1), ((0, 1), 1), ((1, 0), 1)],
    ]
    assert done.best == [(3,)]
    assert done.state(2) is NodeState.PRUNED


def read_from_the_paper(
    script: Script, width: int, temperature: float, max_depth: int
) -> list[list[tuple[Key, int]]]:
    """The levels of REBASE by keys, without a tree."""
    asked: list[list[tuple[Key, int]]] = []
    grow: list[tuple[Key, int]] = [((), width)]
    left = width
    while grow:
        asked.append(grow)
        children = [(*key, place) for key, count in sorted(grow) for place in range(count)]
        left -= sum(script(key).terminal for key in children)
        able = [
            key
            for key in children
            if not script(key).terminal and script(key).value > 0 and len(key) < max_depth
        ]
        remaining, shares = left, {}
        by_value = sorted(able, key=lambda key: script(key).value, reverse=True)  # stable
        for rank, key in enumerate(by_value):
            if remaining <= 0:
                break
            value = script(key).value
            rest = by_value[rank:]
            total = sum(math.exp((script(other).value - value) / temperature) for other in rest)
            shares[key] = math.ceil(round(remaining / total, 6))
            remaining -= shares[key]
        grow = [(key, shares[key]) for key in able if shares.get(key)]
    return asked


def test_it_agrees_with_a_reading_of_the_paper_on_random_trees() -> None:
    for seed in range(1000):
        width, temperature = 1 + seed % 13, (0.1, 0.2, 1.0)[seed % 3]
        script = cache(hashed(seed, words=10**9, terminal=0.15, values=1 + seed % 9))
        settings = Rebase(width=width, softmax_temperature=temperature, stop_value=None)

        done = run(settings, script, max_depth=1 + seed % 5)

        levels = [sorted(level) for level in done.asked]
        read = read_from_the_paper(script, width, temperature, 1 + seed % 5)
        assert levels == [sorted(level) for level in read]
