"""Shared by all searches: the order of finished paths, repeats, what may grow, what is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from arbor.tree import Node, NodeState, ThoughtTree


def mean_logprob(leaf: Node) -> float:
    """Mean log probability of a path's tokens, without the prompt; -inf without tokens."""
    blocks = leaf.path[1:]
    tokens = sum(len(block.tokens) for block in blocks)
    return sum(block.logprob for block in blocks) / tokens if tokens else float("-inf")


def finished(tree: ThoughtTree) -> list[Node]:
    """The TERMINAL leaves, best first: by value, then mean log probability of the path, then id.

    Where only some of them were valued, values say nothing of the others and do not count.
    """
    leaves = [node for node in tree if node.state is NodeState.TERMINAL]
    some = len({leaf.valued for leaf in leaves}) > 1
    return sorted(
        leaves, key=lambda leaf: (0.0 if some else -leaf.value, -mean_logprob(leaf), leaf.id)
    )


def read_of_level(children: Sequence[Node], max_depth: int) -> Sequence[Node]:
    """The children whose values a search by levels goes by: none of the last level."""
    grow = any(child.state is NodeState.CLOSED and child.depth < max_depth for child in children)
    return children if grow else ()


def repeats(level: Iterable[Node]) -> list[bool]:
    """Per block, whether an earlier one of the level has the same thoughts, outer spaces apart."""
    seen: dict[tuple[str, ...], int] = {}
    result = []
    for node in level:
        text = tuple(thought.strip() for thought in node.thoughts)
        result.append(text in seen)
        seen.setdefault(text, node.id)
    return result


def is_open_end(node: Node, max_depth: int, threshold: float) -> bool:
    """Whether a thought may grow: its path has not ended, is not as long as allowed, and is worth
    more than a threshold."""
    return node.state is NodeState.CLOSED and node.depth < max_depth and node.value > threshold


def give_up(nodes: Iterable[Node], may_grow: Callable[[Node], bool] | None = None) -> None:
    """Set PRUNED on blocks that will never grow again, and on ancestors with only such children.

    Finished leaves stay TERMINAL, and the blocks that lead to one keep their state; the root is
    never given up.

    Args:
        may_grow: whether an ancestor still grows more children, and therefore stays; by default
            none does.
    """
    for given_up in nodes:
        node = given_up
        while (
            node.parent is not None
            and node.state is NodeState.CLOSED
            and all(child.state is NodeState.PRUNED for child in node.children)
            and (node is given_up or may_grow is None or not may_grow(node))
        ):
            node.state = NodeState.PRUNED
            node = node.parent
