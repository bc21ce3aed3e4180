"""Operations: what searches ask of the engine, in progress or done."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from arbor.engine.open_tree import OpenTree
from arbor.engine.scheduler import Question, Work
from arbor.tree import Node

_serials = itertools.count()


class Operation:
    """One request of a search, worked on by `Engine.step` until it is done.

    Args:
        opened: the tree it concerns.

    Attributes:
        order: its place among the operations of an engine: those of the tree that was opened first
            come first, and of one tree the older ones.
        waiting: work that has not joined a forward yet.
        left: pieces of work that are not finished.
        error: what ended it before it was finished.
    """

    def __init__(self, opened: OpenTree) -> None:
        self.opened = opened
        self.order = (opened.turn, next(_serials))
        self.waiting: deque[Work] = deque()
        self.left = 0
        self.error: BaseException | None = None

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
    """

    def __init__(self, opened: OpenTree, children: Sequence[Node]) -> None:
        super().__init__(opened)
        self.children = list(children)

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
    """

    def __init__(self, opened: OpenTree, count: int) -> None:
        super().__init__(opened)
        self.answers: list[Tensor] = [torch.empty(0)] * count

    def result(self) -> Tensor:
        """The logits, [n, V] float32.

        Raises:
            Exception: what ended the operation.
        """
        self.check()
        return torch.stack(self.answers) if self.answers else torch.empty(0, 0)


class Asking(Reading):
    """Reads the model's next-token logits after paths and questions; the tree does not change."""

    waiting: deque[Question]  # type: ignore[assignment]

    @property
    def extra(self) -> list[int]:
        """Tokens of each question that waits."""
        return [len(question.tokens) for question in self.waiting]
