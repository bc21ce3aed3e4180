"""Decoding: the life of open blocks, from their first token to their boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from arbor.engine.ahead import Ahead
from arbor.engine.forest_state import ForestState, head
from arbor.engine.forward_pass import ForwardPasses
from arbor.engine.operation import Growing, Row, Siblings
from arbor.engine.prefix_sharing import PrefixSharing
from arbor.engine.sampling import ArithmeticCode, Drawing
from arbor.engine.scheduler import Schedulers
from arbor.engine.stop_rule import StopReason
from arbor.engine.token_source import CheckedSource, ModelSampler, TokenSource
from arbor.events import Boundary, Sampled
from arbor.forest import by_tree
from arbor.tree import NO_SLOT, Certainty, Node, NodeState, paths_of

T = TypeVar("T")


class Decoding:
    """Begins, continues and ends the blocks that decode.

    A block's last token is run too: its K/V complete the block, and its logits are where children
    begin.
    """

    def __init__(
        self,
        state: ForestState,
        forwards: ForwardPasses,
        source: TokenSource,
        schedulers: Schedulers,
    ) -> None:
        self._state = state
        self._memory = state.memory
        self._forwards = forwards
        self._source = source
        # sources that are derived from it choose in their own way
        self._sampler = source if type(source) is ModelSampler else None
        self._schedulers = schedulers
        self._sharing = PrefixSharing(state)
        self._cut_changes = 0  # of the forest, when contexts were last set

    def start(self, rows: Sequence[Row]) -> None:
        """Let rows begin or go on whose paths are complete: each is given its next token.

        Args:
            rows: at least one.
        """
        longest = max(row.longest for row in rows)
        starts = self._memory.starts(longest, len(rows))
        for row, start in zip(rows, starts, strict=True):
            slots = row.node.span.slot
            row.first_slot = int(slots[-1]) + 1 if len(slots) else int(start)
            row.started = True
            if row.pending is not None:
                row.node.tree.append(row.node, row.pending)
                row.pending = None
        # where blocks share other tokens than before, rows that run name them by other pieces
        changes = self._state.forest.cut_changes
        anew = self._cut_changes != changes
        self._cut_changes = changes
        self.look_back([row for row in self._schedulers.rows if row.started] if anew else rows)

    def look_back(self, rows: Sequence[Row]) -> None:
        """Set the context of each row, and how sure what is computed after it is.

        Called when a block joins, and when blocks of a path or the block itself have lost tokens;
        the last token of a block that has begun is still to be computed.
        """
        leaves = list(dict.fromkeys(row.leaf for row in rows))
        contexts = dict(zip(leaves, self._state.contexts(leaves), strict=True))
        certainty = dict(zip(leaves, self._state.certainty_after(leaves), strict=True))
        for row in rows:
            row.context, row.certainty, row.tail_from = contexts[row.leaf], certainty[row.leaf], 0
            span = row.node.span
            if span.rounded.any():
                row.certainty = min(row.certainty, Certainty.ROUNDED)
            if len(span.slot) and not span.certain[:-1].all():
                if not span.ready[:-1].all():
                    row.certainty = Certainty.NONE
                gone = np.flatnonzero(span.slot[:-1] == NO_SLOT)
                if len(gone):
                    row.tail_from = int(gone[-1]) + 1
                    row.context = (*row.context, *head(row.node, row.tail_from))
            row.context_length = sum(len(piece.slots) for piece in row.context)

    def choose(
        self,
        rows: Sequence[Row],
        logits: Tensor | Sequence[Tensor],
        ahead: Ahead | None = None,
    ) -> list[Row]:
        """Append one token to each row's block, and decide whether it ends the block.

        Where the token source fails, the operations it fails for are given the error.

        Args:
            rows: of any operations.
            logits: [n, V] float32, or n times [V].
            ahead: the step that computes these tokens may begin before the host knows them.

        Returns:
            the rows that are to be compared with their siblings.
        """
        watched: list[Row] = []
        if not rows:
            return watched
        stacked = logits if isinstance(logits, Tensor) else torch.stack(list(logits))
        began = self._forwards.stopwatch.start()
        drawing = None
        if ahead is not None and self._sampler is not None:
            drawing = self._sampler.begin(rows, stacked)
        if ahead is not None and drawing is not None:
            self._forwards.stopwatch.stop(began)  # the step ahead has a time of its own
            ahead.begin(drawing.tokens)
            began = self._forwards.stopwatch.start()
        tokens = self._tokens(rows, stacked, drawing)
        if ahead is not None and drawing is not None:
            ahead.learn(tokens, drawing.was_final)
        there = ahead is not None and ahead.waiting
        for row, token in zip(rows, tokens, strict=True):
            if token is None or row.operation.error is not None:
                continue
            if not there:
                row.node.tree.append(row.node, token)
            if row.siblings is not None:
                watched.append(row)
            try:
                row.stop = self._source.stop(row.node, row.growth)
            except Exception as error:
                row.operation.error = error
        self._forwards.stopwatch.stop(began)
        for tree, opened in self._state.trees.items():
            if opened.run.detail == "tokens":
                chosen = [
                    (row.node.id, token, row.logprob, row.drawn, row.alternatives)
                    for row, token in zip(rows, tokens, strict=True)
                    if row.node.tree is tree and token is not None
                ]
                if chosen:
                    nodes, ids, logprobs, drawn, others = zip(*chosen, strict=True)
                    found = others if any(others) else ()
                    opened.emit(Sampled(nodes, ids, logprobs, found, drawn))
        return watched

    def compare(self, rows: Sequence[Row]) -> bool:
        """Compare rows that were given a token with their siblings, and end those that a hook ends
        (`BranchHook`).

        A row that is ahead of its siblings leaves the batch until they have caught up.

        Returns:
            whether rows have left the batch.
        """
        left = False
        for siblings in dict.fromkeys(row.siblings for row in rows if row.siblings is not None):
            growing, leaf = siblings.rows[0].operation, siblings.rows[0].leaf
            assert isinstance(growing, Growing)
            if growing.error is not None:
                continue
            for row in siblings.ahead:
                if row.started:
                    self._schedulers.leave([row])
                    self.suspend(row)
                    growing.held.append(row)
                    left = True
            stopped = siblings.watch.chosen()
            if stopped is not None:
                for row in (siblings.rows[place] for place in stopped.places):
                    row.stop = "gate"
                    if row.growth.grammar is not None:
                        row.growth.grammar.forget(row.node)
                self._state.of(leaf).emit(stopped.event)
            self._release(growing, siblings)
        return left

    def _release(self, growing: Growing, siblings: Siblings) -> None:
        """Let rows go on that wait for no sibling any more."""
        ahead = siblings.ahead
        mine = [row for row in growing.held if row.siblings is siblings and row not in ahead]
        growing.held = [row for row in growing.held if row not in mine]
        self._schedulers.resume(mine)

    def _tokens(
        self, rows: Sequence[Row], logits: Tensor, drawing: Drawing | None = None
    ) -> list[int | None]:
        """A token for each row; None where the source fails for the row's operation."""
        codes: list[ArithmeticCode] = []
        if isinstance(self._source, CheckedSource) and _are_several(rows):
            codes = [row.code.copy() for row in rows]

        def again() -> None:
            for row, code in zip(rows, codes, strict=False):
                row.code = code

        sampler = self._sampler

        def ask(some: Sequence[Row], given: Tensor) -> Sequence[int]:
            if sampler is not None and drawing is not None and some is rows:
                return sampler.end(some, given, drawing)
            return self._source.choose(some, given)

        return _answers(ask, rows, logits, again)

    def end(self, done: Sequence[Row], logits: Tensor) -> None:
        """Close blocks that have reached their boundary.

        Args:
            logits: [n, V] float32, after their last tokens.
        """
        self._schedulers.leave(done)

        def confidence(rows: Sequence[Row], logits: Tensor) -> Sequence[float]:
            return self._source.confidence([row.node for row in rows], logits)

        nodes = [row.node for row in done]
        self._state.logits.remember([node.row for node in nodes], logits)
        for row, sure in zip(done, _answers(confidence, done, logits), strict=True):
            row.node.state = NodeState.CLOSED
            row.node.shortened = row.stop == "length"
            row.node.confidence = sure or 0.0  # of an operation that ends
            self._source.finish(row.node)
            if row.node.given < len(row.node.tokens):
                row.operation.opened.lengths.add(len(row.node.tokens))
            row.operation.left -= 1
        self._state.used(paths_of(nodes))
        self._state.mark_computed(nodes)
        for row in done:
            assert row.stop is not None
            self._report(row.node, row.stop)
        self._sharing.merge(nodes)
        for tree, group in by_tree(nodes).items():  # siblings are found from here on
            self._state.trees[tree].retained.finish(group)

    def cut(self, nodes: Sequence[Node]) -> None:
        """Give up unfinished blocks as they are, without given tokens that were never computed."""
        for node in nodes:
            if node.given and node.row not in self._state.computed:
                while node.tokens and not node.span.resident[-1]:
                    node.tree.take_back(node)
            node.given = min(node.given, len(node.tokens))
            node.state = NodeState.PRUNED
            self._source.finish(node)
        self._state.changed(nodes)
        for tree, group in by_tree(nodes).items():
            self._state.trees[tree].retained.give_up(group)
        for node in nodes:
            self._report(node, "limit")

    def drop_chosen(self, rows: Iterable[Row]) -> None:
        """Remove tokens that were chosen and never computed."""
        for row in rows:
            held = row.pending is not None or not row.node.tokens
            if row.node.state is NodeState.OPEN and not held and not row.node.span.resident[-1]:
                row.node.tree.take_back(row.node)

    def suspend(self, row: Row) -> None:
        """Have a row go on later with the token it was given last; its K/V leave the device."""
        if row.started:
            row.pending = row.node.tokens[-1]
            row.node.tree.take_back(row.node)
        row.started = False
        freed = self._memory.evict(row.node, np.flatnonzero(row.node.span.resident))
        self._state.mark_computed([row.node])
        self._state.changed([row.node])
        if freed:
            self._state.report_evicted({row.node: freed}, "pressure")

    def withdraw(self, row: Row) -> None:
        """Take back the token that a row was given when it joined a step that failed."""
        if row.started and row.node.tokens and not row.node.span.resident[-1]:
            row.pending = row.node.tokens[-1]
            row.node.tree.take_back(row.node)
        row.started = False

    def _report(self, node: Node, stop: StopReason) -> None:
        self._state.of(node).emit(
            Boundary(
                node=node.id,
                ids=tuple(node.tokens),
                text=node.text,
                stop=stop,
                logprob=node.logprob,
                confidence=node.confidence,
                top1=node.top1,
                given=node.given,
            )
        )


def _are_several(rows: Sequence[Row]) -> bool:
    """Whether rows are of more than one operation."""
    return any(row.operation is not rows[0].operation for row in rows)


def _answers(
    ask: Callable[[Sequence[Row], Tensor], Sequence[T]],
    rows: Sequence[Row],
    logits: Tensor,
    again: Callable[[], object] = bool,
) -> list[T | None]:
    """A token source's answer for each row; None for the rows of an operation it fails for, which
    is given the error.

    Args:
        rows: of any operations.
        logits: [n, V] float32.
        again: called before each operation's rows are asked about alone.
    """
    try:
        return list(ask(rows, logits))
    except Exception as error:
        if not _are_several(rows):
            rows[0].operation.error = error
            return [None] * len(rows)
    again()
    answers: list[T | None] = [None] * len(rows)
    for operation in dict.fromkeys(row.operation for row in rows):
        mine = [i for i, row in enumerate(rows) if row.operation is operation]
        some = _answers(ask, [rows[i] for i in mine], logits[mine])
        for i, answer in zip(mine, some, strict=True):
            answers[i] = answer
    return answers
