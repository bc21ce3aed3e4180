"""Forest: the trees of one engine, with a row for every block and one set of spans for all."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from arbor.support.growable import grown
from arbor.tree import Node, Spans, ThoughtTree

LEAST_UNUSED = 4096  # tokens of spans that nothing uses, before they are compacted
LEAST_COMMON = 32  # first tokens that two prompts must have in common to share their KV


class Forest:
    """Trees that share one pool of KV slots.

    A block's id is its place in its own tree: controllers, random streams and traces use it. Its
    `row` is its place among the blocks of all trees: slots, tables and statistics use it. The rows
    of a tree that is dropped are given to later blocks, lowest first, so that a tree alone in its
    forest has rows equal to its ids.

    Attributes:
        spans: residency of the tokens of all blocks.
        trees: those adopted and not dropped, in order of adoption.
        cuts: offsets at which the KV that a prompt has in common with other prompts ends,
            increasing, by row of the root.
    """

    def __init__(self) -> None:
        self.trees: list[ThoughtTree] = []
        self._clear()

    def _clear(self) -> None:
        self.spans = Spans()
        self._by_number: list[ThoughtTree | None] = []
        self._nodes: list[Node | None] = []  # by row
        self._numbers = np.zeros(0, np.int64)  # by row
        self._free: list[int] = []  # a heap of rows below len(self._nodes)
        self.cuts: dict[int, tuple[int, ...]] = {}
        self._prompts: dict[int, NDArray[np.int64]] = {}  # by number
        self._common: dict[tuple[int, int], int] = {}  # by numbers, the smaller first

    def __len__(self) -> int:
        """Rows, free ones included."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Every block, tree by tree."""
        for tree in self.trees:
            yield from tree.nodes

    def __getitem__(self, row: int) -> Node:
        node = self._nodes[row]
        assert node is not None, f"row {row} has no block"
        return node

    def nodes(self, rows: Iterable[int]) -> list[Node]:
        """The blocks of rows."""
        return [self[row] for row in rows]

    # Trees

    def adopt(self, tree: ThoughtTree) -> None:
        """Take a tree, of which no token is on a device: its blocks get rows, their spans become
        part of the forest's."""
        assert tree.forest is None, "the tree is in a forest already"
        tree.number = next(
            (i for i, taken in enumerate(self._by_number) if taken is None), len(self._by_number)
        )
        self._by_number[tree.number : tree.number + 1] = [tree]
        tree.forest = self
        self.trees.append(tree)
        for node in tree.nodes:
            self.add(node)
            node.span.move_to(self.spans)
        tree.spans = self.spans

    def drop(self, tree: ThoughtTree) -> list[int]:
        """Let a tree go, none of whose tokens is on the device; it stays readable.

        Returns:
            the rows its blocks had.
        """
        assert tree.forest is self, "the tree is not in this forest"
        rows = [node.row for node in tree.nodes]
        self.trees.remove(tree)
        self.cuts.pop(tree.root.row, None)
        self._prompts.pop(tree.number, None)
        for pair in [each for each in self._common if tree.number in each]:
            del self._common[pair]
        self._by_number[tree.number] = None
        tree.forest, tree.number, tree.spans = None, 0, Spans()
        for node in tree.nodes:
            assert not node.span.resident.any(), f"block {node.id} still holds KV"
            self._nodes[node.row] = None
            heapq.heappush(self._free, node.row)
            node.span.move_to(tree.spans)
            node.row = node.id
        if not self.trees:
            self._clear()
        elif self.spans.unused > max(LEAST_UNUSED, self.spans.size // 2):
            self.spans.compact([node.span for node in self])
        return rows

    def numbers_of(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """The number of each row's tree (`ThoughtTree.number`), int64 [n]."""
        return self._numbers.take(rows)

    # Prompts

    def common(self, one: ThoughtTree, other: ThoughtTree) -> int:
        """Tokens with which the prompts of two trees begin alike; 0 if fewer than
        `LEAST_COMMON`."""
        pair = (min(one.number, other.number), max(one.number, other.number))
        if pair not in self._common:
            first, second = self._prompt(one), self._prompt(other)
            self._common[pair] = common_start(first, second)
        return self._common[pair]

    def overlap(self, trees: Sequence[ThoughtTree]) -> int:
        """Tokens of these trees' prompts that are there more than once, and whose KV is shared."""
        return sum(
            max((self.common(tree, other) for other in trees[:place]), default=0)
            for place, tree in enumerate(trees)
        )

    def cut(self, root: Node, at: int) -> None:
        """Record that the first `at` tokens of a prompt are shared: pieces of context end there."""
        self.cuts[root.row] = tuple(sorted({*self.cuts.get(root.row, ()), at}))

    def _prompt(self, tree: ThoughtTree) -> NDArray[np.int64]:
        if tree.number not in self._prompts:
            self._prompts[tree.number] = np.array(tree.root.tokens, np.int64)
        return self._prompts[tree.number]

    # Blocks

    def add(self, node: Node) -> None:
        """Take a new block of a tree of the forest."""
        if self._free:
            node.row = heapq.heappop(self._free)
            self._nodes[node.row] = node
        else:
            node.row = len(self._nodes)
            self._nodes.append(node)
            self._numbers = grown(self._numbers, len(self._nodes))
        self._numbers[node.row] = node.tree.number


def common_start(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """How many tokens two prompts begin with alike; 0 if fewer than `LEAST_COMMON`."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    common = int(differ[0]) if len(differ) else length
    return common if common >= LEAST_COMMON else 0


def by_tree(nodes: Iterable[Node]) -> dict[ThoughtTree, list[Node]]:
    """Blocks by their trees, in the order in which these come up."""
    groups: dict[ThoughtTree, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.tree, []).append(node)
    return groups
