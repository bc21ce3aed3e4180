"""Operations: what searches ask of the engine, in progress or done, and their work."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.grammar import Grammar
from arbor.engine.hooks import BranchHook, Watch, Way
from arbor.engine.open_tree import OpenTree
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.stop_rule import StopReason, StopRule
from arbor.model.sampling_params import Sampling
from arbor.model.sharing import Context
from arbor.tree import NO_SLOT, Certainty, Node

_serials = itertools.count()

NO_LOGITS = torch.empty(0, 0, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Growth:
    """How blocks are decoded: the random seed, how tokens are chosen, where a block ends, what it
    has to match (None: anything), what compares blocks of one leaf (None: nothing), and how many
    of the most probable tokens are reported next to each chosen one."""

    seed: int
    sampling: Sampling
    stop: StopRule
    grammar: Grammar | None = None
    branch_hook: BranchHook | None = None
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class GivenBlock:
    """A block to grow whose first tokens are given rather than sampled.

    Attributes:
        leaf: the block it grows from.
        tokens: those that are given, at least one.
        growth: how it goes on.
        whole: it ends with the last of them, and nothing is sampled.
        of: the earlier child of the leaf whose first tokens they are; None: of no other.
    """

    leaf: Node
    tokens: Sequence[int]
    growth: Growth
    whole: bool = False
    of: Node | None = None

    @property
    def least(self) -> int:
        """Tokens that it has at least."""
        return len(self.tokens) + (not self.whole)


@dataclass(slots=True, eq=False)
class Row:
    """One block while it decodes.

    Attributes:
        operation: whose.
        place: its place in the operation's order.
        growth: how it is decoded.
        node, leaf: the block, and the one it grows from.
        code: where its next token comes from.
        longest: tokens that the block may have.
        pending: the token it goes on with when it (re)joins; None: it is still to be sampled.
        started: its last token is the next to be computed; False until its path is complete.
        joined: when it joined the batch; later rows have higher numbers.
        first_slot: where the K/V of its first token would best lie; a hint.
        tail_from: the tokens of the block from this offset on are all there; those before it that
            are on the device belong to the context.
        context: resident tokens of the path before `tail_from`.
        context_length: how many these are.
        certainty: of what is computed after the path and the block's own tokens so far.
        stop: why it ends with its last token; None while it goes on.
        siblings: the rows that it is compared with; None: it ends by itself.
        logprob, top1: the log probability of its last token, and the highest probability there was;
            0 if the token was given.
        drawn: the log probability of its last token in what it was drawn from, after temperature
            and cut-offs; 0 if it was given.
        alternatives: the most probable tokens in place of it, where they are wanted, with their log
            probabilities.
    """

    operation: Operation
    place: int
    growth: Growth
    node: Node
    leaf: Node
    code: ArithmeticCode
    pending: int | None = None
    started: bool = False
    joined: int = 0
    first_slot: int = NO_SLOT
    tail_from: int = 0
    context: Context = ()
    context_length: int = 0
    certainty: Certainty = Certainty.EXACT
    stop: StopReason | None = None
    siblings: Siblings | None = None
    logprob: float = 0.0
    top1: float = 0.0
    drawn: float = 0.0
    alternatives: tuple[tuple[int, float], ...] = ()
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = self.growth.stop.longest(self.leaf.reasoned)

    @property
    def begin(self) -> Node:
        """The block that has to be complete before it (re)joins."""
        return self.node if self.node.tokens else self.leaf


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """Rows of one leaf and one operation that a hook compares while they decode.

    Attributes:
        rows: in the order in which the hook knows them.
        watch: looks at them.
    """

    rows: tuple[Row, ...]
    watch: Watch

    @property
    def ahead(self) -> list[Row]:
        """The rows that have to wait for others before their next token."""
        return [self.rows[place] for place in self.watch.ahead()]


@dataclass(slots=True, eq=False)
class Question:
    """Tokens after a path, whose next-token logits are wanted; the tree does not change.

    Attributes:
        operation: whose.
        place: its place in the operation's order.
        node: the path's last block.
        tokens: at least one.
        slots: where their K/V lie during the forward.
        way: through the layers, if it may leave before the last one.
    """

    operation: Operation
    place: int
    node: Node
    tokens: Sequence[int]
    slots: NDArray[np.int32] | None = None
    way: Way | None = None

    @property
    def leaf(self) -> Node:
        return self.node


@dataclass(slots=True, eq=False)
class Visit:
    """A path to make complete: the prefill of a prompt, or a rehydration.

    Attributes:
        operation: whose.
        place: its place in the operation's order.
        node: the path's last block.
        most: tokens of it that one forward computes; None: all. The work that needs the path waits
            while it is computed in parts.
    """

    operation: Operation
    place: int
    node: Node
    most: int | None = None

    @property
    def leaf(self) -> Node:
        return self.node


Work = Row | Question | Visit


class Operation:
    """One request of a search, worked on by `Engine.step` until it is done.

    Args:
        ahead_of: an older one that it is ahead of in the order; None: it comes last.

    Attributes:
        order: its place among the operations of an engine: by the rank of its tree, then the older
            ones first.
        waiting: work that has not joined a forward yet.
        left: pieces of work that are not finished.
        error: what ended it before it was finished.
        counts: whether a search's clock counts it; not an audit, which changes nothing.
    """

    def __init__(self, opened: OpenTree, ahead_of: Operation | None = None) -> None:
        self.opened = opened
        serial = next(_serials) if ahead_of is None else ahead_of.order[1] - 0.5
        self.order: tuple[int, float] = (opened.rank, serial)
        self.waiting: deque[Work] = deque()
        self.left = 0
        self.error: BaseException | None = None
        self.counts = True

    @property
    def done(self) -> bool:
        """Whether it is over, with an error or without."""
        return self.error is not None or not self.left

    def check(self) -> None:
        """Raise what ended it.

        Raises:
            BaseException: the error.
        """
        assert self.done, "the operation is still in progress"
        if self.error is not None:
            raise self.error


class Extending(Operation):
    """Makes a path complete."""

    def result(self) -> None:
        """Nothing; raises what ended the operation."""
        self.check()


class Growing(Operation):
    """Decodes blocks up to their boundaries.

    Args:
        children: open blocks, in the order asked for.

    Attributes:
        held: rows that wait for their siblings, to be compared with them; see `Siblings`.
        divided: some of its blocks have waited while others decoded.
    """

    def __init__(self, opened: OpenTree, children: Sequence[Node]) -> None:
        super().__init__(opened)
        self.children = list(children)
        self.held: list[Row] = []
        self.divided = False

    def result(self) -> list[Node]:
        """The blocks: closed ones, and those that an interruption gave up; raises what ended the
        operation."""
        self.check()
        return self.children


class Reading(Operation):
    """Makes paths complete and reads the model's next-token logits after them.

    Attributes:
        answers: of each path, [V] float32, once it has run.
    """

    def __init__(self, opened: OpenTree, count: int, ahead_of: Operation | None = None) -> None:
        super().__init__(opened, ahead_of)
        self.answers: list[Tensor] = [torch.empty(0, dtype=torch.float32)] * count

    def result(self) -> Tensor:
        """The logits, [n, V] float32; raises what ended the operation."""
        self.check()
        return torch.stack(self.answers) if self.answers else NO_LOGITS


class Asking(Reading):
    """Reads the model's next-token logits after paths and questions; the tree does not change.

    Attributes:
        is_early: it counts to the operation after the one in progress, see `FutureReads`.
    """

    waiting: deque[Question]  # type: ignore[assignment]

    def __init__(self, opened: OpenTree, count: int, ahead_of: Operation | None = None) -> None:
        super().__init__(opened, count, ahead_of)
        self.is_early = ahead_of is not None

    def answer(self, question: Question, logits: Tensor) -> None:
        """Take the logits [V] after a question."""
        if question.way is not None:
            logits = question.way.answer(logits)
        # what is kept for longer does not keep the logits of all other rows
        self.answers[question.place] = logits.clone() if self.is_early else logits

    @property
    def extra(self) -> list[int]:
        """Tokens of each question that waits."""
        return [len(question.tokens) for question in self.waiting]
