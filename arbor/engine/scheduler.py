"""DecodeScheduler: which open blocks decode together, as many as will probably fit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from arbor.engine.sampling import ArithmeticCode
from arbor.engine.stop_rule import StopReason
from arbor.model.sharing import Context
from arbor.tree import NO_SLOT, Node

# tokens of each row that room is made for at once while blocks decode (ArborKV's delta)
MARGIN = 4


@dataclass(slots=True)
class Row:
    """One block while it decodes.

    Attributes:
        node, leaf: the block, and the one it grows from.
        code: where its next token comes from.
        pending: the token it goes on with when it (re)joins; None: it is still to be sampled.
        first_slot: where the K/V of its first token would best lie; a hint.
        context: resident tokens of the path before the block.
        context_length: how many these are.
        exact: whether that path is whole and exact.
        stop: why it ends with its last token; None while it goes on.
        logprob, top1: the log probability of its last token, and the highest probability there was;
            0 if the token was given.
    """

    node: Node
    leaf: Node
    code: ArithmeticCode
    pending: int | None = None
    first_slot: int = NO_SLOT
    context: Context = ()
    context_length: int = 0
    exact: bool = True
    stop: StopReason | None = None
    logprob: float = 0.0
    top1: float = 0.0

    @property
    def begin(self) -> Node:
        """The block that has to be complete before it (re)joins."""
        return self.node if self.node.tokens else self.leaf


@dataclass(slots=True)
class Lengths:
    """Lengths of the finished blocks of one tree."""

    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, tokens: int) -> None:
        """Count a block that has ended."""
        self.count += 1
        self.total += tokens
        self.squares += tokens * tokens

    def expected(self, longest: int) -> int:
        """Expected length of one more block: mean plus standard deviation; half of the longest
        before any."""
        if not self.count:
            return math.ceil(longest / 2)
        mean = self.total / self.count
        spread = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        return min(longest, math.ceil(mean + spread))


@dataclass(slots=True)
class DecodeScheduler:
    """The blocks of one operation: those that decode now, and those that wait.

    A block joins as soon as it can be expected to fit, with the paths of all that run, until the
    others have ended; where blocks grow longer than expected, the last one has to wait again
    (`preempt`).

    Attributes:
        slots: the budget in tokens.
        longest: tokens of a block at most.
        waiting: in depth-first order of the tree, so that blocks which share a path run together;
            preempted ones first.
        rows: those that decode.
    """

    slots: int
    longest: int
    waiting: deque[Row]
    rows: list[Row] = field(default_factory=list)
    _users: dict[int, int] = field(default_factory=dict)  # rows by block they grow from or above it
    _paths: int = 0  # tokens of these blocks

    def __bool__(self) -> bool:
        return bool(self.rows or self.waiting)

    @property
    def nodes(self) -> list[Node]:
        """The blocks that decode: ends of the running paths."""
        return [row.node for row in self.rows]

    def admit(self, expected: int) -> list[Row]:
        """The rows that join now; one in any case if none runs.

        Args:
            expected: tokens a block is expected to have.
        """
        joined: list[Row] = []
        while self.waiting and (not self.rows or self._fits(self.waiting[0], expected)):
            row = self.waiting.popleft()
            self._take(row)
            joined.append(row)
        return joined

    def finish(self, done: Iterable[Row]) -> None:
        """Remove rows that have ended."""
        gone = {row.node.id for row in done}
        for row in self.rows:
            if row.node.id in gone:
                self._release(row)
        self.rows = [row for row in self.rows if row.node.id not in gone]

    def preempt(self) -> Row:
        """The row that joined last waits again, first in the queue."""
        row = self.rows.pop()
        self._release(row)
        self.waiting.appendleft(row)
        return row

    def upcoming(self) -> list[list[Node]]:
        """Blocks at whose end the waiting rows begin, as many at a time as run now."""
        width = max(1, len(self.rows))
        leaves = [row.leaf for row in self.waiting]
        return [list(dict.fromkeys(leaves[at : at + width])) for at in range(0, len(leaves), width)]

    def _fits(self, row: Row, expected: int) -> bool:
        new = sum(len(node.tokens) for node in row.leaf.path if node.id not in self._users)
        return self._paths + new + most_held((*self.rows, row), expected) <= self.slots

    def _take(self, row: Row) -> None:
        self.rows.append(row)
        for node in row.leaf.path:
            if node.id not in self._users:
                self._paths += len(node.tokens)
            self._users[node.id] = self._users.get(node.id, 0) + 1

    def _release(self, row: Row) -> None:
        for node in row.leaf.path:
            self._users[node.id] -= 1
            if not self._users[node.id]:
                del self._users[node.id]
                self._paths -= len(node.tokens)


class WaveScheduler(DecodeScheduler):
    """Blocks join in waves, each of which takes at most half of the budget at its longest."""

    def admit(self, expected: int) -> list[Row]:
        """The next wave, once the last one has ended."""
        return [] if self.rows else super().admit(expected)

    def _fits(self, row: Row, expected: int) -> bool:
        return 2 * self.longest * (len(self.rows) + 1) <= self.slots


def most_held(rows: Iterable[Row], expected: int) -> int:
    """Tokens that the blocks hold together at most while all of them grow, a token a step, and
    leave as they end.

    Each is assumed to end at its expected length, or `MARGIN` tokens from now if it has almost
    reached it.
    """
    length = np.array([len(row.node.tokens) for row in rows], np.int64)
    if not len(length):
        return 0
    steps = np.maximum(expected - length, MARGIN)
    order = np.lexsort((length, steps))[::-1]
    # when a block ends, those before it in this order still run
    running = np.arange(1, len(length) + 1)
    return int((np.cumsum(length[order]) + running * steps[order]).max())
