"""Which blocks decode together: how many fit, who joins when, who has to wait again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Words, build, path_logits
from support.trees import LENGTH, PROMPT, SAMPLED, Lab, path_ids, relative_error

from arbor.engine.account import Account
from arbor.engine.decode_batch import DecodeBatch
from arbor.engine.decoding import Decoding
from arbor.engine.open_tree import OpenTree, RunHooks
from arbor.engine.operation import Growing, Growth, Operation, Row, Work
from arbor.engine.retained import Lengths
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.scheduler import MARGIN, Joined, Scheduler, WaveScheduler, most_held
from arbor.engine.stop_rule import StopRule
from arbor.errors import BudgetInfeasible
from arbor.events import Boundary, Event, Evicted, Forwarded, Pressure, Rehydrated
from arbor.forest import LEAST_COMMON, LEAST_SIBLING, Forest, Overlap
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.memory.slots import NO_OWNER
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree


def of_all(memory: KVMemory) -> Scheduler:
    """A scheduler of searches that share the slots of a pool, and siblings theirs."""
    return Scheduler(Account(memory, memory.slots), overlap=Overlap(memory.forest))


def operation(tree: ThoughtTree, slots: int, expected: int = 0) -> Growing:
    """An operation on a tree in a budget; blocks are expected to have `expected` tokens."""
    memory = KVMemory((LayerKV(1, 1, 1),), slots, torch.float32, torch.device("cpu"))
    opened = OpenTree(tree, memory, slots, RunHooks())
    if expected:
        opened.lengths.add(expected)
    return Growing(opened, [])


def row(work: Operation, leaf: Node, length: int = 0, longest: int = 30) -> Row:
    tree = leaf.tree
    child = tree.fork(leaf)
    for _ in range(length):
        tree.append(child, 7)
    growth = Growth(0, Sampling(), StopRule(Words(), BlockLimits((), longest, 8), ()))
    return Row(work, child.id, growth, child, leaf, ArithmeticCode(0, child, Sampling()))


def queue_of(rows: list[Row], *, lossy: bool = False) -> Scheduler:
    """A scheduler in which all of these wait."""
    (work,) = {each.operation for each in rows}
    memory = work.opened._memory
    queue = (WaveScheduler if lossy else Scheduler)(Account(memory, memory.slots))
    work.waiting.extend(rows)
    queue.operations.append(work)
    return queue


def expect(queue: Scheduler, expected: int) -> None:
    """From now on blocks are expected to have so many tokens."""
    opened = queue.operations[0].opened
    opened.lengths = Lengths()
    opened.lengths.add(expected)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 30))
def test_most_held_is_what_a_step_by_step_account_gives(lengths: list[int], expected: int) -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, 99, expected)
    rows = [row(work, tree.root, each) for each in lengths]
    left = [max(expected - each, MARGIN) for each in lengths]

    account = [
        sum(each + step for each, more in zip(lengths, left, strict=True) if more >= step)
        for step in range(1, max(left, default=0) + 1)
    ]

    assert most_held(rows) == max(account, default=0)


def test_a_block_is_expected_to_be_as_long_as_those_before_it() -> None:
    lengths = Lengths()
    assert lengths.expected(33) == 17  # half of the longest while nothing is known
    for tokens in (10, 10, 14, 14):
        lengths.add(tokens)
    assert lengths.expected(33) == 14  # mean 12, standard deviation 2
    assert lengths.expected(13) == 13


def test_blocks_join_while_they_fit_and_later_as_others_end() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, len(PROMPT) + 2 * 6, 6)
    rows = [row(work, tree.root) for _ in range(5)]
    queue = queue_of(rows)

    assert queue.admit().rows == rows[:2]
    assert not queue.admit()
    queue.leave(rows[:1])
    assert queue.admit().rows == rows[2:3]
    assert queue.rows == rows[1:3]
    queue.leave(rows[1:3])
    assert queue.admit().rows == rows[3:]
    queue.leave(rows[3:])
    assert not queue.rows and not queue.waiting


def test_a_young_block_joins_where_an_old_one_will_have_ended_before_it_grows() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, len(PROMPT) + 24, 10)
    queue = queue_of([row(work, tree.root, length) for length in (6, 6, 0, 0)])

    # 10 + 10 + 4 when the old ones end; two young ones would be 28
    assert len(queue.admit().rows) == 3


def test_one_block_joins_however_little_room_there_is() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, 1, 8)
    queue = queue_of([row(work, tree.root), row(work, tree.root)])
    assert len(queue.admit().rows) == 1


def test_the_block_that_joined_last_waits_again_and_is_the_next_to_join() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, len(PROMPT) + 3 * 4, 4)
    rows = [row(work, tree.root) for _ in range(4)]
    queue = queue_of(rows)
    queue.admit()

    assert queue.preempt() is rows[2]
    expect(queue, 5)
    assert not queue.admit()
    queue.leave(rows[:1])
    assert queue.admit().rows == rows[2:3]


def test_lossy_blocks_join_in_waves_that_take_half_of_the_budget_at_most() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, 2 * 3 * 8, 1)
    rows = [row(work, tree.root, longest=8) for _ in range(5)]
    queue = queue_of(rows, lossy=True)

    assert queue.admit().rows == rows[:3]
    queue.leave(rows[:2])
    assert not queue.admit()
    queue.leave(rows[2:3])
    assert queue.admit().rows == rows[3:]


@pytest.mark.parametrize("shares", [True, False])
def test_what_prompts_share_counts_once_while_several_of_them_are_in_use(shares: bool) -> None:
    common = range(LEAST_COMMON)
    trees = [ThoughtTree([*common, *end]) for end in ((60, 61), (70, 71, 72))]
    slots = LEAST_COMMON + 2 + 3 + 3 * 6
    memory = KVMemory((LayerKV(1, 1, 1),), slots, torch.float32, torch.device("cpu"))
    overlap = Overlap(memory.forest) if shares else None
    queue = Scheduler(Account(memory, memory.slots), overlap=overlap)
    rows: list[list[Row]] = []
    for tree, count in zip(trees, (1, 3), strict=True):
        memory.adopt(tree)
        work = Growing(OpenTree(tree, memory, slots, RunHooks()), [])
        work.opened.lengths.add(6)
        rows.append([row(work, tree.root) for _ in range(count)])
        work.waiting.extend(rows[-1])
        queue.operations.append(work)

    assert queue.admit().rows == [*rows[0], *(rows[1][:2] if shares else [])]
    assert queue.admit().rows == []

    queue.leave(queue.rows[1:])
    queue.operations = queue.operations[:1]
    more = [row(queue.operations[0], trees[0].root) for _ in range(4)]
    queue.operations[0].waiting.extend(more)
    # one prompt alone, and what is left of the budget
    assert queue.admit().rows == more[: (slots - trees[0].root.end) // 6 - 1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Trees whose prompts and blocks begin alike, and rows that grow from their blocks.

    Attributes:
        slots: of the memory.
        prompts: how many tokens of each prompt are those of every other one.
        blocks: of each block, its parent by its place among these and the prompts, and how many of
            its tokens are those of its siblings.
        rows: of each row, where it grows, and tokens it has.
        ended: as how long blocks of each tree have ended.
    """

    slots: int
    prompts: list[int]
    blocks: list[tuple[int, int]]
    rows: list[tuple[int, int]]
    ended: list[int]


def plans() -> st.SearchStrategy[Plan]:
    places = st.integers(0, 30)
    return st.builds(
        Plan,
        slots=st.integers(40, 400),
        prompts=st.lists(st.integers(LEAST_COMMON - 2, LEAST_COMMON + 6), min_size=1, max_size=3),
        blocks=st.lists(st.tuples(places, st.integers(LEAST_SIBLING - 2, 14)), max_size=10),
        rows=st.lists(st.tuples(places, st.integers(0, 6)), min_size=1, max_size=14),
        ended=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    )


def laid_out(plan: Plan, kind: Callable[[KVMemory], Scheduler]) -> tuple[Scheduler, list[Row]]:
    memory = KVMemory((LayerKV(1, 1, 1),), plan.slots, torch.float32, torch.device("cpu"))
    queue = kind(memory)
    nodes: list[Node] = []
    for number, (common, ended) in enumerate(zip(plan.prompts, plan.ended, strict=False)):
        tree = ThoughtTree([*range(common), *[100 + number] * 3])
        memory.adopt(tree)
        work = Growing(OpenTree(tree, memory, plan.slots, RunHooks()), [])
        if ended:
            work.opened.lengths.add(ended)
        work.opened.turn = number
        work.order = (number, 0)
        queue.operations.append(work)
        nodes.append(tree.root)
    for at, common in plan.blocks:
        parent = nodes[at % len(nodes)]
        child = parent.tree.fork(parent)
        for token in (*range(common), *[100 + len(nodes)] * 2):
            parent.tree.append(child, token)
        child.state = NodeState.CLOSED
        memory.forest.close(child)
        nodes.append(child)
    rows = []
    for at, length in plan.rows:
        leaf = nodes[at % len(nodes)]
        work = next(each for each in queue.operations if each.opened.tree is leaf.tree)
        rows.append(row(work, leaf, length))
        work.waiting.append(rows[-1])
    return queue, rows


def in_common(forest: Forest, nodes: Sequence[Node]) -> int:
    """Tokens that each of these blocks begins with like one before it."""
    total = 0
    for at, node in enumerate(nodes):
        others = [other for other in nodes[:at] if other.parent is node.parent]
        total += max((forest.common(node, other) for other in others), default=0)
    return total


class Plain(Scheduler):
    """Looks at all that runs whenever it is asked."""

    def _forest(self) -> Forest:
        return self.account._memory.forest

    def _fits(self, work: Work, joined: Joined, fresh: Sequence[Node], new: int) -> bool:
        assert isinstance(work, Row)
        rows = [*self.rows, work]
        nodes = list(dict.fromkeys(node for each in rows for node in each.leaf.path))
        held = sum(len(node.tokens) for node in nodes) - in_common(self._forest(), nodes)
        return held + most_held(rows) <= self.account.slots


@given(plans(), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=12))
def test_work_joins_as_if_all_that_runs_were_looked_at_each_time(
    plan: Plan, moves: list[tuple[bool, int]]
) -> None:
    queues = [
        laid_out(plan, lambda memory: Plain(Account(memory, memory.slots))),
        laid_out(plan, of_all),
    ]
    for ends, at in [*moves, *[(True, 0)] * len(plan.rows)]:
        names = []
        for queue, rows in queues:
            place = {id(each): index for index, each in enumerate(rows)}
            names.append([place[id(each)] for each in queue.admit().rows])
            names[-1].append(-1)
            names[-1] += [place[id(each)] for each in queue.rows]
            for each in queue.rows:
                each.node.tree.append(each.node, 1)
            if queue.rows and ends:
                queue.leave([queue.rows[at % len(queue.rows)]])
            elif len(queue.rows) > 1:
                queue.preempt()
        assert names[0] == names[1]


@pytest.mark.parametrize("common", [0, LEAST_SIBLING])
def test_siblings_join_and_leave_without_a_look_at_all_pairs_each_time(
    common: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    tree = ThoughtTree(PROMPT)
    memory = KVMemory((LayerKV(1, 1, 1),), 1000, torch.float32, torch.device("cpu"))
    memory.adopt(tree)
    work = Growing(OpenTree(tree, memory, 1000, RunHooks()), [])
    for number in range(count):
        child = tree.fork(tree.root)
        for token in [*range(common), *[100 + number] * LEAST_SIBLING]:
            tree.append(child, token)
        memory.forest.close(child)
        work.waiting.append(row(work, child))
    queue = of_all(memory)
    queue.operations.append(work)
    calls = []
    right = Forest.common
    monkeypatch.setattr(
        Forest,
        "common",
        lambda *given: calls.append(given) or right(*given),  # type: ignore
    )

    rows = []
    while work.waiting:
        rows += queue.admit().rows
    queue.leave(rows)

    assert len(calls) <= (2 * count * count if common else 0)


@given(st.data())
def test_no_row_is_lost_and_the_budget_counts_whole_paths(data: Any) -> None:
    tree = ThoughtTree(PROMPT)
    slots, expected = data.draw(st.integers(10, 90)), data.draw(st.integers(1, 8))
    work = operation(tree, slots, expected)
    leaves = [tree.root]
    for _ in range(data.draw(st.integers(0, 6))):
        leaf = row(work, data.draw(st.sampled_from(leaves)), data.draw(st.integers(1, 5))).node
        leaf.state = NodeState.CLOSED
        leaves.append(leaf)
    rows = [row(work, data.draw(st.sampled_from(leaves))) for _ in range(8)]
    queue = queue_of(rows)
    over: set[int] = set()
    while queue.rows or queue.waiting:
        before = list(queue.rows)
        joined = queue.admit().rows
        assert queue.rows == sorted([*before, *joined], key=lambda each: each.place)
        assert queue.rows
        paths = sum(len(node.tokens) for node in tree.paths(each.leaf for each in queue.rows))
        if len(queue.rows) > 1 and joined:
            assert paths + most_held(queue.rows) <= slots
        if queue.waiting:  # nothing waits that would fit
            more = (*queue.rows, work.waiting[0])
            paths = sum(len(node.tokens) for node in tree.paths(each.leaf for each in more))
            assert paths + most_held(more) > slots
        if data.draw(st.booleans()) and len(queue.rows) > 1:
            queue.preempt()
        else:
            done = data.draw(st.lists(st.sampled_from(queue.rows), min_size=1, unique_by=id))
            assert over.isdisjoint(each.node.id for each in done)
            over |= {each.node.id for each in done}
            queue.leave(done)
    assert over == {each.node.id for each in rows}


# In the engine


def grow(slots: int, lengths: tuple[int, ...]) -> tuple[Lab, list[Node]]:
    """Two short blocks, then four longer ones, from which the engine expects no more."""
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots)
    for length in lengths[:-1]:
        lab.forget(lab.sprout([(tree.root, 2)], length=length))
    lab.events.clear()
    return lab, lab.sprout([(tree.root, 4)], length=lengths[-1])


def test_a_block_that_has_to_wait_again_goes_on_where_it_was() -> None:
    free, wanted = grow(4096, (2, 8))
    lab, children = grow(len(PROMPT) + 17, (2, 8))

    assert [child.tokens for child in children] == [child.tokens for child in wanted]
    assert [child.logprob for child in children] == pytest.approx(
        [child.logprob for child in wanted], abs=1e-4
    )
    nodes = {child.id for child in children}
    ended: set[int] = set()
    again: dict[int, int] = {}
    for event in lab.events:
        match event:
            case Boundary(node=node):
                ended.add(node)
            case Evicted(nodes=lost, cause="pressure"):
                again |= {node: count for node, count in lost if node in nodes - ended}
            case Rehydrated(nodes=back):
                for node, count in back:
                    assert again.pop(node, count) == count
            case _:
                pass
    assert any(isinstance(event, Rehydrated) for event in lab.events)
    assert not again
    assert lab.memory.peak <= lab.memory.slots
    lab.extend(children[-1])
    difference = lab.ask(children[-1:], [(7,)]) - free.ask(wanted[-1:], [(7,)])
    assert float(difference.abs().max()) < 1e-4


def test_steps_are_as_wide_as_blocks_turn_out_long_rather_than_as_they_might_become() -> None:
    lab = Lab(build("llama"))
    longest = 24
    tree = lab.plant(len(PROMPT) + longest + 6)
    lab.forget(lab.sprout([(tree.root, 2)], length=LENGTH))
    lab.events.clear()
    every_other = tuple(range(0, 100, 2))  # tokens that end a block
    stop = StopRule(Words(), BlockLimits((), longest, 3), every_other)
    children = lab.grow([(tree.root, 12)], Growth(3, SAMPLED, stop))

    steps = [event for event in lab.events if isinstance(event, Forwarded)]
    decoded = [event for event in steps if event.kind == "decode"]
    rows = sum(event.rows for event in decoded)
    assert rows == sum(len(child.tokens) for child in children)
    assert rows / sum(event.steps for event in decoded) > 2
    assert all(child.span.exact[child.span.resident].all() for child in children)
    assert torch.isfinite(lab.ask(children, [(7,)] * len(children))).all()


def test_more_blocks_decode_at_once_after_short_ones_have_ended() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    lab.open(tree, len(PROMPT) + 24, detail="steps")
    lab.extend(tree.root)
    lab.events.clear()
    any_token = tuple(range(100))  # ends a block

    lab.grow(
        [(tree.root, 6)], Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 24, 3), any_token))
    )

    # two of 12 tokens, half of the longest, are expected to fit; of one token all do
    assert [event.rows for event in lab.events if isinstance(event, Forwarded)] == [2, 4]


@pytest.mark.parametrize("policy", ["full", "lru"])
@pytest.mark.parametrize(("spare", "forwards"), [(0, [5]), (-1, [2, 3])])
def test_questions_that_fill_the_budget_to_the_last_slot_are_answered_together(
    policy: str, spare: int, forwards: list[int]
) -> None:
    lab = Lab(build("llama"), policy=policy, debug=True)
    tree = lab.plant(len(PROMPT) + 5 + spare)
    lab.events.clear()

    lab.ask([tree.root] * 2, [(7, 8), (9, 10, 11)])

    assert not any(isinstance(event, Pressure) for event in lab.events)
    assert [event.rows for event in lab.events if isinstance(event, Forwarded)] == forwards


@pytest.mark.parametrize("policy", ["full", "lru"])
@pytest.mark.parametrize(("spare", "forwards"), [(0, [16]), (-1, [12, 4])])
def test_prompts_that_fill_the_budget_to_the_last_slot_are_computed_together(
    policy: str, spare: int, forwards: list[int]
) -> None:
    lab = Lab(build("llama"), policy=policy, debug=True)
    trees = [ThoughtTree(PROMPT), ThoughtTree(PROMPT[:3:-2])]
    pool = sum(tree.root.end for tree in trees) + spare
    for tree in trees:
        lab.open(tree, pool, alone=False, pool=pool)
    for tree in trees:
        lab.begin_extend(tree.root)

    for rows in forwards if policy == "lru" or not spare else forwards[:1]:
        before = lab.rows()
        lab.step()
        assert lab.rows() - before == rows


@pytest.mark.parametrize(("steps", "waits"), [(3, False), (4, True)])
def test_a_question_joins_rows_that_decode_if_their_next_tokens_fit_too(
    steps: int, waits: bool
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(len(PROMPT) + 8)
    stop = StopRule(Words(), BlockLimits((), 8, 8), ())
    growing = lab.begin_grow([(tree.root, 1)], Growth(3, SAMPLED, stop))
    for _ in range(steps):
        lab.step()
    asking = lab.begin_ask([tree.root], [(7, 8, 9)])

    lab.step()  # computes the last of `steps` + 1 tokens, next to three of the question

    assert asking.done is not waits
    while lab.busy:
        lab.step()
    assert len(growing.result()[0].tokens) == 8
    assert relative_error(asking.result(), own_answer(tree.root, (7, 8, 9))) < 1e-5


def own_answer(node: Node, question: tuple[int, ...]) -> torch.Tensor:
    """The logits after a question by the model's own forward."""
    return path_logits(build("llama"), [*path_ids(node), *question])[-1:]


def test_what_waits_is_expected_in_the_order_in_which_it_joins() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    waves: list[list[list[int]]] = []
    kinds: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Pressure):
            upcoming = lab.state.of(tree.root).upcoming
            waves.append([[node.id for node in wave] for wave in upcoming])
        if isinstance(event, Forwarded):
            kinds.append(event.kind)

    lab.open(tree, len(PROMPT) + LENGTH + 2, emit=listen)  # one path and a question
    lab.extend(tree.root)
    first, second, third = lab.sprout([(tree.root, 3)])
    waves.clear()
    kinds.clear()

    lab.ask([first, second, third], [(7, 8)] * 3)

    # one path at a time: the last one that waits is the last to come
    assert len(waves) > 1 and waves[-1] == []
    for now, then in itertools.pairwise(waves):
        assert now and now[1:] == then
    (last,) = waves[0][-1]
    assert tree[last].span.resident.all()
    assert set(kinds) == {"verify"}, "also where its path comes back"


def test_blocks_that_wait_are_expected_as_many_at_a_time_as_decode() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    expected: list[list[list[int]]] = []

    def listen(event: Event) -> None:
        upcoming = lab.state.of(tree.root).upcoming
        expected.append([[node.id for node in wave] for wave in upcoming])

    lab.open(tree, len(PROMPT) + 3 * LENGTH, emit=listen)
    lab.extend(tree.root)
    leaves = lab.sprout([(tree.root, 3)], length=1)
    expected.clear()

    lab.sprout([(leaf, 2) for leaf in leaves])

    ids = [leaf.id for leaf in leaves]
    waves = next(waves for waves in expected if waves)
    assert {node for wave in waves for node in wave} <= set(ids)
    assert all(len(wave) <= 2 for wave in waves), "two blocks fit next to a leaf"
    assert waves[-1][-1] == ids[-1], "the last one that waits is the last to come"


def test_rows_that_fill_the_budget_to_the_last_slot_decode_together() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    lab.open(tree, len(PROMPT) + 2 * LENGTH, detail="steps")
    lab.extend(tree.root)
    lab.sprout([(tree.root, 1)], length=1)  # leaves for the last tokens of the next two
    lab.events.clear()

    lab.sprout([(tree.root, 2)])

    forwards = [event for event in lab.events if isinstance(event, Forwarded)]
    assert [event.rows for event in forwards] == [2] * LENGTH
    assert lab.memory.used == lab.memory.slots


def test_room_is_made_for_some_tokens_of_every_row_at_once() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(len(PROMPT) + 3 * LENGTH + 3 * MARGIN)
    lab.sprout([(tree.root, 3)])
    lab.events.clear()

    lab.sprout([(tree.root, 3)], length=2 * MARGIN)

    asked = [event for event in lab.events if isinstance(event, Pressure)]
    assert [(event.needed, event.free) for event in asked] == [(3 * MARGIN, 0)]


def test_rows_that_decode_lose_nothing_to_what_joins_them() -> None:
    lab = Lab(build("llama"), policy="random", debug=True)
    tree = lab.plant(len(PROMPT) + 4 * LENGTH + 2)
    first, second, *_ = lab.sprout([(tree.root, 4)])
    lab.memory.evict(second, np.arange(LENGTH))
    lab.state.changed([second])
    stop = StopRule(Words(), BlockLimits((), 7, 8), ())
    growing = lab.begin_grow([(first, 1)], Growth(3, SAMPLED, stop))
    for _ in range(5):
        lab.step()
    lab.events.clear()
    lab.begin_extend(second)

    lab.step()

    assert any(isinstance(event, Evicted) for event in lab.events)
    assert second.span.resident.all() and not growing.done
    assert all(node.span.resident.all() for node in first.path)
    assert first.children[0].span.resident[:6].all()


def test_room_that_is_there_is_not_made() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(len(PROMPT) + 2 * LENGTH)

    for _ in range(2):
        lab.sprout([(tree.root, 1)])

    assert lab.memory.used == lab.memory.slots
    assert not any(isinstance(event, Evicted | Pressure) for event in lab.events)


def test_a_batch_is_laid_out_once_for_rows_that_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(len(PROMPT) + 2 * LENGTH + 4)
    lab.sprout([(tree.root, 2)])
    lab.events.clear()
    held: list[int] = []
    right = DecodeBatch.hold

    def hold(self: DecodeBatch, rows: list[Row]) -> None:
        held.append(len(rows))
        right(self, rows)

    monkeypatch.setattr(DecodeBatch, "hold", hold)

    lab.sprout([(tree.root, 1)], length=2 * LENGTH)

    assert sum(isinstance(event, Evicted) for event in lab.events) > 1  # in between
    assert held == [1]


def test_blocks_that_decode_together_lie_in_one_piece_each() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    children = lab.sprout([(tree.root, 3)])
    children += lab.sprout([(child, 2) for child in children])

    for child in children:
        slots = child.span.slot
        assert slots.tolist() == list(range(int(slots[0]), int(slots[0]) + LENGTH))


def test_a_block_that_goes_on_is_to_lie_next_to_its_tokens() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    children = lab.sprout([(tree.root, 2)], length=3)
    work = Growing(lab.state.of(tree.root), children)
    rows = [row(work, tree.root), *(row(work, tree.root) for _ in children)]
    for each, child in zip(rows[1:], children, strict=True):
        each.node, each.pending, child.state = child, 7, NodeState.OPEN

    lab._parts.stepper._decoding.start(rows)

    ends = [int(child.span.slot[2]) + 1 for child in children]
    assert [each.first_slot for each in rows[1:]] == ends
    assert lab.memory.table.owner[rows[0].first_slot] == NO_OWNER


def test_what_fails_while_a_block_waits_again_reports_exactly_the_tokens_that_were_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {child.key: child.tokens for child in grow(4096, (2, 8))[1]}
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(len(PROMPT) + 17)
    lab.forget(lab.sprout([(tree.root, 2)], length=2))
    lab.events.clear()
    right = Decoding.suspend

    def suspend(self: Decoding, row: Row) -> None:
        right(self, row)
        raise BudgetInfeasible(99, lab.memory.slots, "a test")

    monkeypatch.setattr(Decoding, "suspend", suspend)
    with pytest.raises(BudgetInfeasible):
        lab.sprout([(tree.root, 4)], length=8)

    (lost,) = [event.nodes for event in lab.events if isinstance(event, Evicted)][:1]
    ended = {event.node: event.ids for event in lab.events if isinstance(event, Boundary)}
    assert [len(ended[node]) for node, _ in lost] == [count for _, count in lost]
    for node in list(tree)[3:]:
        assert ended[node.id] == tuple(node.tokens) == tuple(whole[node.key][: len(node.tokens)])
    steps = sum(event.rows for event in lab.events if isinstance(event, Forwarded))
    assert steps == sum(map(len, ended.values())) > 0
