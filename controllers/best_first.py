"""Best-first search: the best leaves of the whole tree grow next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arbor.tree import Node, ThoughtTree

from .base import Expansion
from .search import (
    Rounds,
    blocks_that_grow,
    check_at_once,
    check_settings,
    give_up,
    without_repeats,
)


@dataclass(frozen=True)
class BestFirst:
    """Best-first tree search (Koh et al., arXiv 2407.01476).

        repeat    the leaf of the highest value in the whole tree grows width thoughts, until
                  `expansions` leaves have grown

    Args:
        width: b, thoughts sampled of a leaf.
        expansions: c, leaves grown in all, the root included.
        leaves: leaves grown in one ask, the best ones; 1 is the sequential search of the source.
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.

    Differs from the paper: thoughts are text, so no environment is restored by replaying actions;
    of equal values the deeper leaf grows first, then the earlier one; a thought that repeats the
    text of an earlier sibling is given up; `leaves` and `threshold` are new (1 and -1 for the
    published behaviour), and the depth limit is the task's (published: 5).
    """

    width: int = 5
    expansions: int = 20
    leaves: int = 4
    threshold: float = 0.0
    stop_value: float | None = 1.0

    def __post_init__(self) -> None:
        check_settings(self, {"width": 1, "expansions": 1, "leaves": 1})
        check_at_once(self, "width")

    def start(self, tree: ThoughtTree, max_depth: int) -> BestFirstSearch:
        return BestFirstSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """width min(expansions, 1 + width + ... + width^(max_depth - 1))."""
        return self.width * blocks_that_grow(self.width, max_depth, most=self.expansions)


class BestFirstSearch(Rounds[BestFirst]):
    """The frontier of one problem; `_frontier` is in the order in which leaves grow."""

    def __init__(self, settings: BestFirst, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth, settings.width)
        self._left = settings.expansions
        self._frontier: list[Node] = []

    def tell(self, children: Sequence[Node]) -> None:
        settings = self._settings
        level = sorted(children, key=lambda child: child.id)
        parents = {child.parent.id for child in level if child.parent is not None}
        grown: list[Node] = []
        for leaf in (expansion.leaf for expansion in self._next):
            if level and leaf.id not in parents:  # a limit left it out of this round
                self._frontier.append(leaf)
            else:
                grown.append(leaf)
        self._left -= len(grown)
        self._next = []
        if self._is_solved(level):
            self._frontier = []
            return
        able = [child for child in without_repeats(level) if self._may_grow(child)]
        kept = {child.id for child in able}
        give_up(child for child in level if child.id not in kept)
        give_up(grown)
        self._frontier = sorted(
            [*self._frontier, *able], key=lambda node: (-node.value, -node.depth, node.id)
        )
        count = min(settings.leaves, self._left)
        self._next = [Expansion(leaf, settings.width) for leaf in self._frontier[:count]]
        del self._frontier[:count]

    def prospects(self) -> Mapping[int, float]:
        """The frontier, halved with each further round until a leaf's turn comes."""
        leaves = self._settings.leaves
        later = self._frontier[: max(0, self._left - len(self._next))]
        return {node.id: 0.5 ** (1 + place // leaves) for place, node in enumerate(later)}
