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

from arbor.engine.decoding import Decoding
from arbor.engine.open_tree import OpenTree, RunHooks
from arbor.engine.operation import Growing, Growth, Operation, Row, Work
from arbor.engine.retained import Account
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.scheduler import MARGIN, Joined, Scheduler, WaveScheduler, most_held
from arbor.engine.stop_rule import StopRule
from arbor.errors import BudgetInfeasible
from arbor.events import Boundary, Event, Evicted, Forwarded, Pressure, Rehydrated
from arbor.forest import LEAST_COMMON, LEAST_SIBLING, Forest, Overlap
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
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
    assert not queue.rows and not work.waiting


def test_an_older_row_that_has_joined_is_the_expansion_in_progress_of_the_next_step() -> None:
    tree = ThoughtTree(PROMPT)
    older = operation(tree, 400, 6)
    younger = Growing(older.opened, [])
    leaf = row(older, tree.root, 5).node
    leaf.state = NodeState.CLOSED
    queue = queue_of([row(younger, leaf)])
    queue.admit()
    older.waiting.append(row(older, tree.root))
    queue.take(older)
    assert queue.admit()

    if queue.asks and queue.may_admit():
        assert not queue.admit()

    assert queue.focus is tree.root
    assert not queue.asks


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
            may = queue.may_admit()
            names.append([place[id(each)] for each in queue.admit().rows])
            assert may or not names[-1]
            names[-1].append(-1)
            names[-1] += [place[id(each)] for each in queue.rows]
            for each in queue.rows:
                each.node.tree.append(each.node, 1)
            if queue.rows and ends:
                queue.leave([queue.rows[at % len(queue.rows)]])
            elif len(queue.rows) > 1:
                queue.preempt()
        assert names[0] == names[1]


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
    while queue.rows or work.waiting:
        before = list(queue.rows)
        may = queue.may_admit()
        joined = queue.admit().rows
        assert may or not joined
        assert queue.rows == sorted([*before, *joined], key=lambda each: each.place)
        assert queue.rows
        paths = sum(len(node.tokens) for node in tree.paths(each.leaf for each in queue.rows))
        if len(queue.rows) > 1 and joined:
            assert paths + most_held(queue.rows) <= slots
        if work.waiting:  # nothing waits that would fit
            more = (*queue.rows, work.waiting[0])
            paths = sum(len(node.tokens) for node in tree.paths(each.leaf for each in more))
            assert paths + most_held(more) > slots
        for _ in range(data.draw(st.integers(0, 3))):  # steps in which nothing comes or goes
            for each in queue.rows:
                each.node.tree.append(each.node, 1)
            may = queue.may_admit()
            joined = queue.admit().rows
            assert may or not joined
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


def test_leaves_that_wait_to_grow_are_expected_one_after_another() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    waves: list[list[list[Node]]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Pressure):
            waves.append(lab.state.of(tree.root).upcoming)

    lab.open(tree, len(PROMPT) + 2 * LENGTH, emit=listen)  # one path
    lab.extend(tree.root)
    first, second, third = lab.sprout([(tree.root, 3)])
    waves.clear()

    lab.sprout([(leaf, 1) for leaf in (first, second, third)])

    assert [wave for wave, _ in itertools.groupby(waves)] == [[[second], [third]], [[third]], []]


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
