"""The table of all blocks, against the tree block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS

from arbor.forest import Forest
from arbor.retention.block_table import FAR, NO_PARENT, BlockTable, HeldTokens
from arbor.tree import Node, NodeState, ThoughtTree


def random_tree(seed: int, blocks: int, *, deep: bool = False) -> ThoughtTree:
    rng = np.random.default_rng(seed)
    tree = ThoughtTree(range(int(rng.integers(1, 6))))
    for _ in range(blocks):
        parent = tree.nodes[-1] if deep else tree[int(rng.integers(len(tree)))]
        alter(tree.fork(parent), rng)
    return tree


def alter(node: Node, rng: np.random.Generator) -> None:
    """Tokens, residency, value, confidence and state of a block become something else."""
    count = int(rng.integers(0, 5))
    node.tokens.extend([7] * count)
    node.span.grow(count)
    slots = np.arange(len(node.span))  # 0 is a slot too
    node.span.slot[:] = np.where(rng.random(len(node.span)) < 0.6, slots, -1)
    node.value, node.confidence = rng.random(2).tolist()
    node.valued = bool(rng.random() < 0.7)
    node.state = list(NodeState)[int(rng.integers(4))]


def table_of(tree: ThoughtTree) -> BlockTable:
    table = BlockTable()
    for node in tree:
        table.touch(node)
    table.refresh()
    return table


def check(table: BlockTable, tree: ThoughtTree) -> None:
    """Every column is what the tree says."""
    assert len(table) == len(tree)
    for node in tree:
        assert table.parent[node.id] == (NO_PARENT if node.parent is None else node.parent.id)
        assert table.depth[node.id] == node.depth
        assert table.start[node.id] == node.start
        assert table.length[node.id] == len(node.tokens)
        assert table.resident[node.id] == int(node.span.resident.sum())
        value = node.value if node.valued else np.nan
        np.testing.assert_equal(table.value[node.id], value)
        assert table.confidence[node.id] == node.confidence
        assert table.open[node.id] == (node.state is NodeState.OPEN)
    counts, offsets = table.held.of(np.arange(len(tree)))
    assert counts.tolist() == table.resident.tolist()
    assert offsets.tolist() == [at for node in tree for at in np.flatnonzero(node.span.resident)]


def some_leaves(tree: ThoughtTree, seed: int) -> list[Node]:
    rng = np.random.default_rng(seed)
    return [tree[int(i)] for i in rng.integers(0, len(tree), int(rng.integers(1, 5)))]


@given(seed=SEEDS)
def test_a_table_with_the_changed_blocks_touched_is_one_made_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(seed, 5)
    table = table_of(tree)
    for clock in range(1, 30):
        if rng.random() < 0.5:
            node = tree.fork(tree[int(rng.integers(len(tree)))])
        else:
            node = tree.nodes[
                -int(rng.integers(1, 3))
            ]  # its start must not move under its children
        if not node.children:
            alter(node, rng)
        table.touch(node)
        table.use(node.path, clock)
        if rng.random() < 0.6:
            table.refresh()
    table.refresh()

    check(table, tree)
    leaves = [leaf.id for leaf in some_leaves(tree, seed)]
    anew = table_of(tree)
    assert (table.distances(leaves) == anew.distances(leaves)).all()
    assert (table.on_paths(leaves) == anew.on_paths(leaves)).all()


@pytest.mark.parametrize("seed", range(5))
def test_what_blocks_are_expected_to_be_worth_is_what_a_walk_up_the_tree_finds(seed: int) -> None:
    tree = random_tree(seed, 30)
    table = table_of(tree)
    best = max(node.value for node in tree if node.valued)
    for node, found in zip(tree, table.expected(), strict=True):
        valued = next((each for each in reversed(node.path) if each.valued), None)
        assert found == (best if valued is None else valued.value)


def test_figures_of_the_search_stand_for_values_and_are_scaled_if_they_have_to_be() -> None:
    tree = ThoughtTree([1, 2])
    for value in (0.2, 0.4, 0.6):
        child = tree.fork(tree.root)
        child.value, child.valued = value, True
    table = table_of(tree)

    assert table.expected({}).tolist() == table.expected().tolist() == [0.6, 0.2, 0.4, 0.6]
    assert table.expected({1: 0.9}).tolist() == [0.9, 0.9, 0.4, 0.6]
    assert table.expected({1: 2.4}) == pytest.approx([1.0, 1.0, 0.0, 0.1])


@pytest.mark.parametrize(
    ("values", "others"),
    [((0.25, 0.5), (0.75,)), ((0.25, 0.5), (3.0, -1.0)), ((-2.0, -1.0), (-9.0, 4.0)), ((), (3.0,))],
)
def test_what_blocks_are_worth_does_not_depend_on_the_trees_next_to_theirs(
    values: tuple[float, ...], others: tuple[float, ...]
) -> None:
    forest, table = Forest(), BlockTable()
    trees = [ThoughtTree([1, 2]), ThoughtTree([1, 2])]
    for tree in trees:
        forest.adopt(tree)
    for value in (values, others):
        tree = trees[value is others]
        for each in value:
            child = tree.fork(tree.root)
            child.value, child.valued = each, True
        tree.fork(tree.fork(tree.root))  # not valued
    for node in forest:
        table.touch(node)
    table.refresh()

    for tree in trees:
        alone = table_of(tree_of_values(tree)).expected()
        assert table.expected()[[node.row for node in tree]].tolist() == alone.tolist()


def tree_of_values(tree: ThoughtTree) -> ThoughtTree:
    """A tree alone with the structure and the values of another."""
    copy = ThoughtTree(tree.root.tokens)
    for node in tree.nodes[1:]:
        assert node.parent is not None
        child = copy.fork(copy[node.parent.id])
        child.value, child.valued = node.value, node.valued
    return copy


def test_a_table_that_forgot_a_tree_is_one_that_never_knew_it() -> None:
    forest, table, other = Forest(), BlockTable(2), BlockTable(2)
    stays, goes = random_tree(5, 9), random_tree(6, 9, deep=True)
    for tree in (stays, goes):
        forest.adopt(tree)
        table.use(tree, 3)
        for node in tree:
            table.touch(node)
    table.refresh()
    other.use(stays, 3)
    for node in stays:
        other.touch(node)
    table.touch(goes.nodes[-1])

    gone = [node.row for node in goes]
    table.forget(gone)
    table.refresh()
    other.refresh()

    here = [node.row for node in stays]
    for name in ("parent", "depth", "start", "length", "resident", "last_used", "tail"):
        assert getattr(table, name)[here].tolist() == getattr(other, name)[here].tolist()
    for column in (table.depth, table.start, table.length, table.resident, table.last_used):
        assert not column[gone].any()
    assert not table.tail[gone].any() and not table.open[gone].any()
    assert np.isnan(table.value[gone]).all() and not table.confidence[gone].any()
    assert table.expected()[here].tolist() == other.expected().tolist()
    # a row that is free is far from every other one, whatever block it was
    for row in gone:
        assert np.delete(table.distances([row]), row).min() == FAR
        assert table.reentry([row], [1.0]).sum() == 1.0


def test_a_block_brings_its_ancestors_along_and_unknown_ids_are_far() -> None:
    tree = ThoughtTree([1, 2])
    first, second = tree.fork(tree.root), tree.fork(tree.root)
    third = tree.fork(second)
    table = BlockTable()
    table.touch(third)
    table.refresh()

    assert len(table) == 4
    assert table.length.tolist() == [2, 0, 0, 0]
    assert table.distances([third.id]).tolist() == [2, FAR, 1, 0]
    assert table.on_paths([third.id]).tolist() == [True, False, True, True]
    table.touch(first)
    table.refresh()
    assert table.distances([third.id]).tolist() == [2, 3, 1, 0]


def test_the_clock_of_a_block_is_that_of_the_last_forward_that_read_it() -> None:
    tree = random_tree(2, 20)
    table = BlockTable()
    table.use(tree[20].path, 5)  # before the table has seen any of them
    for node in tree:
        table.touch(node)
    table.refresh()
    table.use([tree[3], tree.root], 6)

    on_path = {node.id for node in tree[20].path}
    expected = [6 if i in (0, 3) else 5 if i in on_path else 0 for i in range(21)]
    assert table.last_used.tolist() == expected


@given(seed=SEEDS, blocks=st.integers(0, 80))
def test_reentry_is_the_sum_over_the_leaves_below(seed: int, blocks: int) -> None:
    tree = random_tree(seed, blocks)
    rng = np.random.default_rng(seed)
    leaves = rng.integers(0, len(tree), 4)  # one may come twice
    chance = rng.random(4) * 0.4

    found = table_of(tree).reentry(leaves, chance)

    for node in tree:
        below = [
            p for i, p in zip(leaves.tolist(), chance.tolist(), strict=True) if node in tree[i].path
        ]
        assert found[node.id] == pytest.approx(min(1.0, sum(below)))
        if node.parent is not None:
            assert found[node.id] <= found[node.parent.id] + 1e-12


@given(
    notes=st.lists(
        st.dictionaries(st.integers(0, 5), st.lists(st.booleans(), max_size=9), min_size=1),
        min_size=1,
        max_size=8,
    )
)
def test_what_blocks_hold_is_what_was_last_read_of_each(notes: list[dict[int, list[bool]]]) -> None:
    held, last = HeldTokens(), dict[int, list[bool]]()
    for note in notes:
        held.update(
            np.array(list(note)),
            np.array([len(resident) for resident in note.values()]),
            np.array([sum(resident) for resident in note.values()]),
            np.array(
                [at for resident in note.values() for at in np.flatnonzero(resident)], np.int64
            ),
        )
        last |= note
    ids = sorted(last)

    counts, offsets = held.of(np.array(ids))

    assert counts.tolist() == [sum(last[node]) for node in ids]
    want = [offset for node in ids for offset, there in enumerate(last[node]) if there]
    assert offsets.tolist() == want
