"""DVTS: diverse verifier tree search, greedy search in several independent subtrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.tree import Node, ThoughtTree

from .base import Expansion
from .search import Levels, check_at_once, check_settings


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
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.

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
        check_settings(self, {"subtrees": 1, "width": 1})
        check_at_once(self, "subtrees", "width")

    def start(self, tree: ThoughtTree, max_depth: int) -> DVTSSearch:
        return DVTSSearch(self, tree, max_depth, self.subtrees * self.width)

    def max_blocks(self, max_depth: int) -> int:
        return self.subtrees * self.width * max_depth


class DVTSSearch(Levels[DVTS]):
    """The subtrees of one problem; the first `width` children of the root are in subtree 0."""

    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        width = self._settings.width
        subtrees: dict[int, list[Node]] = {}
        for child in level:
            subtrees.setdefault(child.path[1].index // width, []).append(child)
        best = [max(each, key=lambda child: child.value) for each in subtrees.values()]
        return [Expansion(child, width) for child in best if self._may_grow(child)]
