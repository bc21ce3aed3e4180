"""KVMemory: every slot has an owner, the budget is never exceeded, nobody reads what was freed."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbor.memory import KVMemory
from arbor.memory.pool import KVPool, LayerKV
from arbor.memory.slots import NO_OWNER, LastTokens, SlotTable
from arbor.tree import NO_SLOT, Node, ThoughtTree, Tier

SLOTS = 24


def memory_of(slots: int = SLOTS, prompt: int = 4) -> tuple[KVMemory, ThoughtTree]:
    memory = KVMemory([LayerKV(1, 2, 1)] * 2, slots, torch.float32, torch.device("cpu"), debug=True)
    tree = ThoughtTree(range(prompt))
    memory.adopt(tree)
    return memory, tree


def place(memory: KVMemory, node: Node, *offsets: int, exact: bool = True) -> np.ndarray:
    slots = memory.place(node, np.array(offsets, np.int64), exact=exact, depth=2)
    memory.commit()
    return slots


def blank(tree: ThoughtTree, parent: Node, tokens: int) -> Node:
    """A child with tokens and no KV."""
    child = tree.fork(parent)
    for token in range(tokens):
        tree.append(child, 10 + token)
    return child


def append(memory: KVMemory, nodes: list[Node], near: list[int], exact: list[bool]) -> np.ndarray:
    """`KVMemory.append` of the blocks' last tokens."""
    rows, starts = np.array([(node.row, node.start) for node in nodes]).T
    last = LastTokens.of(nodes, rows, starts)
    return memory.append(last, np.array(near), exact=np.array(exact), depth=2)


class Oracle(RuleBasedStateMachine):
    """KVMemory against a dictionary: (block, offset) -> the number its K/V was written with.

    Siblings may hold one number together; temporary slots hold numbers of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.tree = memory_of()
        self.held: dict[tuple[int, int], int] = {}
        self.exact: dict[tuple[int, int], bool] = {}
        self.borrowed: list[tuple[np.ndarray, list[int]]] = []
        self.written = 0
        self.peak = 0

    # What the oracle knows

    @property
    def used(self) -> int:
        temporary = sum(len(numbers) for _, numbers in self.borrowed)
        return len(set(self.held.values())) + temporary

    def write(self, slots: np.ndarray) -> list[int]:
        """Stand in for a forward: write a new number into every layer of each slot."""
        numbers = list(range(self.written + 1, self.written + 1 + len(slots)))
        self.written += len(slots)
        index = torch.from_numpy(np.asarray(slots, np.int64))
        for layer in range(2):
            value = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)
            self.memory.pool.write(layer, index, value.expand(-1, 1, 2), value)
        self.peak = max(self.peak, self.used)
        self.memory.commit()
        return numbers

    def node(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(list(self.tree)))

    def resident(self, node: Node) -> list[int]:
        return [i for i in range(len(node.tokens)) if (node.id, i) in self.held]

    def forgotten(self, keys: list[tuple[int, int]]) -> int:
        """Take keys away; how many numbers nobody holds any more."""
        before = len(set(self.held.values()))
        for key in keys:
            del self.held[key], self.exact[key]
        return before - len(set(self.held.values()))

    # What can happen

    @precondition(lambda self: len(self.tree) < 12)
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def fork(self, data: st.DataObject, tokens: int) -> None:
        used = self.memory.used

        blank(self.tree, self.node(data), tokens)

        assert self.memory.used == used

    @precondition(lambda self: self.memory.free)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        leaves = [node for node in self.tree.nodes[1:] if not node.children]
        nodes = leaves[: data.draw(st.integers(0, min(len(leaves), self.memory.free)))]
        near = [data.draw(st.integers(-1, SLOTS)) for _ in nodes]
        exact = [data.draw(st.booleans()) for _ in nodes]
        if not nodes:
            return
        for node in nodes:
            self.tree.append(node, 50 + len(node.tokens))
        keys = [(node.id, len(node.tokens) - 1) for node in nodes]

        slots = append(self.memory, nodes, near, exact)

        assert slots.tolist() == [int(node.span.slot[-1]) for node in nodes]
        self.held.update({key: -1 - i for i, key in enumerate(keys)})
        self.held.update(zip(keys, self.write(slots), strict=True))
        self.exact.update(zip(keys, exact, strict=True))

    @rule(data=st.data(), exact=st.booleans(), first=st.integers(-1, SLOTS))
    def place(self, data: st.DataObject, exact: bool, first: int) -> None:
        node = self.node(data)
        absent = sorted(set(range(len(node.tokens))) - set(self.resident(node)))
        absent = absent[: self.memory.free]
        if not absent:
            return
        offsets = sorted(data.draw(st.sets(st.sampled_from(absent))))

        slots = self.memory.place(
            node, np.array(offsets, np.int64), exact=exact, depth=2, first=first
        )

        self.held.update({(node.id, offset): -1 - i for i, offset in enumerate(offsets)})
        self.held.update(
            zip([(node.id, offset) for offset in offsets], self.write(slots), strict=True)
        )
        self.exact.update({(node.id, offset): exact for offset in offsets})

    @rule(data=st.data(), exact=st.booleans())
    def rewrite(self, data: st.DataObject, exact: bool) -> None:
        node = self.node(data)
        offsets = [i for i in self.resident(node) if not self.exact[node.id, i]]
        numbers = [self.held[node.id, i] for i in offsets]
        if any(list(self.held.values()).count(number) > 1 for number in numbers):
            return

        slots = self.memory.rewrite(node, np.array(offsets, np.int64), exact=exact, depth=2)

        for offset, number in zip(offsets, self.write(slots), strict=True):
            self.held[node.id, offset], self.exact[node.id, offset] = number, exact

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        node = self.node(data)
        here = self.resident(node)
        offsets = sorted(data.draw(st.sets(st.sampled_from(here)))) if here else []

        freed = self.memory.evict(node, np.array(offsets, np.int64))

        assert freed == self.forgotten([(node.id, offset) for offset in offsets])

    @precondition(lambda self: len(self.tree) < 12)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = self.node(data)
        here = self.resident(source)
        count = 0
        while count < len(here) and here[count] == count:
            count += 1
        if source.parent is None or not count:
            return
        twin = self.tree.fork(source.parent)
        for token in source.tokens:
            self.tree.append(twin, token)
        used = self.memory.used

        self.memory.share(source, twin, np.arange(count))

        assert self.memory.used == used
        for offset in range(count):
            self.held[twin.id, offset] = self.held[source.id, offset]
            self.exact[twin.id, offset] = self.exact[source.id, offset]

    @precondition(lambda self: self.memory.free)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=self.memory.free))

        slots = self.memory.borrow(tokens, self.node(data))

        self.borrowed.append((slots, [-1] * len(tokens)))
        self.borrowed[-1] = (slots, self.write(slots))

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots, _ = self.borrowed.pop(data.draw(st.integers(0, len(self.borrowed) - 1)))

        self.memory.free_borrowed(slots)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        nodes = data.draw(st.lists(st.sampled_from(list(self.tree)), unique=True, max_size=3))
        chosen = {node.id for node in nodes}

        freed = self.memory.free_blocks(nodes)

        assert freed == self.forgotten([key for key in self.held if key[0] in chosen])

    @rule(data=st.data(), exact=st.booleans(), rewritten=st.booleans())
    def fail(self, data: st.DataObject, exact: bool, rewritten: bool) -> None:
        """Tokens are placed, or rewritten, for a forward that fails."""
        node = self.node(data)
        here = self.resident(node)
        if rewritten:
            offsets = here
            self.memory.rewrite(node, np.array(offsets, np.int64), exact=exact, depth=2)
        else:
            offsets = sorted(set(range(len(node.tokens))) - set(here))[: self.memory.free]
            self.memory.place(node, np.array(offsets, np.int64), exact=exact, depth=2)
            self.peak = max(self.peak, self.used + len(offsets))
        assert self.memory.pending
        assert not node.span.exact[offsets].any()
        self.memory.check()

        lost = self.memory.rollback()

        assert lost == {node: len(offsets)}
        assert not self.memory.pending
        self.borrowed.clear()
        if rewritten:
            self.forgotten([(node.id, offset) for offset in offsets])

    @precondition(lambda self: not self.borrowed)
    @rule()
    def attach(self) -> None:
        self.memory.free_tree(self.tree)
        self.tree = ThoughtTree(range(4))

        self.memory.adopt(self.tree)

        self.held.clear()
        self.exact.clear()
        self.peak = 0
        assert self.memory.used == self.memory.peak == 0

    # What is always true

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.memory.check()
        assert self.memory.used == self.used <= SLOTS
        assert self.memory.free == SLOTS - self.used
        assert self.memory.peak == self.peak

    @invariant()
    def every_token_has_the_kv_it_was_written_with_and_freed_slots_none(self) -> None:
        expected = torch.full((SLOTS,), torch.nan)
        for node in self.tree:
            assert self.resident(node) == np.flatnonzero(node.span.resident).tolist()
            for offset in self.resident(node):
                assert node.span.exact[offset] == self.exact[node.id, offset]
                assert node.span.tier[offset] == Tier.DEVICE
                expected[int(node.span.slot[offset])] = self.held[node.id, offset]
        for slots, numbers in self.borrowed:
            expected[torch.from_numpy(slots.astype(np.int64))] = torch.tensor(numbers).float()
        for layer in range(2):
            for stored in (self.memory.pool.k[layer], self.memory.pool.v[layer]):
                seen = stored[:SLOTS].amax(dim=(1, 2))
                never = torch.isnan(expected) & (seen == 0)  # the pool begins with zeros
                assert torch.equal(seen.nan_to_num(-1.0)[~never], expected.nan_to_num(-1.0)[~never])


Oracle.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestAnyHistory = Oracle.TestCase


def test_a_freed_slot_has_no_token_no_position_and_no_owner() -> None:
    memory, tree = memory_of()
    slots = place(memory, tree.root, 0, 1, 2)
    memory.evict(tree.root, np.array([1]))

    table, freed = memory.table, slots[1]
    assert (table.token[freed], table.position[freed]) == (NO_SLOT, NO_SLOT)
    assert table.owner[freed] == NO_OWNER
    assert table.position[slots].tolist() == [0, NO_SLOT, 2]


def test_a_token_is_exact_once_its_forward_has_run_and_not_before() -> None:
    memory, tree = memory_of()
    child = blank(tree, tree.root, 2)
    memory.place(tree.root, np.array([0, 1]), exact=True, depth=2)
    memory.place(tree.root, np.array([2, 3]), exact=False, depth=2)
    append(memory, [child], [NO_SLOT], [True])
    assert tree.root.span.resident.all() and not tree.root.span.exact.any()
    assert child.span.resident[1] and not child.span.exact[1]

    memory.commit()

    assert tree.root.span.exact.tolist() == [True, True, False, False]
    assert child.span.exact.tolist() == [False, True]
    tree.append(child, 9)
    append(memory, [child], [NO_SLOT], [True])
    assert memory.rollback() == {child: 1}
    assert child.span.resident.tolist() == [False, True, False]
    assert memory.used == 5


def test_a_rollback_frees_slots_that_were_claimed_and_never_named() -> None:
    memory, tree = memory_of()
    place(memory, tree.root, 0, 1)
    memory.table.take(3)  # as a failure within the memory itself leaves it
    memory.table.owner[memory.table.take(1)] = 0

    assert memory.rollback() == {}

    assert memory.used == 2
    memory.check()


def test_a_resident_token_is_never_placed_again() -> None:
    memory, tree = memory_of()
    place(memory, tree.root, 0)

    with pytest.raises(AssertionError, match="placed again"):
        place(memory, tree.root, 0)


def test_shared_tokens_cost_nothing_and_stay_until_the_last_branch_leaves() -> None:
    memory, tree = memory_of()
    first, second = blank(tree, tree.root, 3), blank(tree, tree.root, 3)
    slots = place(memory, first, 0, 1, 2)

    memory.share(first, second, np.arange(2))

    assert memory.used == 3
    assert second.span.slot.tolist() == [*slots[:2], NO_SLOT]
    assert memory.evict(first, np.array([0, 1, 2])) == 1
    assert memory.used == 2
    memory.check()
    assert memory.evict(second, np.array([0, 1])) == 2
    assert memory.used == 0


def first_fit(free: list[int], length: int) -> int | None:
    """Where the first `length` of these slots lie that follow one another."""
    held = set(free)
    fits = (slot for slot in free if all(slot + i in held for i in range(length)))
    return next(fits, None)


@given(
    slots=st.sampled_from([40, 3000]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "one", "release", "runs"]),
            st.integers(1, 700),
            st.integers(0, 10**6),
        ),
        min_size=10,
        max_size=40,
    ),
)
@example(3000, [("take", 700, 0)] * 4 + [("release", 300, 0), ("take", 320, 0), ("one", 1, 9)])
def test_slots_are_the_first_that_fit_however_large_the_pool(
    slots: int, steps: list[tuple[str, int, int]]
) -> None:
    table, free, held = SlotTable(slots), list(range(slots)), list[int]()
    for what, size, draw in steps:
        if what == "release" and held:
            gone = sorted({held[(draw + 7 * i) % len(held)] for i in range(size)})
            table.release(np.array(gone, np.int32))
            held = sorted(set(held) - set(gone))
        elif what == "runs":
            length, count = 1 + draw % 9, 1 + size % 20
            start = first_fit(free, length * count)
            found = table.runs(length, count).tolist()
            if start is not None:
                assert found == [start + length * i for i in range(count)]
            else:
                assert len(found) <= count and found == sorted(set(found))
                taken = [slot + i for slot in found for i in range(length)]
                assert set(taken) <= set(free) and len(set(taken)) == len(taken)
                rest = sorted(set(free) - set(taken))
                assert len(found) == count or first_fit(rest, length) is None
        elif what == "one" and free:
            near = draw % slots
            taken = table.take_each(np.array([near])).tolist()
            assert taken == [near if near in free else free[0]]
            held += taken
        elif what == "take" and size <= len(free):
            start = first_fit(free, size)
            mine = free[:size] if start is None else list(range(start, start + size))
            assert table.take(size).tolist() == mine
            held.extend(mine)
        held = sorted(held)
        free = sorted(set(range(slots)) - set(held))
        assert table.free == len(free)


@given(
    taken=st.sets(st.integers(0, 19), max_size=8),
    near=st.lists(st.integers(-2, 22), min_size=1, max_size=12),
)
def test_a_free_slot_goes_to_the_first_that_hints_at_it(taken: set[int], near: list[int]) -> None:
    table = SlotTable(20)
    table.take(20)
    table.release(np.array(sorted(set(range(20)) - taken), np.int32))

    slots = table.take_each(np.array(near)).tolist()

    assert len(set(slots)) == len(slots) == len(near) and not taken & set(slots)
    hints = [hint for hint in near if 0 <= hint < 20 and hint not in taken]
    for index, slot in enumerate(slots):
        if near[index] in hints and near[index] not in near[:index]:
            assert slot == near[index]
        else:
            assert slot not in hints
    others = [slot for slot in slots if slot not in hints]
    free = sorted(set(range(20)) - taken - set(hints))
    assert others == free[: len(others)]
    assert table.used == len(taken) + len(near)


STATUS = Path("/proc/self/statm")  # pages: of addresses, in memory, ...


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not tell what is in memory")
def test_slots_take_no_memory_before_they_are_written() -> None:
    layers, slots = [LayerKV(1, 64, 64)] * 2, 1 << 20

    before = int(STATUS.read_text().split()[1])
    pool = KVPool(layers, slots, torch.bfloat16, torch.device("cpu"))
    pool.k[1][slots // 2] = 1.0

    added = (int(STATUS.read_text().split()[1]) - before) * mmap.PAGESIZE
    assert pool.bytes_per_token * slots == 1 << 29 and added < 1 << 25
    assert pool.k[1][slots // 2 - 1 : slots // 2 + 2].float().mean(dim=(1, 2)).tolist() == [0, 1, 0]


def test_freed_slots_are_poisoned_in_every_layer() -> None:
    memory, tree = memory_of()
    slots = place(memory, tree.root, 0, 1)
    memory.pool.k[0][:] = 1.0

    memory.evict(tree.root, np.array([0]))

    gone, kept = int(slots[0]), int(slots[1])
    for stored in (*memory.pool.k, *memory.pool.v):
        assert stored[gone].isnan().all()
        assert not stored[kept].isnan().any()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda memory, node: memory.table.references.__setitem__(9, 1), "references|add up"),
        (
            lambda memory, node: node.span.slot.__setitem__(1, node.span.slot[0]),
            "names a slot twice",
        ),
        (lambda memory, node: node.tokens.__setitem__(0, 77), "another token"),
        (lambda memory, node: memory.table.position.__setitem__(node.span.slot[0], 7), "position"),
        (lambda memory, node: node.span.tier.__setitem__(0, Tier.HOST), "tier without slot"),
        (lambda memory, node: node.span.exact.__setitem__(3, True), "exact but not"),
        (
            lambda memory, node: (
                memory.rewrite(node, np.array([0]), exact=True, depth=2),
                node.span.exact.__setitem__(0, True),
            ),
            "exact before its forward",
        ),
        (lambda memory, node: node.tokens.append(1), "differ in length"),
        (lambda memory, node: setattr(memory.table, "used", 1), "used slots"),
        (lambda memory, node: setattr(memory.table, "peak", 1), "peak"),
    ],
)
def test_the_check_finds_a_planted_fault(broken, complaint: str) -> None:  # type: ignore[no-untyped-def]
    memory, tree = memory_of()
    place(memory, tree.root, 0, 1, 2)
    memory.check()

    broken(memory, tree.root)

    with pytest.raises(AssertionError, match=complaint):
        memory.check()


def test_blocks_opened_together_lie_back_to_back() -> None:
    memory, tree = memory_of()
    place(memory, tree.root, 0, 1, 2, 3)

    starts = memory.starts(6, 3)

    assert starts.tolist() == [4, 10, 16]
    assert memory.used == 4
