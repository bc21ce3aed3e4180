"""Work cut into waves: each fits, and no wave ends before it has to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS

from arbor.engine.mode import fitting, halves
from arbor.tree import Node, ThoughtTree, paths_of


def random_tree(seed: int) -> ThoughtTree:
    rng = np.random.default_rng(seed)
    tree = ThoughtTree(range(int(rng.integers(1, 5))))
    for _ in range(int(rng.integers(0, 10))):
        child = tree.fork(tree[int(rng.integers(len(tree)))])
        for _ in range(int(rng.integers(0, 5))):
            tree.append(child, 7)
    return tree


def held(nodes: Sequence[Node], extra: Sequence[int], wave: Sequence[int]) -> int:
    """Tokens of all paths of a wave, each block once, and of its own."""
    paths = paths_of([nodes[index] for index in wave])
    return sum(len(node.tokens) for node in paths) + sum(extra[index] for index in wave)


@given(seed=SEEDS, count=st.integers(0, 12), spare=st.integers(0, 12))
def test_a_wave_takes_work_until_the_next_piece_would_not_fit(
    seed: int, count: int, spare: int
) -> None:
    tree, rng = random_tree(seed), np.random.default_rng(seed)
    nodes = [tree[int(place)] for place in rng.integers(0, len(tree), count)]
    nodes.sort(key=lambda node: node.key)
    extra = rng.integers(0, 4, count).tolist()
    slots = spare + max((n.end + more for n, more in zip(nodes, extra, strict=True)), default=0)

    waves = list(fitting(nodes, extra, slots))

    assert [index for wave in waves for index in wave] == list(range(count))
    assert all(held(nodes, extra, wave) <= slots for wave in waves)
    assert all(held(nodes, extra, [*wave, wave[-1] + 1]) > slots for wave in waves[:-1])


@given(extra=st.lists(st.integers(0, 6), max_size=12), slots=st.integers(1, 24))
def test_lossy_waves_take_half_of_the_budget_or_one_piece_that_is_longer(
    extra: list[int], slots: int
) -> None:
    waves = list(halves(extra, slots))

    assert [index for wave in waves for index in wave] == list(range(len(extra)))
    taken = [2 * sum(extra[index] for index in wave) for wave in waves]
    assert all(tokens <= slots or len(wave) == 1 for tokens, wave in zip(taken, waves, strict=True))
    for tokens, wave in zip(taken, waves[:-1], strict=False):
        assert tokens + 2 * extra[wave[-1] + 1] > slots


@pytest.mark.parametrize(
    ("slots", "waves"), [(16, [[0, 1, 2, 3]]), (15, [[0, 1, 2], [3]]), (12, [[0, 1], [2, 3]])]
)
def test_waves_fill_the_budget_to_the_last_slot(slots: int, waves: list[list[int]]) -> None:
    tree = ThoughtTree(range(8))

    assert list(fitting([tree.root] * 4, [2] * 4, slots)) == waves
    assert list(halves([2] * 4, slots)) == ([[0, 1, 2, 3]] if slots == 16 else [[0, 1, 2], [3]])
