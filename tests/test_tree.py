"""The tree: structure, geometry, and spans that grow."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.tree import NO_SLOT, Node, NodeState, Span, Spans, ThoughtTree, Tier


def grown(parents: list[int]) -> ThoughtTree:
    """A tree with one block per entry, hung below an earlier one; block i has i tokens."""
    tree = ThoughtTree([7, 8, 9], "prompt")
    for parent in parents:
        node = tree.fork(tree[parent % len(tree)])
        for token in range(node.id):
            tree.append(node, token)
    return tree


trees = st.lists(st.integers(0, 1000), max_size=25).map(grown)


@pytest.fixture
def tree() -> ThoughtTree:
    """0 - 1 - 3 - 4
    |   |    - 5
    |    - 6
     - 2
    """
    return grown([0, 0, 1, 3, 3, 1])


def test_the_root_holds_the_prompt_and_is_closed() -> None:
    tree = ThoughtTree([7, 8, 9], "prompt")

    assert (len(tree), tree.tokens, tree.root.end) == (1, 3, 3)
    assert tree.root.state is NodeState.CLOSED
    assert tree.root.path == [tree.root]
    assert (tree.root.key, tree.root.thoughts) == ((), [])


def test_a_child_begins_where_its_parent_ends(tree: ThoughtTree) -> None:
    child = tree.fork(tree[4])

    assert (child.start, child.depth, child.index) == (3 + 1 + 3 + 4, 4, 0)
    assert child.state is NodeState.OPEN
    assert len(child.tokens) == len(child.span) == 0
    assert tree[4].children == [child]


def test_the_key_names_a_block_by_child_indices(tree: ThoughtTree) -> None:
    assert [node.key for node in tree] == [(), (0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1)]


def test_only_open_blocks_take_tokens(tree: ThoughtTree) -> None:
    tree[1].state = NodeState.CLOSED

    with pytest.raises(AssertionError, match="block 1 is closed, not open"):
        tree.append(tree[1], 5)


def test_a_token_without_kv_can_be_taken_back(tree: ThoughtTree) -> None:
    tree.take_back(tree[3])

    assert (tree[3].tokens, len(tree[3].span), tree[3].span.slot.tolist()) == ([0, 1], 2, [-1, -1])
    tree[3].span.slot[1] = 5
    with pytest.raises(AssertionError, match="holds KV"):
        tree.take_back(tree[3])
    tree[3].state = NodeState.CLOSED
    with pytest.raises(AssertionError, match="not open"):
        tree.take_back(tree[3])


def test_paths_are_united_with_parents_first(tree: ThoughtTree) -> None:
    assert [node.id for node in tree.paths([tree[5], tree[2], tree[4]])] == [0, 1, 2, 3, 4, 5]
    assert tree.paths([]) == []


def test_distance_counts_edges(tree: ThoughtTree) -> None:
    assert tree.distance(tree[4], tree[5]) == 2
    assert tree.distance(tree[4], tree[2]) == 4
    assert tree.distance(tree[4], tree[4]) == 0
    assert tree.distances([tree[5], tree[2]]).tolist() == [1, 2, 0, 1, 2, 0, 3]


@given(tree=trees, data=st.data())
def test_distances_are_those_of_the_graph(tree: ThoughtTree, data: st.DataObject) -> None:
    leaves = data.draw(st.lists(st.sampled_from(list(tree)), min_size=1, max_size=4))
    graph = tree.to_networkx().to_undirected()

    shortest = [
        min(networkx.shortest_path_length(graph, leaf.id, node.id) for leaf in leaves)
        for node in tree
    ]

    assert tree.distances(leaves).tolist() == shortest
    for node in tree:
        assert min(tree.distance(node, leaf) for leaf in leaves) == shortest[node.id]


@given(tree=trees)
def test_every_block_knows_its_place(tree: ThoughtTree) -> None:
    keys = {node.key for node in tree}

    assert len(keys) == len(tree)
    assert tree.tokens == sum(len(node.tokens) for node in tree)
    for node in tree:
        assert tree[node.id] is node
        assert node.end - len(node.tokens) == sum(len(n.tokens) for n in node.path[:-1])
        assert [child.index for child in node.children] == list(range(len(node.children)))
        assert len(node.path) == node.depth + 1
        ancestor = tree.common_ancestor(node, tree[len(tree) - 1])
        assert ancestor in node.path and ancestor in tree[len(tree) - 1].path


def test_the_graph_has_what_a_reader_needs(tree: ThoughtTree) -> None:
    graph = tree.to_networkx()

    assert networkx.is_arborescence(graph)
    assert graph.nodes[3] == {"value": 0.0, "state": "open", "tokens": 3, "text": ""}
    assert list(graph.successors(3)) == [4, 5]


@given(counts=st.lists(st.integers(0, 40), max_size=6))
def test_a_span_grows_without_moving_what_it_holds(counts: list[int]) -> None:
    span, slots = Span(), []
    for count in counts:
        at = len(span)
        span.grow(count)
        span.slot[at:] = np.arange(at, at + count)
        span.tier[at:] = Tier.DEVICE
        slots += range(at, at + count)

        assert span.slot.tolist() == slots
        assert len(span.tier) == len(span.exact) == len(span.depth) == len(span) == len(slots)
    assert span.resident.all()


@given(counts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=12))
def test_spans_of_one_tree_grow_without_touching_each_other(counts: list[tuple[int, int]]) -> None:
    spans = Spans()
    grown = [Span(spans) for _ in range(5)]
    for which, count in counts:
        span = grown[which]
        span.grow(count)
        span.slot[-count:] = which * 1000 + np.arange(len(span) - count, len(span))

    for which, span in enumerate(grown):
        assert span.slot.tolist() == list(range(which * 1000, which * 1000 + len(span)))


def test_new_tokens_hold_nothing() -> None:
    span = Span()
    span.grow(20)

    assert (span.slot == NO_SLOT).all() and not span.resident.any()
    assert (span.tier == Tier.DROPPED).all()
    assert not span.exact.any() and not span.depth.any()


def test_a_block_reads_well() -> None:
    node = Node(id=3, parent=None, index=0, start=0, depth=0, tokens=[1, 2], value=0.25)

    assert repr(node) == "Node(3, open, tokens=2, value=0.250)"
