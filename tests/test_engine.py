"""Engine: within any feasible budget the same tree, and nothing is paid for that is there
already."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.models import Words, build, path_logits
from support.trees import (
    GREEDY,
    LENGTH,
    PROMPT,
    QUESTIONS,
    SAMPLED,
    Lab,
    grown,
    leaves_of,
    own_answers,
    path_ids,
    relative_error,
)
from torch import Tensor

from arbor.engine.operation import GivenBlock, Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import BudgetInfeasible, UsageError
from arbor.events import Boundary, Evicted, Forwarded, Rehydrated
from arbor.retention.base import Blocks, Scorer
from arbor.retention.policy import Policy
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

TOLERANCE = 1e-5
SMALLEST = 30  # slots: the longest path of `grown` with a question


@functools.cache
def laboratory() -> Lab:
    return Lab(build("llama"), debug=True)


@pytest.fixture
def lab() -> Lab:
    lab = laboratory()
    lab.events.clear()
    lab.listener = lab.events.append
    return lab


@functools.cache
def full() -> tuple[ThoughtTree, Tensor]:
    """`grown` at full retention."""
    return grown(Lab(build("llama")))


def of_kind(lab: Lab, kind: str) -> list[Forwarded]:
    return [e for e in lab.events if isinstance(e, Forwarded) and e.kind == kind]


def growth(length: int = LENGTH, seed: int = 3) -> Growth:
    return Growth(seed, SAMPLED, StopRule(Words(), BlockLimits((), length, 8), ()))


# The same tree


@settings(max_examples=8)
@given(slots=st.integers(SMALLEST, 62))
def test_any_feasible_budget_gives_the_same_tree(slots: int) -> None:
    lab = laboratory()
    want, want_answers = full()

    tree, answers = grown(lab, slots)

    assert [node.tokens for node in tree] == [node.tokens for node in want]
    assert relative_error(answers, want_answers) < TOLERANCE
    assert lab.memory.peak <= slots
    for node, other in zip(tree, want, strict=True):
        assert node.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert (node.text, node.state) == (other.text, other.state)


def test_the_budget_holds_after_every_event(lab: Lab) -> None:
    seen: list[int] = []
    lab.listener = lambda event: seen.append(lab.memory.used)

    grown(lab, SMALLEST)

    assert max(seen) <= lab.memory.peak <= SMALLEST
    lab.memory.check()


@settings(max_examples=6)
@given(order=st.permutations(range(4)), slots=st.sampled_from([34, 4096]))
def test_the_order_in_which_leaves_are_asked_changes_nothing(order: list[int], slots: int) -> None:
    lab = laboratory()
    tree = lab.plant(slots)
    leaves = lab.sprout([(tree.root, 4)])
    want = [node.tokens for node in lab.sprout([(leaf, 1) for leaf in leaves])]
    tree = lab.plant(slots)
    leaves = lab.sprout([(tree.root, 4)])

    children = lab.sprout([(leaves[i], 1) for i in order])

    assert [child.parent for child in children] == [leaves[i] for i in order]
    assert [child.tokens for child in children] == [want[i] for i in order]


def kv_of(lab: Lab, node: Node) -> list[Tensor]:
    index = torch.from_numpy(node.span.slot.astype(np.int64))
    return [x[index].clone() for x in (*lab.memory.pool.k, *lab.memory.pool.v)]


def test_logits_that_are_no_longer_kept_are_computed_from_the_last_token(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbor.engine.forest_state.MOST_LOGITS", 0)
    want, want_answers = full()

    tree, answers = grown(lab)

    assert [node.tokens for node in tree] == [node.tokens for node in want]
    assert relative_error(answers, want_answers) < TOLERANCE
    assert not any(isinstance(event, Rehydrated) for event in lab.events)
    assert sum(event.rows for event in of_kind(lab, "prefill")) > len(PROMPT)


def test_running_a_last_token_again_leaves_its_kv_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbor.engine.forest_state.MOST_LOGITS", 0)
    tree = lab.plant()
    (first,) = lab.sprout([(tree.root, 1)])
    lab.sprout([(tree.root, 1)])
    kept = kv_of(lab, first)
    lab.events.clear()

    lab.extend(first)

    assert [event.rows for event in of_kind(lab, "prefill")] == [1]
    assert all(torch.equal(a, b) for a, b in zip(kv_of(lab, first), kept, strict=True))


# What does not fit


@pytest.mark.parametrize(
    "act",
    [
        lambda lab, node: lab.begin_given([GivenBlock(node, [2] * 14, growth(20), whole=True)]),
        lambda lab, node: lab.ask([lab.tree.root, node], [[1], [2] * 14]),
    ],
    ids=["grow", "ask"],
)
def test_what_cannot_fit_is_refused_before_anything_changes(
    lab: Lab, act: Callable[[Lab, Node], Any]
) -> None:
    tree = lab.plant(30)
    (node,) = lab.sprout([(tree.root, 1)])
    before = (len(tree), copy.copy(node.children), lab.memory.used, len(lab.events))
    kept = kv_of(lab, node)

    with pytest.raises(BudgetInfeasible) as caught:
        act(lab, node)

    assert (caught.value.needed, caught.value.budget) == (len(PROMPT) + LENGTH + 14, 30)
    assert (len(tree), node.children, lab.memory.used, len(lab.events)) == before
    assert all(torch.equal(a, b) for a, b in zip(kv_of(lab, node), kept, strict=True))


def test_a_block_that_outgrows_the_budget_ends_with_the_size_it_needs(lab: Lab) -> None:
    tree = lab.plant(len(PROMPT) + 4)
    child = tree.fork(tree.root)

    with pytest.raises(BudgetInfeasible) as caught:
        lab.decode([child], growth(5))

    assert (caught.value.needed, caught.value.budget) == (len(PROMPT) + 5, len(PROMPT) + 4)
    assert child.state is NodeState.PRUNED and len(child.tokens) >= 4
    lab.memory.check()
    (other,) = lab.sprout([(tree.root, 1)], length=3)
    assert other.state is NodeState.CLOSED


def test_an_allocator_that_keeps_too_much_is_noticed() -> None:
    class Greedy:
        def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> NDArray[np.int64]:
            return blocks.resident

    lab = Lab(build("llama"), policy=Policy(Greedy()))
    tree = lab.plant(20)

    with pytest.raises(UsageError, match="where there is room for"):
        lab.sprout([(tree.root, 3)])


# What is paid


def test_a_shared_prefix_gives_what_a_prefill_per_leaf_gives_and_reads_less() -> None:
    warm = Lab(build("llama"))
    tree, answers = grown(warm)
    cold_rows = cold_answers = None

    cold = Lab(build("llama"))
    cold_logits = []
    for leaf in leaves_of(tree):
        cold.plant(prompt=path_ids(leaf))
        cold_logits += list(cold.ask([cold.tree.root] * len(QUESTIONS), list(QUESTIONS)))
    cold_answers, cold_rows = torch.stack(cold_logits), cold.rows()

    assert relative_error(answers, cold_answers) < TOLERANCE
    assert relative_error(answers, own_answers(build("llama"), tree)) < TOLERANCE
    questions = sum(len(q) for q in QUESTIONS) * len(leaves_of(tree))
    assert warm.rows() == tree.tokens + questions
    assert cold_rows == sum(leaf.end for leaf in leaves_of(tree)) + questions
    assert cold_rows > 1.5 * warm.rows()
    read = sum(e.read_tokens for e in warm.events if isinstance(e, Forwarded))
    unique = sum(e.unique_read_tokens for e in warm.events if isinstance(e, Forwarded))
    assert unique < 0.6 * read


def test_no_shared_levels_read_everything_and_give_the_same() -> None:
    flat = Lab(build("llama"), min_saved_reads=10**9)
    want, want_answers = full()

    tree, answers = grown(flat)

    assert [node.tokens for node in tree] == [node.tokens for node in want]
    assert relative_error(answers, want_answers) < TOLERANCE
    decoded = of_kind(flat, "decode")
    assert all(e.read_tokens == e.unique_read_tokens for e in decoded)


def test_every_token_is_run_once_where_nothing_is_evicted(lab: Lab) -> None:
    tree = lab.plant()
    children = lab.sprout([(tree.root, 3)])
    lab.sprout([(child, 2) for child in children])

    assert [e.rows for e in of_kind(lab, "prefill")] == [len(PROMPT)]
    assert [(e.steps, e.rows) for e in of_kind(lab, "decode")] == [(5, 15), (5, 30)]
    reads = [
        sum(child.start + i + 1 for child in nodes for i in range(5))
        for nodes in (children, [c for child in children for c in child.children])
    ]
    assert [e.read_tokens for e in of_kind(lab, "decode")] == reads
    own = (1 + 2 + 3 + 4 + 5) * np.array([3, 6])
    shared = [5 * len(PROMPT), 5 * (len(PROMPT) + 3 * 5)]
    assert [e.unique_read_tokens for e in of_kind(lab, "decode")] == (own + shared).tolist()


@pytest.mark.parametrize("slots", [SMALLEST, 4096])
def test_paths_are_read_together_whether_they_were_computed_before_or_not(slots: int) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots)
    first = lab.sprout([(tree.root, 2)])[0]
    given = [tree.fork(parent) for parent in (first, tree.root)]  # blocks of given tokens
    below = tree.fork(given[1])
    for node, tokens in zip([*given, below], ((7, 8, 9), (10, 11), (12, 13)), strict=True):
        node.start = node.parent.end if node.parent is not None else 0
        for token in tokens:
            tree.append(node, token)
        node.state = NodeState.CLOSED
    lab.changed([*given, below])
    nodes = [below, *given, first]

    for _ in range(2):
        reading = lab.begin_read(nodes)
        while not reading.done:
            lab.step()
        own = [path_logits(build("llama"), path_ids(node))[-1] for node in nodes]
        assert relative_error(reading.result(), torch.stack(own)) < TOLERANCE

    if slots > SMALLEST:
        assert all(bool(node.span.exact.all()) for node in nodes)
    assert lab.memory.used <= slots


def test_what_the_search_gives_up_is_free_at_once(lab: Lab) -> None:
    tree = lab.plant()
    left, right = lab.sprout([(tree.root, 2)])
    lab.events.clear()

    lab.forget([left])
    lab.forget([left])

    assert lab.memory.used == len(PROMPT) + LENGTH
    assert [e for e in lab.events if isinstance(e, Evicted)] == [
        Evicted(cause="close", nodes=((left.id, LENGTH),), kv=lab.kv)
    ]
    assert right.span.exact.all()


# How blocks end


def test_blocks_of_one_wave_end_each_at_its_own_boundary(lab: Lab) -> None:
    tree = lab.plant()
    free = lab.sprout([(tree.root, 4)], length=8)
    ends = (free[0].tokens[1], free[2].tokens[4])
    tree = lab.plant()

    children = lab.grow(
        [(tree.root, 4)], Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 8, 3), ends))
    )

    for child, other in zip(children, free, strict=True):
        stops = [i for i, token in enumerate(other.tokens) if token in ends]
        length = stops[0] + 1 if stops else 8
        assert child.tokens == other.tokens[:length]
        assert child.state is NodeState.CLOSED
        assert child.span.exact.all()
        assert child.confidence > 0
    assert len({len(child.tokens) for child in children}) > 1
    assert {e.stop for e in lab.events if isinstance(e, Boundary)} == {"eos", "length"}


def test_a_first_token_may_be_given(lab: Lab) -> None:
    tree = lab.plant()
    (free,) = lab.sprout([(tree.root, 1)], GREEDY)
    tree = lab.plant()
    given_first = tree.fork(tree.root)
    tree.append(given_first, free.tokens[0])

    lab.decode([given_first], Growth(3, GREEDY, growth().stop))

    assert given_first.tokens == free.tokens
    assert given_first.span.exact.all()


def test_an_interruption_gives_up_the_blocks_in_progress(lab: Lab) -> None:
    asked = iter([False, False, False, True])  # before the wave, then after each step
    tree = ThoughtTree(PROMPT)
    lab.open(tree, 4096, interrupted=lambda: next(asked))
    lab.extend(tree.root)

    children = lab.sprout([(tree.root, 2)])

    assert [child.state for child in children] == [NodeState.PRUNED] * 2
    assert [len(child.tokens) for child in children] == [3, 3]
    assert [e.stop for e in lab.events if isinstance(e, Boundary)] == ["limit", "limit"]
    lab.memory.check()


def test_room_is_counted_after_the_longest_path(lab: Lab) -> None:
    tree = lab.plant(40)
    lab.sprout([(tree.root, 1)])

    assert lab.room(5) == (40 - 17) // 5
    assert lab.room(0) == lab.room(1) == 40 - 17
    assert lab.room(100) == 1
