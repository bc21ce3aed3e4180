"""Branches: the rows that grow from one leaf in one operation, compared while they decode."""

from __future__ import annotations

from collections.abc import Sequence

from arbor.engine.branch_stop import BranchStop
from arbor.engine.confidence_gap import DECIMALS
from arbor.engine.operation import Growing
from arbor.engine.scheduler import Row
from arbor.events import BranchesStopped
from arbor.tree import Node, NodeState


class Branches:
    """The rows of one leaf, which are compared at the same length whatever the budget.

    A row that is ahead of another one at a comparison is held until that one has caught up, so
    what is compared depends on the tokens alone.

    Args:
        rule: when branches end early.
        rows: at least two, of one operation and one leaf.
    """

    def __init__(self, rule: BranchStop, rows: Sequence[Row]) -> None:
        self._rule = rule
        self._rows = tuple(rows)
        self._compared = rule.least - 1  # tokens at the last comparison

    @property
    def operation(self) -> Growing:
        """The operation of the rows."""
        operation = self._rows[0].operation
        assert isinstance(operation, Growing)
        return operation

    @property
    def leaf(self) -> Node:
        """The block that they grow from."""
        return self._rows[0].leaf

    def ahead(self) -> list[Row]:
        """The rows that have to wait for others before their next token."""
        open_ = self._open
        slowest = min(map(_length, open_), default=0)
        return [row for row in open_ if _length(row) > max(slowest, self._rule.least - 1)]

    def compare(self) -> BranchesStopped | None:
        """Compare the branches, if all that decode have a further token: ends those that the rule
        ends.

        Returns:
            what happened; None where no branch ends.
        """
        open_ = self._open
        lengths = {_length(row) for row in open_}
        if len(lengths) != 1 or min(lengths) <= self._compared:
            return None
        (self._compared,) = lengths
        texts = [_text(row) for row in self._rows]
        confidences = [_confidence(row) for row in self._rows]
        if not self._rule.is_decisive(texts, confidences):
            return None
        leader = texts[max(range(len(texts)), key=lambda place: confidences[place])]
        everyone = self._rule.ends == "all"
        ending = [row for row in open_ if everyone or _text(row) != leader]
        if not ending:
            return None
        for row in ending:
            row.stop = "gate"
            if row.growth.grammar is not None:
                row.growth.grammar.forget(row.node)
        return BranchesStopped(
            leaf=self.leaf.id,
            tokens=self._compared,
            branches=tuple(row.node.id for row in self._rows),
            confidences=tuple(confidences),
            stopped=tuple(row.node.id for row in ending),
        )

    @property
    def _open(self) -> list[Row]:
        """The rows that have not come to their end."""
        return [row for row in self._rows if row.stop is None]


def _text(row: Row) -> tuple[int, ...]:
    """The tokens of a row, one that waits to be computed included."""
    pending = () if row.pending is None else (row.pending,)
    return (*row.node.tokens, *pending)


def _length(row: Row) -> int:
    return len(row.node.tokens) + (row.pending is not None)


def _confidence(row: Row) -> float:
    """The mean top-1 probability of a row's tokens, to `DECIMALS` decimals."""
    node = row.node
    # a closed block has its mean; the last token of an open one is still to be computed
    mean = node.top1 if node.state is NodeState.CLOSED else (node.top1 + row.top1) / _length(row)
    return round(mean, DECIMALS)
