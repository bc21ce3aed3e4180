"""AB-MCTS: Thompson sampling decides between a new thought and an earlier one."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arbor.tree import Node, ThoughtTree

from .base import Expansion
from .search import Rounds, check_settings, give_up


@dataclass(frozen=True)
class ABMCTS:
    """Adaptive branching MCTS, AB-MCTS-A (Inoue et al., arXiv 2503.04412; TreeQuest's `ABMCTSA`).

        select     from the root: draw from the posteriors of GEN and CONT; GEN, or a block without
                   a child to go on with, grows a new thought here (wider); CONT draws from the
                   posterior of every child and descends to the highest (deeper)
        back up    the value r of the new thought: to GEN of its parent and its own posterior;
                   further up to the posterior of every block on the path and to CONT of its parent

    The posteriors of the mean value are normal-inverse-chi-square (m = 0, kappa = 1, nu = 1,
    tau^2 = 0.1 before any observation).

    Args:
        thoughts: grown in all, one by each descent.
        leaves: descents in one ask, all from the same posteriors; 1 is the sequential search.
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.
        seed: of the draws. They come from one generator per search, so they depend on the values
            of the tree and never on the budget.

    Differs from TreeQuest: a block is a thought, and a path ends (there: every node is a whole
    answer, refined by its children), so CONT never goes on with a finished path, one at the depth
    limit or a refuted thought; a thought that repeats the text of an earlier sibling is
    given up, and its value counts for GEN only; there is one model, so no choice between several;
    Beta posteriors and AB-MCTS-M, whose mixed model is fitted by sampling, are not implemented.
    `threshold` and `stop_value` are new (-1 and None for the published behaviour).
    """

    thoughts: int = 128
    leaves: int = 4
    threshold: float = 0.0
    stop_value: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, {"thoughts": 1, "leaves": 1})

    def start(self, tree: ThoughtTree, max_depth: int) -> ABMCTSSearch:
        return ABMCTSSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        return self.thoughts


class Posterior:
    """Normal-inverse-chi-square posterior of a mean (Murphy, Probabilistic Machine Learning:
    Advanced Topics, section 3.4.3.3)."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._squares = 0.0

    def observe(self, value: float) -> None:
        self._count += 1
        self._sum += value
        self._squares += value * value

    def parameters(self) -> tuple[float, float, float, float]:
        """m, kappa, nu and tau^2."""
        n = self._count
        mean = self._sum / n if n else 0.0
        spread = max(0.0, self._squares - n * mean * mean)
        kappa, nu = 1.0 + n, 1.0 + n
        tau_square = (0.1 + spread + n * mean * mean / kappa) / nu
        return n * mean / kappa, kappa, nu, tau_square

    def draw(self, rng: random.Random) -> float:
        """A mean from the posterior."""
        m, kappa, nu, tau_square = self.parameters()
        precision = max(rng.gammavariate(nu / 2, 1.0), 1e-12)
        variance = nu * tau_square / 2 / precision
        return rng.normalvariate(m, math.sqrt(variance / kappa))


class ABMCTSSearch(Rounds[ABMCTS]):
    """The posteriors of one problem."""

    def __init__(self, settings: ABMCTS, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth)
        self._rng = random.Random(settings.seed)
        self._left = settings.thoughts
        self._wider: defaultdict[int, Posterior] = defaultdict(Posterior)  # GEN, by block
        self._deeper: defaultdict[int, Posterior] = defaultdict(Posterior)  # CONT, by block
        self._own: defaultdict[int, Posterior] = defaultdict(Posterior)  # of a block, as a child
        self._children: dict[int, list[Node]] = {}  # to go on with
        self._texts: dict[int, set[str]] = {}  # of all children so far
        self._draw()

    def tell(self, children: Sequence[Node]) -> None:
        level = sorted(children, key=lambda child: child.id)
        if self._is_solved(level):
            self._left, self._next = 0, []
            return
        for child in level:
            self._back_up(child)
        kept = {child.id for each in self._children.values() for child in each}
        give_up((child for child in level if child.id not in kept), lambda node: True)
        self._draw()

    def prospects(self) -> Mapping[int, float]:
        """Blocks with the probability that a later descent ends there, in proportion to value."""
        growing = {expansion.leaf.id for expansion in self._next}
        later = [
            child
            for children in self._children.values()
            for child in children
            if child.id not in growing
        ]
        total = sum(max(0.0, child.value) for child in later)
        if self._left <= 0 or total <= 0:
            return {}
        return {child.id: 1 - (1 - max(0.0, child.value) / total) ** self._left for child in later}

    def _draw(self) -> None:
        """Descend `leaves` times, from the same posteriors."""
        count = min(self._settings.leaves, self._left)
        widths: dict[int, int] = {}
        for _ in range(count):
            leaf = self._descend()
            widths[leaf.id] = widths.get(leaf.id, 0) + 1
        self._left -= count
        self._next = [Expansion(self._tree[number], width) for number, width in widths.items()]

    def _descend(self) -> Node:
        """The block that grows a thought."""
        node = self._tree.root
        while children := self._children.get(node.id, []):
            wider = self._wider[node.id].draw(self._rng)
            deeper = self._deeper[node.id].draw(self._rng)
            if wider >= deeper:
                break
            draws = [self._own[child.id].draw(self._rng) for child in children]
            node = children[draws.index(max(draws))]
        return node

    def _back_up(self, child: Node) -> None:
        parent = child.parent
        assert parent is not None  # the root is nobody's child
        self._wider[parent.id].observe(child.value)
        self._own[child.id].observe(child.value)
        node = parent
        while node.parent is not None:
            self._own[node.id].observe(child.value)
            self._deeper[node.parent.id].observe(child.value)
            node = node.parent
        texts = self._texts.setdefault(parent.id, set())
        again = child.text.strip() in texts
        texts.add(child.text.strip())
        if not again and self._may_grow(child):
            self._children.setdefault(parent.id, []).append(child)
