"""A search that grows only the best child of each thought."""

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.controllers.base import Expansion
from arbor.tree import Node, NodeState, ThoughtTree


@dataclass(frozen=True)
class Greedy:
    """Grows the best child of each thought, and drops its siblings.

    Args:
        width: children of each thought.
    """

    width: int = 8

    def max_blocks(self, max_depth: int) -> int:
        return self.width * max_depth

    def start(self, tree: ThoughtTree, max_depth: int) -> "GreedySearch":
        return GreedySearch(self.width, tree)


class GreedySearch:
    def __init__(self, width: int, tree: ThoughtTree) -> None:
        self.width = width
        self.tree = tree
        self.leaf: Node | None = tree.root

    def ask(self, room: int) -> list[Expansion]:
        return [Expansion(self.leaf, self.width)] if self.leaf else []

    def tell(self, children: Sequence[Node]) -> None:
        growing = [child for child in children if child.state is NodeState.CLOSED]
        self.leaf = max(growing, key=lambda child: child.value, default=None)
        for child in growing:
            if child is not self.leaf:
                child.state = NodeState.PRUNED  # frees its KV

    def best(self) -> list[Node]:
        done = [node for node in self.tree if node.state is NodeState.TERMINAL]
        return sorted(done, key=lambda node: -node.value)
