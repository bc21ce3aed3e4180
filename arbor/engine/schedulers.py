"""Schedulers: one for each budget of an engine."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from arbor.engine.open_tree import OpenTree
from arbor.engine.operation import Operation, Row, Work
from arbor.engine.scheduler import Scheduler
from arbor.tree import ThoughtTree


class Schedulers:
    """The schedulers of the operations in progress: one for all of them where searches share a
    budget, else one for each search, as if it were alone. All of them take part in every forward.

    Args:
        make: a scheduler for the budget of a tree.
        own_budgets: each search has its own; else that of the first serves all.
    """

    def __init__(self, make: Callable[[OpenTree], Scheduler], *, own_budgets: bool) -> None:
        self._make = make
        self._own_budgets = own_budgets
        self._of: dict[ThoughtTree | None, Scheduler] = {}  # of which operations are in progress
        self._turns: list[tuple[int, ThoughtTree | None]] = []

    @property
    def groups(self) -> list[Scheduler]:
        """The schedulers, those of trees opened earlier first."""
        return [self._of[tree] for _, tree in self._turns]

    @property
    def operations(self) -> list[Operation]:
        """All in progress, in their order."""
        return [operation for group in self.groups for operation in group.operations]

    @property
    def rows(self) -> list[Row]:
        """All blocks that decode, operation by operation."""
        return [row for group in self.groups for row in group.rows]

    def of(self, operation: Operation) -> Scheduler:
        """The scheduler of an operation in progress."""
        return self._of[self._key(operation)]

    def within(self, tree: ThoughtTree) -> Scheduler | None:
        """The scheduler of the budget that a tree keeps within; None: it has had no operation."""
        return self._of.get(tree if self._own_budgets else None)

    def forget(self, tree: ThoughtTree, others: Sequence[ThoughtTree]) -> None:
        """See `Scheduler.forget`."""
        group = self.within(tree)
        if group is not None:
            group.forget(tree, others)

    def take(self, operation: Operation) -> None:
        """Take an operation."""
        key = self._key(operation)
        if key not in self._of:
            self._of[key] = self._make(operation.opened)
            insort(self._turns, (operation.opened.turn, key), key=lambda each: each[0])
        self._of[key].take(operation)

    def drop(self, operation: Operation) -> None:
        """Let an operation go, none of whose work runs."""
        key = self._key(operation)
        self._of[key].operations.remove(operation)
        if self._own_budgets and not self._of[key]:
            del self._of[key]
            self._turns = [each for each in self._turns if each[1] is not key]

    def leave(self, work: Iterable[Work]) -> None:
        """Remove work that is done."""
        for group, mine in self._by_group(work):
            group.leave(mine)

    def wait_again(self, work: Iterable[Work]) -> None:
        """Put work back, first in the queue of its operation."""
        for group, mine in self._by_group(work):
            group.wait_again(mine)

    def resume(self, work: Iterable[Work]) -> None:
        """Let work that has left wait, first in the queue of its operation."""
        for group, mine in self._by_group(work):
            group.resume(mine)

    def _key(self, operation: Operation) -> ThoughtTree | None:
        return operation.opened.tree if self._own_budgets else None

    def _by_group(self, work: Iterable[Work]) -> list[tuple[Scheduler, list[Work]]]:
        found: dict[ThoughtTree | None, list[Work]] = {}
        for each in work:
            found.setdefault(self._key(each.operation), []).append(each)
        return [(self._of[key], mine) for key, mine in found.items()]
