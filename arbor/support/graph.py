"""A search tree as a networkx graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import networkx


class Vertex(NamedTuple):
    """One block of a search tree.

    Attributes:
        id: of the block; the root's is 0.
        parent: id of its parent; None for the root.
        text: of the thought; the root's is the prompt.
        value: the verifier's, in [0, 1]; 0 without one.
        state: ``open``, ``closed``, ``terminal`` or ``pruned``.
        tokens: its length.
    """

    id: int
    parent: int | None
    text: str
    value: float
    state: str
    tokens: int


def search_graph(blocks: Iterable[Vertex]) -> networkx.DiGraph:
    """A directed graph with an edge from every parent to each of its children.

    Args:
        blocks: parents before their children, children in their order.

    Returns:
        Nodes are block ids with the attributes text, value, state and tokens.
    """
    import networkx  # here: slow to import, and seldom needed

    graph = networkx.DiGraph()
    for block in blocks:
        graph.add_node(
            block.id,
            text=block.text,
            value=block.value,
            state=block.state,
            tokens=block.tokens,
        )
        if block.parent is not None:
            graph.add_edge(block.parent, block.id)
    return graph
