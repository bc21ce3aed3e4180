"""History: a tree that grows and attends, with every row's attention, as a reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from arbor.retention.base import Tokens
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import Node, ThoughtTree


@dataclass
class History:
    """A tree that grows, forgets and attends, with every row's attention: the O(n^2) reference.

    rows: for each forward, each row's attention to visible tokens, by node id and position.
    """

    seed: int
    tree: ThoughtTree = field(init=False)
    gone: set[tuple[int, int]] = field(default_factory=set)
    rows: list[list[dict[tuple[int, int], float]]] = field(default_factory=list)
    statistics: TokenStatistics = field(default_factory=lambda: TokenStatistics(threshold=0.2))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.tree = ThoughtTree(range(int(self.rng.integers(1, 4))))
        self.statistics.open(0, 0, self.tree.root.end)
        for _ in range(12):
            self.step()

    def step(self) -> None:
        """Fork, decode a token in several leaves at once, evict or bring back; then one forward."""
        draw = self.rng.random()
        if draw < 0.3 or len(self.tree) == 1:
            parent = self.tree[int(self.rng.integers(len(self.tree)))]
            child = self.tree.fork(parent)
            self.statistics.open(child.id, child.start, int(self.rng.integers(0, 3)))
        leaves = [node for node in self.tree if not node.children and node.parent]
        if not leaves:
            return
        running = [leaf for leaf in leaves if self.rng.random() < 0.5] or leaves[:1]
        count = 1 if draw < 0.8 else 3  # several rows a leaf, as a prefill has
        for leaf in running:
            leaf.tokens.extend([0] * count)
            self.statistics.grow(leaf.id, len(leaf.tokens))
        tokens = [(n.id, n.start + t) for n in self.tree for t in range(len(n.tokens))]
        if self.rng.random() < 0.4:
            self.gone = {token for token in tokens if self.rng.random() < 0.3}
        forward = [
            self.attention(leaf, leaf.end - 1 - back) for leaf in running for back in range(count)
        ]
        self.rows.append(forward)
        seen = sorted({token for row in forward for token in row})
        order = self.rng.permutation(len(seen))  # slots come in any order
        owner = np.array([seen[i][0] for i in order], np.int32)
        position = np.array([seen[i][1] for i in order], np.int32)
        mass = np.array([sum(row.get(seen[i], 0.0) for row in forward) for i in order], np.float32)
        queries = np.array([sum(seen[i] in row for row in forward) for i in order], np.int64)
        self.statistics.observe(owner, position, mass, queries)

    def attention(self, leaf: Node, at: int) -> dict[tuple[int, int], float]:
        """The attention of a row at a position: to earlier resident tokens of its path."""
        path = [
            (node.id, position) for node in leaf.path for position in range(node.start, node.end)
        ]
        visible = [token for token in path if token[1] < at and token not in self.gone]
        weight = self.rng.dirichlet(np.ones(len(visible) + 1))  # the rest goes to the row itself
        return dict(zip(visible, weight.tolist(), strict=False))

    def of(self, token: tuple[int, int]) -> list[list[float]]:
        """For each forward that could see a token, what its rows gave it."""
        each = [[row[token] for row in forward if token in row] for forward in self.rows]
        return [rows for rows in each if rows]

    def view(self) -> tuple[list[tuple[int, int]], Tokens]:
        """All tokens ever written, and the token view of them."""
        names = [(n.id, n.start + t) for n in self.tree for t in range(len(n.tokens))]
        owner = np.array([name[0] for name in names], np.int64)
        position = np.array([name[1] for name in names], np.int64)
        offset = position - np.array([self.tree[i].start for i in owner], np.int64)
        seen = self.statistics.view(owner, offset)
        none = np.zeros(len(names), np.bool_)
        key = np.arange(len(names)).astype(np.uint64)
        return names, Tokens(owner, offset, position, *seen, key=key, protected=none)
