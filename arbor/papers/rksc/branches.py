"""Branches: the blocks that grow from one leaf in one operation, compared while they decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arbor.engine.hooks import Branch, Stopped
from arbor.events import BranchesStopped
from arbor.papers.rksc.confidence_gap import DECIMALS
from arbor.tree import NodeState

Text = tuple[int, ...]


class Branches:
    """The blocks of one leaf, which are compared at the same length whatever the budget.

    One that is ahead of another at a comparison is held until that one has caught up, so what is
    compared depends on the tokens alone.

    Args:
        is_decisive: whether one of these texts, by their confidences, ends others.
        branches: at least two, of one operation and one leaf.
        least: tokens of a branch before it may be stopped.
        spares: branches of the most confident text go on.
    """

    def __init__(
        self,
        is_decisive: Callable[[list[Text], list[float]], bool],
        branches: Sequence[Branch],
        *,
        least: int,
        spares: bool,
    ) -> None:
        self._is_decisive = is_decisive
        self._branches = tuple(branches)
        self._least = least
        self._spares = spares
        self._compared = least - 1  # tokens at the last comparison

    def ahead(self) -> list[int]:
        """Places of the branches that have to wait for others before their next token."""
        open_ = self._open
        length = {place: _length(self._branches[place]) for place in open_}
        slowest = min(length.values(), default=0)
        return [place for place in open_ if length[place] > max(slowest, self._least - 1)]

    def chosen(self) -> Stopped | None:
        """Compare the branches, if all that decode have a further token.

        Returns:
            those that end, and what happened; None where no branch ends.
        """
        open_ = self._open
        lengths = {_length(self._branches[place]) for place in open_}
        if len(lengths) != 1 or min(lengths) <= self._compared:
            return None
        (self._compared,) = lengths
        texts = [_text(branch) for branch in self._branches]
        confidences = [_confidence(branch) for branch in self._branches]
        if not self._is_decisive(texts, confidences):
            return None
        leader = texts[max(range(len(texts)), key=lambda place: confidences[place])]
        ending = [place for place in open_ if not (self._spares and texts[place] == leader)]
        if not ending:
            return None
        stopped = BranchesStopped(
            leaf=self._branches[0].leaf.id,
            tokens=self._compared,
            branches=tuple(branch.node.id for branch in self._branches),
            confidences=tuple(confidences),
            stopped=tuple(self._branches[place].node.id for place in ending),
        )
        return Stopped(tuple(ending), stopped)

    @property
    def _open(self) -> list[int]:
        """Places of the branches that have not come to their end."""
        return [place for place, branch in enumerate(self._branches) if branch.stop is None]


def _text(branch: Branch) -> Text:
    """The tokens of a branch, one that waits to be computed included."""
    pending = () if branch.pending is None else (branch.pending,)
    return (*branch.node.tokens, *pending)


def _length(branch: Branch) -> int:
    return len(branch.node.tokens) + (branch.pending is not None)


def _confidence(branch: Branch) -> float:
    """The mean top-1 probability of a branch's tokens, to `DECIMALS` decimals."""
    node = branch.node
    # a closed block has its mean; the last token of an open one is still to be computed
    if node.state is NodeState.CLOSED:
        return round(node.top1, DECIMALS)
    return round((node.top1 + branch.top1) / _length(branch), DECIMALS)
