"""Forest: the trees of one engine, with a row for every block and one set of spans for all."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arbor.support.growable import grown
from arbor.tree import Node, Spans, ThoughtTree

LEAST_UNUSED = 4096  # tokens of spans that nothing uses, before they are compacted
LEAST_COMMON = 32  # first tokens that two prompts must have in common to share their KV
LEAST_SIBLING = 8  # first tokens that two closed siblings must have in common, likewise

Place = tuple[int, tuple[int, ...], int]  # sorts siblings: see `Forest.order`
Beginning = tuple[int, tuple[int, ...]]  # see `Forest.beginning`


@dataclass(slots=True, eq=False)
class Alike:
    """Closed siblings that begin alike.

    Attributes:
        first: the index of the one that closed first.
        nodes: those that are not given up, in order of closing.
    """

    first: int
    nodes: list[Node] = field(default_factory=list)


class Forest:
    """Trees that share one pool of KV slots.

    A block's id is its place in its own tree: controllers, random streams and traces use it. Its
    `row` is its place among the blocks of all trees: slots, tables and statistics use it. The rows
    of a tree that is dropped are given to later blocks: each has the lowest free one above those of
    its tree. So the blocks of a tree are in the same order by row as by id, and a tree alone in its
    forest has rows equal to its ids.

    Attributes:
        spans: residency of the tokens of all blocks.
        trees: those adopted and not dropped, in order of adoption.
        cuts: offsets at which the KV that a block has in common with blocks like it (prompts of
            other trees, siblings) ends, increasing, by row; not of blocks that are given up.
        numbers: int64, the number of each row's tree (`ThoughtTree.number`); may be longer.
        cut_changes: how often `cuts` has changed; contexts made before the last one may name
            shared slots by other pieces.
    """

    def __init__(self) -> None:
        self.trees: list[ThoughtTree] = []
        self.cut_changes = 0
        self._clear()

    def _clear(self) -> None:
        self.spans = Spans()
        self._by_number: list[ThoughtTree | None] = []
        self._nodes: list[Node | None] = []  # by row
        self.numbers = np.zeros(0, np.int64)
        self._free: list[int] = []  # rows below len(self._nodes), increasing
        self.cuts: dict[int, tuple[int, ...]] = {}
        self._tokens: dict[int, NDArray[np.int64]] = {}  # of prompts and closed blocks, by row
        self._common: dict[int, dict[int, int]] = {}  # by rows
        self._siblings: dict[int, Alike] = {}  # each with itself, by row
        self._beginnings: dict[int, dict[tuple[int, ...], Alike]] = {}  # by row of the parent

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
        for row in rows:
            self._forget(row)
            self._beginnings.pop(row, None)
        self._by_number[tree.number] = None
        tree.forest, tree.number, tree.spans = None, 0, Spans()
        for node in tree.nodes:
            assert not node.span.resident.any(), f"block {node.id} still holds KV"
            self._nodes[node.row] = None
            node.span.move_to(tree.spans)
            node.row = node.id
        self._free = sorted(self._free + rows)
        if not self.trees:
            self._clear()
        elif self.spans.unused > max(LEAST_UNUSED, self.spans.size // 2):
            self.spans.compact([node.span for node in self])
        return rows

    # Blocks that begin alike

    def close(self, node: Node) -> None:
        """Record that a block is whole: from now on siblings that begin alike can share its KV."""
        if node.parent is None or node.row in self._siblings or len(node.tokens) < LEAST_SIBLING:
            return
        groups = self._beginnings.setdefault(node.parent.row, {})
        group = groups.setdefault(tuple(node.tokens[:LEAST_SIBLING]), Alike(node.index))
        group.nodes.append(node)
        self._siblings[node.row] = group

    def give_up(self, node: Node) -> None:
        """Forget what a block that holds nothing, and is never needed again, has in common with
        others."""
        if node.row in self._siblings:
            self._siblings[node.row].nodes.remove(node)
        self._forget(node.row)

    def may_share(self, node: Node) -> bool:
        """Whether other blocks may have the same first tokens after the same path: true of prompts
        and of blocks that have closed."""
        return node.parent is None or node.row in self._siblings

    def alike(self, node: Node) -> list[tuple[Node, int]]:
        """The blocks that begin like a block after the same path, and with how many tokens: roots
        of other trees, or closed siblings, in order of closing."""
        if node.parent is None:
            others = [tree.root for tree in self.trees]
        else:
            others = self._siblings[node.row].nodes if node.row in self._siblings else []
        alike = [(other, self.common(node, other)) for other in others if other is not node]
        return [(other, common) for other, common in alike if common]

    def common(self, one: Node, other: Node) -> int:
        """Tokens with which two prompts, or two closed siblings, begin alike; 0 if fewer than
        `LEAST_COMMON`, or `LEAST_SIBLING`."""
        known = self._common.setdefault(one.row, {})
        if other.row not in known:
            least = LEAST_COMMON if one.parent is None else LEAST_SIBLING
            count = common_start(self._array(one), self._array(other), least)
            known[other.row] = self._common.setdefault(other.row, {})[one.row] = count
        return known[other.row]

    def beginning(self, node: Node) -> Beginning | None:
        """What blocks that may share KV with a block have in common with it at least: the parent's
        row, or -1 of a prompt, and the first tokens; None if it may share none."""
        if not self.may_share(node):
            return None
        if node.parent is None:
            return -1, tuple(node.tokens[:LEAST_COMMON])
        return node.parent.row, tuple(node.tokens[:LEAST_SIBLING])

    def cut(self, node: Node, at: int) -> None:
        """Record that the first `at` tokens of a block are shared: pieces of context end there."""
        cuts = tuple(sorted({*self.cuts.get(node.row, ()), at}))
        if cuts != self.cuts.get(node.row):
            self.cuts[node.row] = cuts
            self.cut_changes += 1

    def order(self, node: Node) -> tuple[Place, ...]:
        """A name by which blocks are sorted depth first, siblings that share KV next to each
        other."""
        places: list[Place] = []
        for each in node.path[1:]:
            if each.row in self.cuts:
                first = self._siblings[each.row].first
                places.append((first, tuple(each.tokens), each.index))
            else:
                places.append((each.index, (), each.index))
        return tuple(places)

    def _array(self, node: Node) -> NDArray[np.int64]:
        if node.row not in self._tokens:
            self._tokens[node.row] = np.array(node.tokens, np.int64)
        return self._tokens[node.row]

    def _forget(self, row: int) -> None:
        """Forget what a block has in common with others."""
        self.cuts.pop(row, None)
        self._tokens.pop(row, None)
        for other in self._common.pop(row, {}):
            self._common.get(other, {}).pop(row, None)
        self._siblings.pop(row, None)

    # Blocks

    def add(self, node: Node) -> None:
        """Take a new block of a tree of the forest."""
        above = node.tree.nodes[node.id - 1].row if node.id else -1
        at = bisect.bisect(self._free, above)
        if at < len(self._free):
            node.row = self._free.pop(at)
            self._nodes[node.row] = node
        else:
            node.row = len(self._nodes)
            self._nodes.append(node)
            self.numbers = grown(self.numbers, len(self._nodes))
        self.numbers[node.row] = node.tree.number


class Overlap:
    """Tokens that some blocks hold more than once if each holds its own, and once where they share:
    counted as blocks come and go.

    Blocks that begin alike are paths of one trie: each adds to it what follows the tokens it has in
    common with the block most like it, whatever the order in which they come. So it is compared
    with the others as it comes and as it goes, and the others never with each other.

    Args:
        counts: whether a block shares, of those that may.

    Attributes:
        total: these tokens.
    """

    def __init__(self, forest: Forest, counts: Callable[[Node], bool] = lambda _: True) -> None:
        self.total = 0
        self._forest = forest
        self._counts = counts
        self._beginnings: dict[int, Beginning] = {}  # by row
        self._groups: dict[Beginning, dict[int, Node]] = {}  # by row

    def more(self, nodes: Iterable[Node]) -> int:
        """How much is added if these come, which are blocks of one path."""
        if not self._groups:
            return 0
        found = ((node, self._beginning(node)) for node in nodes)
        return sum(self._most(node, self._groups[at]) for node, at in found if at in self._groups)

    def add(self, node: Node) -> None:
        """A block comes."""
        beginning = self._beginning(node)
        if beginning is not None:
            group = self._groups.setdefault(beginning, {})
            self.total += self._most(node, group)
            group[node.row] = node
            self._beginnings[node.row] = beginning

    def remove(self, node: Node) -> None:
        """A block goes; nothing happens if it was not counted when it came."""
        beginning = self._beginnings.pop(node.row, None)
        if beginning is not None:
            group = self._groups[beginning]
            del group[node.row]
            self.total -= self._most(node, group)
            if not group:
                del self._groups[beginning]

    def _beginning(self, node: Node) -> Beginning | None:
        return self._forest.beginning(node) if self._counts(node) else None

    def _most(self, node: Node, others: dict[int, Node]) -> int:
        return max((self._forest.common(node, other) for other in others.values()), default=0)


def common_start(one: NDArray[np.integer], other: NDArray[np.integer], least: int) -> int:
    """How many tokens two blocks begin with alike; 0 if fewer than `least`."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    common = int(differ[0]) if len(differ) else length
    return common if common >= least else 0


def by_tree(nodes: Iterable[Node]) -> dict[ThoughtTree, list[Node]]:
    """Blocks by their trees, in the order in which these come up."""
    groups: dict[ThoughtTree, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.tree, []).append(node)
    return groups
