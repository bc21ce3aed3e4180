"""Forest and KVMemory: several trees in one pool, with rows, spans and accounts of their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbor.forest import LEAST_COMMON, LEAST_UNUSED, Forest, Overlap
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.memory.slots import LastTokens
from arbor.tree import NO_SLOT, Node, NodeState, ThoughtTree, Tier

SLOTS = 24
MOST_TREES = 4


def tree_of(prompt: int, *blocks: int) -> ThoughtTree:
    """A tree with a chain of blocks of these lengths below its root."""
    tree = ThoughtTree(range(prompt))
    for tokens in blocks:
        blank(tree, tree.nodes[-1], tokens)
    return tree


def blank(tree: ThoughtTree, parent: Node, tokens: int) -> Node:
    """A child with tokens and no KV."""
    child = tree.fork(parent)
    for token in range(tokens):
        tree.append(child, 10 + token)
    return child


def memory_of(slots: int = SLOTS) -> KVMemory:
    return KVMemory([LayerKV(1, 2, 1)] * 2, slots, torch.float32, torch.device("cpu"), debug=True)


def place_all(memory: KVMemory, node: Node) -> None:
    memory.place(node, np.arange(len(node.tokens)), exact=True, depth=2)
    memory.commit()


# Forest


def test_rows_and_numbers_of_a_dropped_tree_are_given_out_again_in_the_order_of_ids() -> None:
    forest = Forest()
    first, second, third = tree_of(2, 1), tree_of(3, 1), tree_of(4, 1)
    for tree in (first, second, third):
        forest.adopt(tree)
    assert [node.row for node in forest] == [0, 1, 2, 3, 4, 5]

    assert forest.drop(second) == [2, 3]
    assert forest.drop(first) == [0, 1]
    fourth = tree_of(5, 1, 1)
    forest.adopt(fourth)
    last = blank(third, third.root, 1)
    beyond = blank(fourth, fourth.root, 1)

    assert (fourth.number, third.number) == (0, 2)
    assert [node.row for node in fourth] == [0, 1, 2, 3]
    assert (last.row, beyond.row, len(forest)) == (6, 3, 7)  # the third has row 5 already
    assert forest.numbers[[0, 3, 4, 6]].tolist() == [0, 0, 2, 2]
    assert [forest[node.row] is node for node in forest] == [True] * 7
    assert forest.trees == [third, fourth]


@given(
    ends=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=6, max_size=14)),
        max_size=12,
    ),
    leaving=st.lists(st.integers(0, 11), unique=True),
    hidden=st.booleans(),
)
def test_an_overlap_is_what_each_block_has_in_common_with_one_before_it(
    ends: list[tuple[int, list[int]]], leaving: list[int], hidden: bool
) -> None:
    forest = Forest()
    nodes: list[Node] = []
    for number in range(3):
        tree = ThoughtTree([*range(LEAST_COMMON - 1), *([7] if number else []), 100, number])
        forest.adopt(tree)
        nodes.append(tree.root)
    for number, end in ends:
        root = nodes[number]
        child = root.tree.fork(root)
        for token in [1, 2, *end]:
            root.tree.append(child, token)
        forest.close(child)
        nodes.append(child)
    overlap = Overlap(forest, lambda node: not hidden or node.parent is None)

    def expected(present: list[Node]) -> int:
        total = 0
        for at, node in enumerate(present):
            others = [other for other in present[:at] if other.parent is node.parent]
            if node.parent is None or not hidden:
                total += max((forest.common(node, other) for other in others), default=0)
        return total

    present: list[Node] = []
    for node in nodes:
        assert overlap.total + overlap.more([node]) == expected([*present, node])
        overlap.add(node)
        present.append(node)
        assert overlap.total == expected(present)
    for node in [nodes[at] for at in leaving if at < len(nodes)]:
        overlap.remove(node)
        present.remove(node)
        assert overlap.total == expected(present)
    overlap.remove(nodes[0])
    overlap.remove(nodes[0])
    assert overlap.total == expected([node for node in present if node is not nodes[0]])


def test_a_tree_whose_tokens_are_on_the_device_is_not_dropped() -> None:
    memory = memory_of()
    tree = tree_of(3)
    memory.adopt(tree)
    place_all(memory, tree.root)

    with pytest.raises(AssertionError, match="block 0 still holds KV"):
        memory.forest.drop(tree)


def test_a_dropped_tree_is_readable_grows_on_its_own_and_is_adopted_again() -> None:
    memory = memory_of()
    other, tree = tree_of(3), tree_of(4, 2, 3)
    memory.adopt(other)
    memory.adopt(tree)
    place_all(memory, tree[1])
    place_all(memory, other.root)

    rows = memory.free_tree(tree)

    assert rows == [1, 2, 3]
    assert [node.row for node in tree] == [0, 1, 2]
    assert [len(node.span) for node in tree] == [4, 2, 3]
    assert not any(node.span.resident.any() or node.span.exact.any() for node in tree)
    assert tree.spans is not other.spans
    child = blank(tree, tree[2], 20)  # in arrays of its own
    assert (child.row, len(child.span)) == (3, 20)
    assert memory.used == memory.used_by(other) == 3
    memory.adopt(tree)
    place_all(memory, child)
    assert [node.row for node in tree] == [1, 2, 3, 4]
    assert memory.used_by(tree) == 20


# Spans


def test_spans_of_dropped_trees_are_compacted_and_those_that_stay_keep_their_values() -> None:
    memory = memory_of()
    stays = tree_of(5, 3)
    memory.adopt(stays)
    place_all(memory, stays.root)
    held = stays.root.span.slot.copy()
    sizes = []
    for _ in range(40):
        passing = tree_of(4, 400)
        memory.adopt(passing)
        memory.free_tree(passing)
        sizes.append(memory.forest.spans.size)
        assert stays.root.span.slot.tolist() == held.tolist()
        assert stays.root.span.exact.all() and not stays[1].span.resident.any()
        memory.check()

    assert max(sizes) <= 2 * (LEAST_UNUSED + 1024)
    assert min(sizes[1:]) < sizes[0]  # compacted at least once
    assert memory.forest.spans.unused <= LEAST_UNUSED


# Any history


@dataclass
class Account:
    """The ledger of one tree.

    Attributes:
        held: (block, offset) -> the number its K/V was written with.
        borrowed: the numbers of each loan.
        peak: most different numbers there were at one instant.
    """

    held: dict[tuple[int, int], int] = field(default_factory=dict)
    borrowed: list[tuple[np.ndarray, list[int]]] = field(default_factory=list)
    peak: int = 0

    @property
    def used(self) -> int:
        return len(set(self.held.values())) + sum(len(numbers) for _, numbers in self.borrowed)


class Woods(RuleBasedStateMachine):
    """Trees come, grow, share a pool and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory_of()
        self.accounts: dict[ThoughtTree, Account] = {}
        self.rows: dict[int, Node] = {}
        self.free_rows: list[int] = []
        self.dropped: list[tuple[ThoughtTree, list[list[int]]]] = []
        self.written = 0
        self.peak = 0

    # What the ledger knows

    @property
    def trees(self) -> list[ThoughtTree]:
        return list(self.accounts)

    @property
    def used(self) -> int:
        return sum(account.used for account in self.accounts.values())

    def node(self, data: st.DataObject) -> Node:
        tree = data.draw(st.sampled_from(self.trees))
        return data.draw(st.sampled_from(tree.nodes))

    def resident(self, node: Node) -> list[int]:
        held = self.accounts[node.tree].held
        return [i for i in range(len(node.tokens)) if (node.id, i) in held]

    def numbers(self, slots: np.ndarray) -> list[int]:
        """Stand in for a forward: write a new number into each slot."""
        numbers = list(range(self.written + 1, self.written + 1 + len(slots)))
        self.written += len(slots)
        index = torch.from_numpy(np.asarray(slots, np.int64))
        value = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)
        for layer in range(2):
            self.memory.pool.write(layer, index, value.expand(-1, 1, 2), value)
        return numbers

    def claimed(self) -> None:
        """Enter the most there was, after slots were given out."""
        for account in self.accounts.values():
            account.peak = max(account.peak, account.used)
        self.peak = max(self.peak, self.used)

    def lose(self, node: Node, offsets: list[int]) -> int:
        held = self.accounts[node.tree].held
        before = len(set(held.values()))
        for offset in offsets:
            del held[node.id, offset]
        return before - len(set(held.values()))

    def expect_row(self, node: Node) -> None:
        """A block has the lowest free row above its tree's; without one, a new row."""
        older = max((each.row for each in node.tree.nodes[: node.id]), default=-1)
        new = len(self.rows) + len(self.free_rows)
        assert node.row == min((row for row in self.free_rows if row > older), default=new)
        if node.row != new:
            self.free_rows.remove(node.row)
        self.rows[node.row] = node

    # Trees

    @precondition(lambda self: len(self.accounts) < MOST_TREES)
    @rule(prompt=st.integers(1, 5), blocks=st.lists(st.integers(0, 4), max_size=2))
    def adopt(self, prompt: int, blocks: list[int]) -> None:
        self.enter(tree_of(prompt, *blocks))

    @precondition(lambda self: self.dropped and len(self.accounts) < MOST_TREES)
    @rule(data=st.data())
    def adopt_again(self, data: st.DataObject) -> None:
        tree, _ = self.dropped.pop(data.draw(st.integers(0, len(self.dropped) - 1)))
        self.enter(tree)

    def enter(self, tree: ThoughtTree) -> None:
        numbers = {each.number for each in self.accounts}
        if not self.accounts:
            self.peak = 0
        self.memory.adopt(tree)
        self.accounts[tree] = Account()
        assert tree.number == min(set(range(MOST_TREES)) - numbers)
        for node in tree:
            self.expect_row(node)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        tree = data.draw(st.sampled_from(self.trees))
        used = self.memory.used

        rows = self.memory.free_tree(tree)

        account = self.accounts.pop(tree)
        assert self.memory.used == used - account.used
        assert [self.rows.pop(row) for row in rows] == tree.nodes
        self.free_rows.extend(rows)
        if not self.accounts:
            self.free_rows = []
        self.dropped.append((tree, [list(node.tokens) for node in tree]))

    # Blocks

    @precondition(lambda self: any(len(tree) < 8 for tree in self.accounts))
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def fork(self, data: st.DataObject, tokens: int) -> None:
        parent = self.node(data)
        if len(parent.tree) < 8:
            self.expect_row(blank(parent.tree, parent, tokens))

    @precondition(lambda self: self.memory.free)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """One step of blocks of several trees."""
        leaves = [n for tree in self.accounts for n in tree.nodes[1:] if not n.children]
        leaves = [node for node in leaves if node.state is NodeState.OPEN]
        if not leaves:
            return
        nodes = data.draw(
            st.lists(
                st.sampled_from(leaves),
                unique=True,
                min_size=1,
                max_size=min(len(leaves), self.memory.free),
            )
        )
        near = data.draw(st.lists(st.integers(-1, SLOTS), min_size=len(nodes), max_size=len(nodes)))
        for node in nodes:
            node.tree.append(node, 50 + len(node.tokens))
        rows, starts = np.array([(node.row, node.start) for node in nodes]).T
        slots = self.memory.append(
            LastTokens.of(nodes, rows, starts),
            np.array(near),
            exact=np.ones(len(nodes), np.bool_),
            depth=2,
        )
        self.memory.commit()
        for node, number in zip(nodes, self.numbers(slots), strict=True):
            self.accounts[node.tree].held[node.id, len(node.tokens) - 1] = number
        self.claimed()

    @precondition(lambda self: self.accounts)
    @rule(data=st.data(), exact=st.booleans(), first=st.integers(-1, SLOTS))
    def place(self, data: st.DataObject, exact: bool, first: int) -> None:
        node = self.node(data)
        absent = sorted(set(range(len(node.tokens))) - set(self.resident(node)))
        offsets = absent[: self.memory.free]
        slots = self.memory.place(
            node, np.array(offsets, np.int64), exact=exact, depth=2, first=first
        )
        self.memory.commit()
        for offset, number in zip(offsets, self.numbers(slots), strict=True):
            self.accounts[node.tree].held[node.id, offset] = number
        self.claimed()

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Tokens of blocks of several trees leave at once."""
        every = [node for tree in self.accounts for node in tree if self.resident(node)]
        if not every:
            return
        nodes = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1, max_size=4))
        chosen = [
            sorted(data.draw(st.sets(st.sampled_from(self.resident(n)), min_size=1))) for n in nodes
        ]
        freed = self.memory.evict_blocks(
            nodes,
            np.array([offset for offsets in chosen for offset in offsets], np.int64),
            np.array([len(offsets) for offsets in chosen], np.int64),
        )
        assert freed == sum(self.lose(n, offsets) for n, offsets in zip(nodes, chosen, strict=True))

    @precondition(lambda self: any(len(tree) < 8 for tree in self.accounts))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = self.node(data)
        count = 0
        while (source.id, count) in self.accounts[source.tree].held:
            count += 1
        if source.parent is None or not count or len(source.tree) >= 8:
            return
        twin = source.tree.fork(source.parent)
        self.expect_row(twin)
        for token in source.tokens:
            source.tree.append(twin, token)

        self.memory.share(source, twin, np.arange(count))

        held = self.accounts[source.tree].held
        for offset in range(count):
            held[twin.id, offset] = held[source.id, offset]

    # Questions

    @precondition(lambda self: self.accounts and self.memory.free)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        most = min(4, self.memory.free)
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=most))
        node = self.node(data)
        slots = self.memory.borrow(tokens, node)
        self.accounts[node.tree].borrowed.append((slots, self.numbers(slots)))
        self.claimed()

    @precondition(lambda self: any(account.borrowed for account in self.accounts.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lenders = [account for account in self.accounts.values() if account.borrowed]
        borrowed = lenders[data.draw(st.integers(0, len(lenders) - 1))].borrowed
        slots, _ = borrowed.pop(data.draw(st.integers(0, len(borrowed) - 1)))
        self.memory.free_borrowed(slots)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Tokens of two blocks are placed for a forward that fails; all loans end with it."""
        lost: dict[Node, int] = {}
        for _ in range(2):
            node = self.node(data)
            if node in lost:
                continue
            absent = sorted(set(range(len(node.tokens))) - set(self.resident(node)))
            offsets = absent[: self.memory.free]
            self.memory.place(node, np.array(offsets, np.int64), exact=True, depth=2)
            account = self.accounts[node.tree]
            lost[node] = len(offsets)
            mine = sum(count for other, count in lost.items() if other.tree is node.tree)
            account.peak = max(account.peak, account.used + mine)
            self.peak = max(self.peak, self.used + sum(lost.values()))
        with pytest.raises(AssertionError, match="neither committed nor rolled back"):
            self.memory.free_tree(node.tree)

        assert self.memory.rollback() == lost

        for account in self.accounts.values():
            account.borrowed.clear()

    # What is always true

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.memory.check()
        assert self.memory.used == self.used <= SLOTS
        assert self.memory.peak == self.peak or not self.accounts
        for tree, account in self.accounts.items():
            assert self.memory.used_by(tree) == account.used
            assert self.memory.peak_of(tree) == account.peak

    @invariant()
    def every_block_has_a_row_of_its_own(self) -> None:
        forest = self.memory.forest
        assert forest.trees == self.trees
        assert len(self.rows) == sum(map(len, self.accounts))
        assert len(forest) == len(self.rows) + len(self.free_rows)
        for row, node in self.rows.items():
            assert forest[row] is node
            assert node.row == row
        rows = np.array(sorted(self.rows), np.int64)
        numbers = [self.rows[row].tree.number for row in rows.tolist()]
        assert forest.numbers[rows].tolist() == numbers

    @invariant()
    def spans_do_not_overlap_and_hold_what_was_written(self) -> None:
        spans = self.memory.forest.spans
        taken = sorted((node.span.begin, len(node.span)) for node in self.memory.forest)
        taken = [(begin, length) for begin, length in taken if length]
        for (begin, length), (following, _) in itertools.pairwise(taken):
            assert begin + length <= following
        assert sum(length for _, length in taken) <= spans.size - spans.unused
        for tree, account in self.accounts.items():
            for node in tree:
                assert node.span.spans is spans
                here = self.resident(node)
                assert np.flatnonzero(node.span.resident).tolist() == here
                slots = torch.from_numpy(node.span.slot[here].astype(np.int64))
                wanted = [float(account.held[node.id, offset]) for offset in here]
                assert self.memory.pool.k[0][slots, 0, 0].tolist() == wanted
            for slots, numbers in account.borrowed:
                lent = self.memory.pool.k[0][torch.from_numpy(slots.astype(np.int64)), 0, 0]
                assert lent.tolist() == numbers

    @invariant()
    def dropped_trees_stay_readable(self) -> None:
        for tree, tokens in self.dropped:
            assert tree.forest is None
            assert [node.tokens for node in tree] == tokens
            for node in tree:
                assert node.row == node.id
                assert node.span.spans is tree.spans is not self.memory.forest.spans
                assert len(node.span) == len(node.tokens)
                assert (node.span.slot == NO_SLOT).all() and not node.span.exact.any()
                assert (node.span.tier == Tier.DROPPED).all()


Woods.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestAnyHistory = Woods.TestCase
