"""Account: what searches may hold on the device, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from arbor.engine.retained import Retained
from arbor.memory import KVMemory
from arbor.tree import ThoughtTree

UNLIMITED = 1 << 40  # tokens: more than any device holds


class PartOfRetained:
    """A part of what full retention of the searches has held so far, or will hold when the wave in
    progress ends; or, where that is more, the least that lets a search go on.

    Both are known from the trees: no earlier run and no worst case is in them. Called, it gives the
    tokens that may be held now.

    Args:
        part: in (0, 1]; 1: full retention at its worst, so that nothing but the prompts of finished
            searches ever leaves.
        retained: what full retention of each search holds.
        worst: slots of full retention of all searches at their worst; None: not known.
        least: the least that lets the searches go on, in tokens: one expansion in lossless mode,
            what the policy protects in lossy mode.
    """

    def __init__(
        self,
        part: Fraction,
        retained: Callable[[], Iterable[Retained]],
        worst: Callable[[], int | None],
        least: Callable[[], int],
    ) -> None:
        self.part = part
        self._retained = retained
        self._worst = worst
        self.least = least
        self._most = self._most_least = 0  # since the last report

    def __call__(self) -> int:
        if self.part == 1:
            worst = self._worst()
            return UNLIMITED if worst is None else worst
        kept, least = self.kept, self.least()
        if least > kept:
            self._most_least = max(self._most_least, least)
        self._most = max(self._most, kept, least)
        return max(kept, least)

    def report(self) -> tuple[int, int]:
        """The most that could be held at any instant since the last report, and the most that the
        least was where it was more than the part; 0: it never was."""
        self()
        found = self._most, self._most_least
        self._most = self._most_least = 0
        self()
        return found

    @property
    def kept(self) -> int:
        """The part of full retention, rounded down."""
        every = list(self._retained())
        ended = sum(each.lengths.count for each in every)
        mean = sum(each.lengths.total for each in every) / ended if ended else 0.0
        return math.floor(self.part * sum(each.expected(mean) for each in every))


class Account:
    """A budget, and what is used of it: that of all searches of an engine, or that of one of them.

    The slots of one search's own budget are used by no other search.

    Args:
        memory: the pool.
        limit: the tokens that may be held: always so many, or a part that moves as the search goes
            on.
        tree: the only one that it is for; None: all of the pool.
    """

    def __init__(
        self, memory: KVMemory, limit: int | PartOfRetained, tree: ThoughtTree | None = None
    ) -> None:
        self._memory = memory
        self._limit = limit
        self._tree = tree

    @property
    def slots(self) -> int:
        """The budget now, in tokens."""
        return self._limit if isinstance(self._limit, int) else self._limit()

    @property
    def part(self) -> PartOfRetained | None:
        """The limit, where it moves."""
        return None if isinstance(self._limit, int) else self._limit

    @property
    def used(self) -> int:
        """Slots in use, temporary ones included."""
        return self._memory.used if self._tree is None else self._memory.used_by(self._tree)

    @property
    def free(self) -> int:
        """Slots that are left; below 0 where the budget has just become smaller."""
        return self.slots - self.used

    @property
    def available(self) -> int:
        """Slots that are free, or are once no prompt of a dropped tree is kept."""
        return self.free + (self._memory.kept_slots if self._tree is None else 0)
