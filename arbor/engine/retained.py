"""Retained: what full retention of one search holds, counted while a smaller budget is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from arbor.forest import Forest, Overlap
from arbor.tree import Node, NodeState


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
        forest: of the tree.
        lengths: of the finished blocks.
        shares: whether siblings share what they begin alike with.

    Attributes:
        peak: the most so far.
        lengths: of the finished blocks.
    """

    def __init__(self, forest: Forest, lengths: Lengths, *, shares: bool) -> None:
        self.peak = 0
        self.lengths = lengths
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
