"""Game of 24: make 24 from four numbers; text form ``4 5 6 10``.

The classic puzzles are the 1,362 multisets of four numbers from 1 to 13 that can make 24. All of
them are held out: ``hard`` holds the hundred with the fewest distinct solutions, where solutions
are distinct if their lines are (`arbor.tasks.countdown.solution_paths`; ties by content id),
``validation`` and ``test`` share the rest by content id. ``train`` has solvable multisets of four
numbers from 1 to 25 with at least one above 13.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from arbor.tasks import countdown_words
from arbor.tasks.base import BlockLimits, Problem
from arbor.tasks.countdown import Countdown, can_reach
from arbor.tasks.game24_hands import HARDEST, UNSOLVABLE, hands
from arbor.tasks.splits import content_id

TARGET = 24
LARGEST_CARD = 13
LARGEST_TRAINED = 25
VALIDATION = 262


@lru_cache(maxsize=1)
def classic() -> tuple[tuple[int, ...], ...]:
    """The 1,362 solvable multisets of four numbers 1..13, sorted."""
    cards = range(1, LARGEST_CARD + 1)
    unsolvable = set(hands(UNSOLVABLE))
    every_hand = itertools.combinations_with_replacement(cards, 4)
    return tuple(hand for hand in every_hand if hand not in unsolvable)


@lru_cache(maxsize=1)
def _held_out() -> dict[str, tuple[tuple[int, ...], ...]]:
    def by_content(hand: tuple[int, ...]) -> str:
        return content_id("game24", " ".join(map(str, hand)))

    hardest = hands(HARDEST)
    rest = sorted(set(classic()) - set(hardest), key=by_content)
    return {
        "hard": hardest,
        "validation": tuple(rest[:VALIDATION]),
        "test": tuple(rest[VALIDATION:]),
    }


@dataclass(frozen=True)
class Game24(Countdown):
    """Make 24 from four numbers, each used once, with + - * / and parentheses."""

    fewest: int = 4
    most: int = 4

    example = "4 5 6 10"
    splits = (*Countdown.splits, "hard")
    solved = tuple((numbers, 24) for numbers in countdown_words.EXAMPLES)

    @property
    def name(self) -> str:
        return "game24"

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(stop=("\n",), max_tokens=32, max_depth=3)

    def make(self, numbers: Sequence[int], target: int = TARGET) -> Problem:
        canonical = " ".join(map(str, sorted(numbers)))
        text = " ".join(map(str, numbers))
        data = {"numbers": list(numbers), "target": target}
        return Problem(content_id("game24", canonical), self.name, text, str(target), data)

    def parse(self, text: str) -> Problem:
        self._demand_text(text)
        numbers = self._numbers(text, text.replace(",", " ").split())
        if len(numbers) != 4:
            raise self._invalid(text, f"has {len(numbers)} numbers; four are needed")
        return self.make(numbers)

    def _generate(self, split: str) -> Iterator[Problem]:
        """In the order of content ids (``hard``: hardest first)."""
        hands = self._train() if split == "train" else iter(_held_out()[split])
        return map(self.make, hands)

    def _train(self) -> Iterator[tuple[int, ...]]:
        numbers = range(1, LARGEST_TRAINED + 1)
        hands = [
            hand
            for hand in itertools.combinations_with_replacement(numbers, 4)
            if hand[-1] > LARGEST_CARD
        ]
        hands.sort(key=lambda hand: content_id("game24", " ".join(map(str, hand))))
        return (hand for hand in hands if can_reach(hand, TARGET))
