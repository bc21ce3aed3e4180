"""Retained: what full retention of one search holds; Account: what a ratio of it allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from arbor.forest import Forest, Overlap
from arbor.memory import KVMemory
from arbor.tree import Node, NodeState, ThoughtTree


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

    @property
    def mean(self) -> float:
        """Tokens of a block; 0 before any has ended."""
        return self.total / self.count if self.count else 0.0

    def expected(self, longest: int) -> int:
        """Expected length of one more block: mean plus standard deviation; half of the longest
        before any."""
        if not self.count:
            return math.ceil(longest / 2)
        mean = self.total / self.count
        spread = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        return min(longest, math.ceil(mean + spread))


class Retained:
    """The tokens that full retention of one search holds: those of all blocks that are not given
    up, each token once that siblings share. Questions are not counted.

    At full retention the blocks of a wave grow together, a token at each step, and siblings share
    from the step at which they have ended. A lossless search grows the same tree at any budget, so
    that is known once a wave has ended, in whatever order its blocks have run.

    Args:
        shares: whether siblings share what they begin alike with.
        most: tokens that it comes to at most; None: unknown.
        least: tokens that a part of it leaves the search in any case.

    Attributes:
        peak: the most so far.
        lengths: of the finished blocks.
    """

    def __init__(
        self,
        forest: Forest,
        lengths: Lengths,
        *,
        shares: bool,
        most: int | None = None,
        least: int = 0,
    ) -> None:
        self.peak = 0
        self.lengths = lengths
        self.most = most
        self.least = least
        self._overlap = Overlap(forest) if shares else None
        self._whole: dict[int, int] = {}  # tokens of each finished block, by row
        self._held = 0  # the sum of these
        self._open: dict[int, Node] = {}  # blocks in progress, by row
        self._waves: list[list[Node]] = []  # those of each operation that has not ended
        self._forest = forest

    @property
    def now(self) -> int:
        """Tokens that it holds now."""
        return self._finished + sum(len(node.tokens) for node in self._open.values())

    def expected(self, unknown: float = 0.0) -> int:
        """The most that it has held so far, or will hold when the blocks in progress have ended:
        each is taken to have the tokens it has, or the mean of those that have ended where that is
        more.

        Args:
            unknown: the mean before any of this search has ended.
        """
        mean = self.lengths.mean if self.lengths.count else unknown
        grown = sum(max(len(node.tokens), mean) for node in self._open.values())
        return max(self.peak, self._finished + int(grown))

    @property
    def _finished(self) -> int:
        return self._held - (0 if self._overlap is None else self._overlap.total)

    def begin(self, nodes: Iterable[Node]) -> None:
        """These blocks are to grow."""
        wave = list(nodes)
        self._open.update((node.row, node) for node in wave)
        self._waves.append(wave)
        self._note()

    def take(self, nodes: Iterable[Node]) -> None:
        """These blocks were computed: prompts and blocks that did not grow count from now on."""
        for node in nodes:
            if node.row not in self._open:
                self._add(node)
        self._note()

    def finish(self, nodes: Iterable[Node]) -> None:
        """These blocks have grown; until now they have shared nothing."""
        self._note()
        for node in nodes:
            self._open.pop(node.row, None)
            self._add(node)
        for wave in [each for each in self._waves if self._has_ended(each)]:
            self._waves.remove(wave)
            self.peak = max(self.peak, self._finished + self._more_while_growing(wave))

    def _has_ended(self, wave: list[Node]) -> bool:
        return not any(node.row in self._open for node in wave)

    def _more_while_growing(self, nodes: list[Node]) -> int:
        """How many more tokens the blocks of a wave hold at most, while they grow together, than
        once all have ended."""
        wave = [node for node in nodes if node.row in self._whole]
        wave.sort(key=lambda node: len(node.tokens))
        shared = None if self._overlap is None else Overlap(self._forest)
        most = ended = 0
        for place, node in enumerate(wave):
            growing = len(wave) - place
            held = ended - (0 if shared is None else shared.total)
            most = max(most, held + growing * len(node.tokens))
            ended += len(node.tokens)
            if shared is not None:
                shared.add(node)
        return most - ended + (0 if shared is None else shared.total)

    def _add(self, node: Node) -> None:
        if node.row in self._whole or node.state in (NodeState.OPEN, NodeState.PRUNED):
            return
        self._whole[node.row] = len(node.tokens)
        self._held += len(node.tokens)
        if self._overlap is not None and node.parent is not None:
            self._overlap.add(node)

    def give_up(self, nodes: Iterable[Node]) -> None:
        """Full retention holds nothing of these blocks any more."""
        for node in nodes:
            self._open.pop(node.row, None)
            length = self._whole.pop(node.row, None)
            if length is not None:
                self._held -= length
                if self._overlap is not None:
                    self._overlap.remove(node)
        self._waves = [wave for wave in self._waves if not self._has_ended(wave)]

    def _note(self) -> None:
        self.peak = max(self.peak, self.now)


UNLIMITED = 1 << 40  # tokens: more than any device holds


class PartOfRetained:
    """A part of what full retention of the searches has held so far, or will hold when the wave in
    progress ends; or, where that is more, the least that lets a search go on.

    Both are known from the trees: no earlier run and no worst case is in them. Called, it gives the
    tokens of blocks and questions that may be held now.

    Args:
        part: in (0, 1]; 1: full retention at its worst, so that nothing but the prompts of finished
            searches ever leaves.
        staging: tokens of a buffer that is in the budget too.

    Attributes:
        least: asked for the least that lets the searches go on, in tokens: what is left them in any
            case, until a scheduler of lossless mode says what one expansion takes.
    """

    def __init__(self, part: Fraction, staging: int = 0) -> None:
        self.part = part
        self._staging = staging
        self._searches: list[Retained] = []
        self.least: Callable[[], int] = lambda: sum(each.least for each in self._searches)
        self._most = self._most_least = 0  # since the last report
        self._whole = UNLIMITED  # slots of full retention at its worst

    def __call__(self) -> int:
        if self.part == 1:
            return self._whole
        every = self._searches
        ended = sum(each.lengths.count for each in every)
        mean = sum(each.lengths.total for each in every) / ended if ended else 0.0
        kept = math.floor(self.part * sum(each.expected(mean) for each in every))
        least = self.least()
        if least > kept:
            self._most_least = max(self._most_least, least)
        self._most = max(self._most, kept, least)
        return max(kept, least) - self._staging

    def take(self, search: Retained) -> None:
        """Count one more search."""
        self._searches.append(search)
        self._look()

    def drop(self, search: Retained) -> None:
        """Count a search no longer."""
        self._searches.remove(search)
        self._look()

    def _look(self) -> None:
        known = [each.most for each in self._searches if each.most is not None]
        self._whole = sum(known) if len(known) == len(self._searches) else UNLIMITED

    def report(self) -> tuple[int, int]:
        """The most that could be held at any instant since the last report, and the most that the
        least was where it was more than the part; 0: it never was."""
        self()
        found = self._most, self._most_least
        self._most = self._most_least = 0
        self()
        return found


class Account:
    """A budget, and what is used of it: that of all searches of an engine, or that of one of them.

    The slots of one search's own budget are used by no other search.

    Args:
        limit: the tokens that may be held: always so many, or a part that moves as the search goes
            on.
        tree: the only one that it is for; None: all of the pool.

    Attributes:
        part: the limit, where it moves.
    """

    def __init__(
        self, memory: KVMemory, limit: int | PartOfRetained, tree: ThoughtTree | None = None
    ) -> None:
        self._memory = memory
        self._limit = limit
        self.part = None if isinstance(limit, int) else limit
        self._tree = tree

    @property
    def slots(self) -> int:
        """The budget now, in tokens."""
        return self._limit if isinstance(self._limit, int) else self._limit()

    @property
    def used(self) -> int:
        """Slots in use, temporary ones included."""
        return self._memory.used if self._tree is None else self._memory.used_by(self._tree)

    @property
    def free(self) -> int:
        """Slots that are left; below 0 where the budget has just become smaller."""
        slots = self._limit if isinstance(self._limit, int) else self._limit()
        table, tree = self._memory.table, self._tree
        return slots - (table.used if tree is None else int(table.used_by[tree.number]))

    @property
    def available(self) -> int:
        """Slots that are free, or are once no prompt of a dropped tree is kept."""
        return self.free + (self._memory.kept_slots if self._tree is None else 0)
