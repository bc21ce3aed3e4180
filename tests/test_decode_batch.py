"""A decode step planned for all rows at once is the one planned segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from arbor.engine.forest_state import contexts_of
from arbor.engine.forward_pass import DecodeBatch
from arbor.engine.operation import Growth, Row
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.stop_rule import StopRule
from arbor.kernels.attention.base import CascadeLayout
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.model.level_rule import LevelRule
from arbor.model.plan import ForwardPlan, Segment, plan_forward, visibility
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.tree import Certainty, Node, NodeState, ThoughtTree

SLOTS = 300
WINDOWS = (None, 1, 3, 9)
GROWTH = Growth(0, Sampling(), StopRule(None, BlockLimits((), 64, 64), ()))


def segment_by_segment(rows: Sequence[Row], least: int) -> ForwardPlan:
    """The plan of a step from one `Segment` per row, after its tokens were given slots."""
    segments = []
    for row in rows:
        node = row.node
        (context,) = contexts_of([row.leaf])
        slots = node.span.slot
        own = np.array([node.end - 1])
        segments.append(Segment(context, node.tokens[-1:], own, slots, slots[-1:], 1))
    return plan_forward(segments, min_saved_reads=least)


def levels(layout: CascadeLayout) -> list[tuple[list[int], list[int], list[int], bool]]:
    return [
        (
            level.qo_indptr.tolist(),
            level.kv_indptr.tolist(),
            level.kv_indices.tolist(),
            level.causal,
        )
        for level in layout.levels
    ]


def row_of(child: Node, leaf: Node, code: ArithmeticCode, **more: Any) -> Row:
    """A row of no operation."""
    return Row(cast(Any, None), 0, GROWTH, child, leaf, code, **more)


class Decoding(RuleBasedStateMachine):
    """Rows decode, end, wait again and join in any order; blocks they read lose tokens."""

    @initialize(least=st.sampled_from([0, 6, 30, 10**6]), blocks=st.data())
    def begin(self, least: int, blocks: st.DataObject) -> None:
        self.least = least
        self.tree = ThoughtTree(range(3))
        self.memory = KVMemory(
            [LayerKV(1, 1, 1)], SLOTS, torch.float32, torch.device("cpu"), debug=True
        )
        self.memory.adopt(self.tree)
        self.batch = DecodeBatch(self.memory, 1, LevelRule(least))
        self.rows: list[Row] = []
        self.place(self.tree.root)
        for _ in range(blocks.draw(st.integers(0, 7))):
            parent = self.tree[blocks.draw(st.integers(0, len(self.tree) - 1))]
            child = self.tree.fork(parent)
            for token in range(blocks.draw(st.integers(1, 4))):
                self.tree.append(child, token)
            self.place(child)
            child.state = NodeState.CLOSED
        self.closed = list(self.tree)

    def place(self, node: Node) -> None:
        absent = np.flatnonzero(~node.span.resident)
        self.memory.place(node, absent, exact=True, depth=1)
        self.memory.commit()

    def hold(self) -> None:
        """As decoding does after a change."""
        leaves = list(dict.fromkeys(row.leaf for row in self.rows))
        contexts = dict(zip(leaves, contexts_of(leaves), strict=True))
        for row in self.rows:
            row.context = contexts[row.leaf]
            row.context_length = sum(len(piece.slots) for piece in row.context)
        self.batch.hold(self.rows)

    @rule(place=st.integers(0, 99), count=st.integers(1, 3), hint=st.integers(-1, SLOTS))
    def join(self, place: int, count: int, hint: int) -> None:
        leaf = self.closed[place % len(self.closed)]
        for _ in range(count if len(self.rows) < 9 else 0):
            child = self.tree.fork(leaf)
            code = ArithmeticCode(0, child, Sampling())
            sure = Certainty.NONE if len(self.rows) % 2 else Certainty.EXACT
            row = row_of(child, leaf, code, first_slot=hint, certainty=sure)
            self.rows.append(row)
        if len(self.rows) % 2:  # as in the order of the tree
            self.rows.sort(key=lambda row: row.node.key)
        self.hold()

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 20))
    def decode(self, steps: int) -> None:
        for step in range(steps):
            if self.memory.free < len(self.rows):
                return
            for row in self.rows:
                self.tree.append(row.node, row.node.id + step)

            plan = self.batch.plan()

            wanted = segment_by_segment(self.rows, self.least)
            assert self.memory.pending
            for name in ("ids", "positions", "write", "logit_rows", "again"):
                got, expected = getattr(plan, name), getattr(wanted, name)
                assert got.dtype == expected.dtype and got.tolist() == expected.tolist(), name
            assert plan.rows == len(self.rows)
            assert plan.reads.sum() == wanted.reads.sum() == sum(self.keys())
            assert plan.unique_reads.sum() == wanted.unique_reads.sum()
            for window in WINDOWS:
                assert levels(plan.layout(window)) == levels(wanted.layout(window))
            seen, expected_seen = (visibility(each, SLOTS) for each in (plan, wanted))
            assert [each.tolist() for each in seen] == [each.tolist() for each in expected_seen]
            self.memory.commit()
            for row in self.rows:
                assert row.node.span.resident.all()
                assert row.node.span.exact.all() == (row.certainty == Certainty.EXACT)

    def keys(self) -> list[int]:
        """Keys that each row reads."""
        return [
            sum(int(node.span.resident.sum()) for node in row.leaf.path) + len(row.node.tokens)
            for row in self.rows
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A few rows end; the contexts of the others stay what they are."""
        gone = data.draw(st.sets(st.integers(0, len(self.rows) - 1), max_size=2))
        self.rows = [row for i, row in enumerate(self.rows) if i not in gone]
        self.batch.hold(self.rows)

    @precondition(lambda self: self.rows)
    @rule()
    def preempt(self) -> None:
        """The last row waits again, and joins anew with the tokens it had."""
        row = self.rows.pop()
        self.memory.free_blocks([row.node])
        if self.memory.free >= len(row.node.tokens) and row.node.tokens:
            self.place(row.node)
            row.node.span.exact[:] = row.certainty == Certainty.EXACT
            self.rows.insert(0, row)
        self.hold()

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 99), offset=st.integers(0, 9))
    def lose(self, place: int, offset: int) -> None:
        node = self.closed[place % len(self.closed)]
        here = np.flatnonzero(node.span.resident)
        if len(here):
            self.memory.evict(node, here[[offset % len(here)]])
        self.hold()


Decoding.TestCase.settings = settings(max_examples=60, stateful_step_count=12)
TestDecoding = Decoding.TestCase


def test_tokens_of_a_block_lie_side_by_side_until_they_meet_another_one() -> None:
    tree = ThoughtTree(range(3))
    memory = KVMemory([LayerKV(1, 1, 1)], 64, torch.float32, torch.device("cpu"))
    memory.adopt(tree)
    memory.place(tree.root, np.arange(3), exact=True, depth=1)
    rows = []
    for first in (10, 20):
        child = tree.fork(tree.root)
        code = ArithmeticCode(0, child, Sampling())
        rows.append(row_of(child, tree.root, code, first_slot=first))
    batch = DecodeBatch(memory, 1, LevelRule())
    batch.hold(rows)

    for _ in range(18):  # beyond the first stretch of each block's span
        for row in rows:
            tree.append(row.node, 7)
        batch.plan()
        memory.commit()

    assert rows[0].node.span.slot.tolist() == [*range(10, 20), *range(3, 10), 38]
    assert rows[1].node.span.slot.tolist() == list(range(20, 38))
