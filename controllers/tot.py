"""Tree of Thoughts: breadth-first and depth-first search over thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from arbor.tree import Node, ThoughtTree

from .base import Expansion, Generate, Search
from .search import (
    Levels,
    Rounds,
    blocks_that_grow,
    check_at_once,
    check_settings,
    give_up,
    repeats,
)


@dataclass(frozen=True)
class ToT:
    """Tree of Thoughts (Yao et al., arXiv 2305.10601, Algorithms 1 and 2).

        bfs    every state of the level grows width thoughts (one ask); the best `beam` are the next
               level
        dfs    the newest state grows width thoughts; the best max_per_state above the threshold are
               visited in order of value, each with its whole subtree before the next

    The released code is princeton-nlp/tree-of-thought-llm. Its state evaluators are the verifiers
    ``self`` (value) and ``vote``.

    The defaults are those of Game of 24 (section 4.1: BFS, b = 5), `max_per_state` and
    `max_visited` those of the crosswords notebook.

    Args:
        strategy: ``bfs`` (Algorithm 1) or ``dfs`` (Algorithm 2).
        beam: b, states kept of each level (bfs).
        width: k, thoughts of each state.
        generate: ``sample``: k samples, spread so that they repeat each other little
            (`Sampling.arithmetic`); repeats are left out. ``propose``, the paper's choice for Game
            of 24 and crosswords: one completion lists next thoughts, and the first k different
            ones grow; for tasks that can ask for them (`arbor.tasks.base.Proposes`).
        threshold, stop_value: v_th of Algorithm 2, and when the search ends; see `Stops`.
        max_per_state: children of one state that are visited (dfs).
        max_visited: states that grow, the root included (dfs).

    Differs from the paper and the released code:

    - Thoughts that end a path are finished at once and take no place in the next level; the level
      goes on with the rest (released: a fixed number of steps for every state).
    - A state that repeats the text of an earlier one of its level counts 0, as released, and is
      therefore not above the threshold. Ties go to the earlier block, as in the released stable
      sort.
    - BFS applies the threshold too (released: hopeless states are kept if there are not b others);
      -1 for released.
    - The best states by value are the next level; the other selection of the released code, draws
      in proportion to value, is not implemented.
    - ``propose`` keeps at most `width` lines, each different one once and as the task reads it, and
      leaves out a last line that was cut off (released: every line as it is).
    - DFS values all children of a state in one batch before it visits the first (the notebook: one
      by one, in order of how sure the proposals were), so its order is by value. `max_visited`
      counts states that grow; the notebook counts states it looked at.
    - `best` returns finished paths only, by value, then mean log probability, then id. Algorithm 1
      returns one state of the last level; the released code returns all b, of which its Game of 24
      figures count any; the notebook returns the deepest state it saw, the first on ties, finished
      or not.
    """

    strategy: Literal["bfs", "dfs"] = "bfs"
    beam: int = 5
    width: int = 10
    threshold: float = 0.0
    max_per_state: int = 3
    max_visited: int = 100
    stop_value: float | None = 1.0
    generate: Generate = field(default="sample", metadata={"only_if_set": True})

    def __post_init__(self) -> None:
        check_settings(self, {"beam": 1, "width": 1, "max_per_state": 1, "max_visited": 1})
        check_at_once(self, "width")

    def start(self, tree: ThoughtTree, max_depth: int) -> Search:
        search = BreadthFirst if self.strategy == "bfs" else DepthFirst
        return search(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """The largest number of blocks of a search; some searches reach it.

        bfs    width (1 + min(beam, width) + ... + min(beam, width^(max_depth - 1)))
        dfs    width min(max_visited, 1 + c + c^2 + ... + c^(max_depth - 1)),
               c = min(width, max_per_state)

        With ``propose`` the question for each state that grows is one block more.
        """
        asked = self.generate == "propose"
        if self.strategy == "bfs":
            grown = blocks_that_grow(self.width, max_depth, beam=self.beam)
        else:
            visited = min(self.width, self.max_per_state)
            grown = blocks_that_grow(visited, max_depth, most=self.max_visited)
        return (self.width + asked) * grown

    def most_proposals(self, max_depth: int) -> int:
        """See `Proposer`."""
        if self.generate == "sample":
            return 0
        return 1 if self.strategy == "dfs" or max_depth == 1 else self.beam


class _TotSearch(Rounds[ToT]):
    """Common parts of breadth-first and depth-first search."""

    def _expansion(self, leaf: Node) -> Expansion:
        return Expansion(leaf, self._settings.width, self._settings.generate)

    def _best(self, level: Sequence[Node], most: int) -> list[Node]:
        """The states that may grow, best first; repeats count 0, and ties stay in order of id."""
        worth = [
            (0.0 if again else child.value, child)
            for child, again in zip(level, repeats(level), strict=True)
            if self._may_grow(child)
        ]
        able = [pair for pair in worth if pair[0] > self._settings.threshold]
        return [child for _, child in sorted(able, key=lambda pair: -pair[0])[:most]]  # stable


class BreadthFirst(_TotSearch, Levels[ToT]):
    """Algorithm 1: level by level."""

    def __init__(self, settings: ToT, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth)
        self._next = [self._expansion(tree.root)]

    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        return [self._expansion(child) for child in self._best(level, self._settings.beam)]


class DepthFirst(_TotSearch):
    """Algorithm 2: the best child first, then back; `_stack` ends with the state to grow next."""

    def __init__(self, settings: ToT, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth)
        self._stack = [tree.root]
        self._visited = 0

    def ask(self, room: int) -> list[Expansion]:
        if not self._stack or self._visited >= self._settings.max_visited:
            return []
        return [self._expansion(self._stack[-1])]

    def prospects(self) -> dict[int, float]:
        """The stack below its top: a state grows only if no subtree above it solves the problem."""
        return {node.id: 0.5**depth for depth, node in enumerate(reversed(self._stack[:-1]), 1)}

    def tell(self, children: Sequence[Node]) -> None:
        level = sorted(children, key=lambda child: child.id)
        grown = self._stack.pop()
        self._visited += 1
        if self._is_solved(level):
            self._stack.clear()
            return
        visit = self._best(level, self._settings.max_per_state)
        self._stack.extend(reversed(visit))
        kept = {child.id for child in visit}
        give_up(child for child in level if child.id not in kept)
        give_up([grown])
