"""Operations: what searches ask of the engine, in progress or done."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arbor.engine.early_exit import Answers, Exiting
from arbor.engine.open_tree import OpenTree
from arbor.engine.scheduler import Question, Row, Work
from arbor.engine.token_source import Growth
from arbor.tree import Node

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class GivenBlock:
    """A block to grow whose first tokens are given rather than sampled.

    Attributes:
        leaf: the block it grows from.
        tokens: those that are given, at least one.
        growth: how it goes on.
        whole: it ends with the last of them, and nothing is sampled.
    """

    leaf: Node
    tokens: Sequence[int]
    growth: Growth
    whole: bool = False

    @property
    def least(self) -> int:
        """Tokens that it has at least."""
        return len(self.tokens) + (not self.whole)


class Operation:
    """One request of a search, worked on by `Engine.step` until it is done.

    Args:
        opened: the tree it concerns.
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
        """Nothing.

        Raises:
            Exception: what ended the operation.
        """
        self.check()


class Growing(Operation):
    """Decodes blocks up to their boundaries.

    Args:
        opened: the tree.
        children: open blocks, in the order asked for.

    Attributes:
        held: rows that wait for their siblings, to be compared with them; see `BranchStop`.
        divided: some of its blocks have waited while others decoded.
    """

    def __init__(self, opened: OpenTree, children: Sequence[Node]) -> None:
        super().__init__(opened)
        self.children = list(children)
        self.held: list[Row] = []
        self.divided = False

    def result(self) -> list[Node]:
        """The blocks: closed ones, and those that an interruption gave up.

        Raises:
            Exception: what ended the operation.
        """
        self.check()
        return self.children


class Reading(Operation):
    """Makes paths complete and reads the model's next-token logits after them.

    Args:
        opened: the tree.
        count: number of paths.
        ahead_of: see `Operation`.

    Attributes:
        answers: of each path, [V] float32, once it has run.
    """

    def __init__(self, opened: OpenTree, count: int, ahead_of: Operation | None = None) -> None:
        super().__init__(opened, ahead_of)
        self.answers: list[Tensor] = [torch.empty(0)] * count

    def result(self) -> Tensor:
        """The logits, [n, V] float32.

        Raises:
            Exception: what ended the operation.
        """
        self.check()
        return torch.stack(self.answers) if self.answers else torch.empty(0, 0)


class Asking(Reading):
    """Reads the model's next-token logits after paths and questions; the tree does not change.

    Args:
        opened: the tree.
        count: number of questions.
        ahead_of: see `Operation`.

    Attributes:
        is_early: it counts to the operation after the one in progress, see `FutureReads`.
        exits: each question's way through the layers, where they may leave early; else empty.
        full: of each question, [V] float32 after the last layer, where exits are audited.
    """

    waiting: deque[Question]  # type: ignore[assignment]

    def __init__(self, opened: OpenTree, count: int, ahead_of: Operation | None = None) -> None:
        super().__init__(opened, count, ahead_of)
        self.is_early = ahead_of is not None
        self.exits: list[Exiting] = []
        self.full: dict[int, Tensor] = {}

    def settle(self, question: Question, logits: Tensor) -> None:
        """Take the logits [V] after a question."""
        exiting = question.exiting
        if exiting is not None and exiting.audit:
            self.full[question.place] = logits
            logits = logits if exiting.early is None else exiting.early
        # what is kept for longer does not keep the logits of all other rows
        self.answers[question.place] = logits.clone() if self.is_early else logits

    @property
    def extra(self) -> list[int]:
        """Tokens of each question that waits."""
        return [len(question.tokens) for question in self.waiting]

    def early(self) -> Answers:
        """The answers to questions that may leave early.

        Raises:
            Exception: what ended the operation.
        """
        full = [self.full[place] for place in sorted(self.full)]
        layers = tuple(each.layers for each in self.exits)
        return Answers(self.result(), layers, torch.stack(full) if full else None)
