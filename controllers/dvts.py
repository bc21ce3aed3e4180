"""DVTS: diverse verifier tree search, greedy search in several independent subtrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion
from .ranking import finished, give_up, is_open_end, read_of_level


@dataclass(frozen=True)
class DVTS:
    """Diverse verifier tree search (Beeching, Tunstall and Rush, "Scaling test-time compute with
    open models", 2024; search-and-learn).

        step 1    subtrees x width thoughts of the root, width for each subtree
        step t    every subtree keeps its best thought, ties by id; if that is unfinished, it grows
                  width thoughts

    In search-and-learn's letters, N = subtrees x width and M = width. All subtrees grow in one ask.

    Args:
        subtrees: N / M, independent greedy searches.
        width: M, thoughts sampled at each step.
        threshold: a thought grows only if its value is above this; the default leaves out what a
            verifier refutes.
        stop_value: the search ends as soon as a finished path is worth this much; None for never.

    Differs from the released code: every thought that ends a path is finished, also where it is not
    the best of its subtree (released: all thoughts of a subtree's last step count as completions,
    finished or not); a subtree whose best thought is refuted ends; no lookahead, so a thought is
    valued by itself (released: `lookahead` further greedy steps, 0 by default); `threshold` and
    `stop_value` are new (-1 and None for the released behaviour).
    """

    subtrees: int = 4
    width: int = 4
    threshold: float = 0.0
    stop_value: float | None = 1.0

    def __post_init__(self) -> None:
        for name, value in (("subtrees", self.subtrees), ("width", self.width)):
            if value < 1:
                raise UsageError("setting-range", f"{name}={value}: it must be at least 1.")

    def start(self, tree: ThoughtTree, max_depth: int) -> DVTSSearch:
        return DVTSSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """subtrees x width x max_depth."""
        return self.subtrees * self.width * max_depth


class DVTSSearch:
    """The subtrees of one problem."""

    def __init__(self, settings: DVTS, tree: ThoughtTree, max_depth: int) -> None:
        self._settings = settings
        self._tree = tree
        self._max_depth = max_depth
        self._next = [Expansion(tree.root, settings.subtrees * settings.width)]

    def ask(self, room: int) -> list[Expansion]:
        return list(self._next)

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        return read_of_level(children, self._max_depth)

    def tell(self, children: Sequence[Node]) -> None:
        settings = self._settings
        level = sorted(children, key=lambda child: child.id)
        self._next = []
        if settings.stop_value is not None and any(
            child.state is NodeState.TERMINAL and child.value >= settings.stop_value
            for child in level
        ):
            return
        subtrees: dict[int, list[Node]] = {}
        for child in level:
            subtrees.setdefault(_subtree(child, settings.width), []).append(child)
        best = [max(each, key=lambda child: child.value) for each in subtrees.values()]
        self._next = [Expansion(child, settings.width) for child in best if self._may_grow(child)]
        growing = {expansion.leaf.id for expansion in self._next}
        give_up(child for child in level if child.id not in growing)

    def prospects(self) -> dict[int, float]:
        return {}  # leaves outside the next round are given up

    def best(self) -> list[Node]:
        return finished(self._tree)

    def _may_grow(self, node: Node) -> bool:
        return is_open_end(node, self._max_depth, self._settings.threshold)


def _subtree(node: Node, width: int) -> int:
    """The subtree of a block: the first `width` children of the root are in subtree 0."""
    return node.path[1].index // width
