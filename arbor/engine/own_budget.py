"""OwnBudget: what one search may hold of a pool that several searches use."""

from __future__ import annotations

from typing import Protocol

from arbor.memory import KVMemory
from arbor.tree import ThoughtTree


class Account(Protocol):
    """A budget: that of all searches of an engine (`KVMemory`), or that of one of them.

    Attributes:
        slots: the budget, in tokens.
        used: slots in use, temporary ones included.
        free: slots that are left.
        available: slots that are free, or are once no prompt of a dropped tree is kept.
    """

    @property
    def slots(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def free(self) -> int: ...

    @property
    def available(self) -> int: ...


class OwnBudget:
    """The budget of one search, whatever the others hold.

    Its slots are used by no other search, and the pool has as many as all budgets together, so that
    they are there whenever the search needs them.

    Args:
        memory: the pool.
        tree: of the search.
        slots: tokens.
    """

    def __init__(self, memory: KVMemory, tree: ThoughtTree, slots: int) -> None:
        self._memory = memory
        self._tree = tree
        self._slots = slots

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def used(self) -> int:
        return self._memory.used_by(self._tree)

    @property
    def free(self) -> int:
        return self._slots - self.used

    @property
    def available(self) -> int:
        return self.free
