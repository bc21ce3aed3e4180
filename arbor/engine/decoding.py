"""Decoding: takes open blocks to their boundaries, as many together as fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from arbor.engine.decode_batch import DecodeBatch
from arbor.engine.forward_pass import ForwardPasses
from arbor.engine.mode import Rules
from arbor.engine.rehydration import Rehydration
from arbor.engine.residency import Residency
from arbor.engine.scheduler import MARGIN, DecodeScheduler, Lengths, Row
from arbor.engine.stop_rule import StopReason
from arbor.engine.token_source import Growth, TokenSource
from arbor.engine.tree_state import TreeState
from arbor.errors import BudgetInfeasible
from arbor.events import Boundary, Evicted, Sampled
from arbor.tree import Node, NodeState


class Decoding:
    """Decodes blocks of one tree.

    Args:
        state: of the tree.
        residency: frees room.
        forwards: run the steps.
        rehydration: completes the path of a block before it begins.
        source: where tokens come from.
        rules: of the mode.
    """

    def __init__(
        self,
        state: TreeState,
        residency: Residency,
        forwards: ForwardPasses,
        rehydration: Rehydration,
        source: TokenSource,
        rules: Rules,
    ) -> None:
        self._state = state
        self._tree = state.tree
        self._memory = state.memory
        self._residency = residency
        self._forwards = forwards
        self._rehydration = rehydration
        self._source = source
        self._rules = rules
        self._lengths = Lengths()

    def run(self, scheduler: DecodeScheduler, growth: Growth) -> None:
        """Decode every block until its own boundary, all that fit together in one batch.

        A block's last token is run too: its K/V complete the block, and its logits are where
        children begin. After an interruption the unfinished blocks are PRUNED.
        """
        forwards, memory = self._forwards, self._memory
        batch = DecodeBatch(memory, forwards.runner.layer_count, forwards.min_saved_reads)
        changed = False
        stopped = self._state.run.interrupted()
        while scheduler and not stopped:
            changed = self._join(scheduler, growth) or changed
            if memory.free < len(scheduler.rows):
                changed = self._make_room(scheduler) or changed
            rows = scheduler.rows
            if changed:
                batch.hold(rows)
            with forwards.timing():
                logits = forwards.step(batch.plan())
            for row in rows:
                row.node.logprob += row.logprob
                row.node.top1 += row.top1
            done = [i for i, row in enumerate(rows) if row.stop is not None]
            changed = bool(done)
            if done:
                going = [i for i, row in enumerate(rows) if row.stop is None]
                self._end(scheduler, [rows[i] for i in done], logits[done])
                logits = logits[going]
            if self._state.run.detail != "events":
                forwards.report_steps()
            stopped = bool(scheduler) and self._state.run.interrupted()
            if scheduler.rows and not stopped:
                self._choose(scheduler.rows, logits, growth)
        if stopped:
            self.cut([row.node for row in (*scheduler.rows, *scheduler.waiting)])
        forwards.report_steps()

    def cut(self, nodes: Sequence[Node]) -> None:
        """Give up unfinished blocks as they are."""
        for node in nodes:
            node.state = NodeState.PRUNED
            self._source.finish(node)
        self._state.changed(nodes)
        for node in nodes:
            self._report(node, "limit")

    def drop_chosen(self, rows: Sequence[Row]) -> None:
        """After a failure: remove tokens that were chosen and never computed."""
        for row in rows:
            if row.pending is None and row.node.tokens and not row.node.span.resident[-1]:
                self._tree.take_back(row.node)

    def _join(self, scheduler: DecodeScheduler, growth: Growth) -> bool:
        """Let waiting rows join that fit next to the running ones; returns whether any did."""
        running = scheduler.nodes
        joined = scheduler.admit(self._lengths.expected(scheduler.longest))
        if not joined:
            return False
        self._state.expect(scheduler.upcoming())
        fresh = [row for row in joined if row.pending is None]
        begins = [row.begin for row in joined]
        known = self._rehydration.complete(
            begins, reserve=len(joined), want=[row.leaf for row in fresh], running=running
        )
        starts = self._memory.starts(scheduler.longest, len(joined))
        for row, start in zip(joined, starts, strict=True):
            slots = row.node.span.slot
            row.first_slot = int(slots[-1]) + 1 if len(slots) else int(start)
            if row.pending is not None:
                self._tree.append(row.node, row.pending)
                row.pending = None
        self._look_back(joined)
        if fresh:
            self._choose(fresh, torch.stack(known), growth)
        return True

    def _look_back(self, rows: Sequence[Row]) -> None:
        """Set the context of each row, and whether that is whole and exact."""
        leaves = list(dict.fromkeys(row.leaf for row in rows))
        contexts = dict(zip(leaves, self._state.contexts(leaves), strict=True))
        exact = dict(zip(leaves, self._state.are_exact_after(leaves), strict=True))
        for row in rows:
            row.context, row.exact = contexts[row.leaf], exact[row.leaf]
            row.context_length = sum(len(piece.slots) for piece in row.context)

    def _make_room(self, scheduler: DecodeScheduler) -> bool:
        """Make room for the next tokens of each row: `MARGIN` where something can leave, one in any
        case.

        Rows wait again where what is pinned leaves no room for all; one always fits.

        Returns:
            whether the rows or their contexts have changed.
        """
        preempted = False
        while self._pinned(scheduler) + len(scheduler.rows) > self._memory.slots:
            self._preempt(scheduler)
            preempted = True
        rows, nodes = scheduler.rows, scheduler.nodes
        most = self._memory.slots - self._pinned(scheduler)
        try:
            lost = self._residency.fit(min(MARGIN * len(rows), most), nodes, "pressure")
        except BudgetInfeasible:  # the policy gives up less than that
            lost = self._residency.fit(len(rows), nodes, "pressure")
        if lost:
            self._look_back(rows)
        return preempted or lost

    def _pinned(self, scheduler: DecodeScheduler) -> int:
        """Slots of the tokens that stay while these rows run."""
        pinned = self._rules.pinned(scheduler.nodes)
        return sum(int(np.count_nonzero(node.span.resident)) for node in pinned)

    def _preempt(self, scheduler: DecodeScheduler) -> None:
        """The row that joined last waits again: its tokens are known, their K/V are computed anew
        when it goes on."""
        row = scheduler.preempt()
        row.pending = row.node.tokens[-1]
        self._tree.take_back(row.node)
        freed = self._memory.release([row.node])
        self._state.mark_computed([row.node])
        self._state.changed([row.node])
        if freed:
            lost = ((row.node.id, freed),)
            self._state.emit(Evicted(cause="pressure", nodes=lost, kv=self._state.kv))

    def _choose(self, rows: Sequence[Row], logits: Tensor, growth: Growth) -> None:
        """Append one token to each row's block, and decide whether it ends the block."""
        with self._forwards.timing():
            tokens = self._source.choose(rows, logits, growth)
            for row, token in zip(rows, tokens, strict=True):
                self._tree.append(row.node, token)
                row.stop = self._source.stop(row.node, growth)
        if self._state.run.detail == "tokens":
            nodes = tuple(row.node.id for row in rows)
            logprobs = tuple(row.logprob for row in rows)
            self._state.emit(Sampled(nodes, tuple(tokens), logprobs))

    def _end(self, scheduler: DecodeScheduler, done: Sequence[Row], logits: Tensor) -> None:
        """Close blocks that have reached their boundary."""
        scheduler.finish(done)
        nodes = [row.node for row in done]
        self._state.logits.remember([node.id for node in nodes], logits)
        for row, sure in zip(done, self._source.confidence(nodes, logits), strict=True):
            row.node.state = NodeState.CLOSED
            row.node.confidence = sure
            self._source.finish(row.node)
            self._lengths.add(len(row.node.tokens))
        self._state.used(self._tree.paths(nodes))
        self._state.mark_computed(nodes)
        for row in done:
            assert row.stop is not None
            self._report(row.node, row.stop)

    def _report(self, node: Node, stop: StopReason) -> None:
        self._state.emit(
            Boundary(
                node=node.id,
                ids=tuple(node.tokens),
                text=node.text,
                stop=stop,
                logprob=node.logprob,
                confidence=node.confidence,
                top1=node.top1,
            )
        )
