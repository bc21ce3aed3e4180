"""The tree: structure, geometry, and spans that grow."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.tree import NodeState, Span, ThoughtTree, Tier


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


def test_a_child_begins_where_its_parent_ends(tree: ThoughtTree) -> None:
    child = tree.fork(tree[4])

    assert (child.start, child.depth, child.index) == (3 + 1 + 3 + 4, 4, 0)
    assert child.state is NodeState.OPEN
    assert len(child.tokens) == len(child.span) == 0
    assert tree[4].children == [child]


@given(tree=trees, data=st.data())
def test_distances_are_those_of_the_graph(tree: ThoughtTree, data: st.DataObject) -> None:
    leaves = data.draw(st.lists(st.sampled_from(list(tree)), min_size=1, max_size=4))
    graph = networkx.Graph([(node.parent.id, node.id) for node in tree if node.parent])
    graph.add_node(0)

    shortest = [
        min(networkx.shortest_path_length(graph, leaf.id, node.id) for leaf in leaves)
        for node in tree
    ]

    assert tree.distances(leaves).tolist() == shortest


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
