"""Game of 24: make 24 from four numbers; text form ``4 5 6 10``.

The classic puzzles are the 1,362 multisets of four numbers from 1 to 13 that can make 24. All of
them are held out: ``hard`` holds the hundred with the fewest solutions, which are paths of
`arbor.tasks.countdown.exact_steps` (ties by content id), ``validation`` and ``test`` share the rest
by content id. ``train`` has solvable multisets of four numbers from 1 to 25 with at least one above
13.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from arbor.tasks.base import BlockLimits, Problem
from arbor.tasks.countdown import Countdown, can_reach
from arbor.tasks.splits import content_id

UNSOLVABLE = """
1111 1112 1113 1114 1115 1116 1117 1119 111a 1122 1123 1124 1125 1133 114b 114d 1159 115a 115b
115c 115d 1167 116a 116b 116d 1177 1178 1179 117b 117c 117d 1189 118a 118b 118c 118d 1199 119a
119b 119c 11aa 11ab 1222 1223 125b 127d 128b 128c 1299 129a 12aa 133d 1355 137b 13ad 13bd 144d
147a 148a 1499 14ad 14bb 14bc 14bd 14cd 14dd 1557 1558 1577 15bd 15cd 15dd 1667 1677 1678 167d
169b 16aa 16ab 16bb 16dd 1777 1778 177d 178d 17aa 17ab 17bb 17bc 17bd 188d 1899 189a 18aa 18bb
18cd 18dd 1999 199a 199b 199d 19aa 19ab 19cd 19dd 1aaa 1aab 1aad 1abb 1abd 1add 1bbb 1ddd 2222
2226 225d 2279 227b 228b 228d 2299 229d 22ac 2334 239b 23ab 247d 249b 24bd 24cd 2555 2556 257c
2599 259d 25bb 25bd 25dd 2677 269d 26bb 26dd 2777 2779 278a 2799 279c 27ad 27bb 27bd 27dd 28bd
2999 299a 29bc 29cc 2aaa 2acc 2add 333d 334a 3358 335b 337a 338b 33aa 33ab 33ac 33bb 33dd 3467
347d 3488 349a 34ab 34bb 34dd 3555 355a 355d 3577 358a 359b 35bd 367b 368b 36ad 377b 378a 37ac
37bd 388d 38ad 38bd 3aaa 3aab 3aad 3abb 3acc 3acd 3add 3bbb 3bbd 3bcd 3bdd 3ddd 444d 4459 4466
4467 447b 4499 449a 449d 44ab 44bb 44dd 455b 455c 455d 459b 466b 466d 467b 467d 468b 469b 46ad
46bd 4779 477a 477c 477d 47ad 48ad 4999 499b 499d 49aa 49bd 49cd 49dd 4aaa 4aad 4abb 4add 4bbb
4bbc 4bbd 4bcc 4bdd 4ccd 4cdd 4ddd 5557 5558 555a 555b 555d 5569 556a 556c 556d 5579 557c 557d
559c 559d 55ac 566b 566d 567a 567b 568b 5777 5778 577c 577d 578b 578c 578d 5799 57bc 57cd 588b
588c 5899 589a 58aa 58ad 58bb 58cd 58dd 5999 599a 599d 59ac 59bb 59bc 59dd 5aaa 5abc 5abd 5acc
5bbb 5bbc 5bbd 5bcd 5bdd 5ccc 5ccd 5cdd 5ddd 6667 666d 6677 6678 667d 6699 66aa 66ab 66bb 66dd
6777 6778 6779 677c 677d 6788 678d 679a 679b 679d 67ab 67dd 688d 68aa 68cd 6999 699d 69aa 69ad
69bb 69dd 6aab 6aac 6abb 6abd 6add 6bbb 6bbd 6bdd 6ddd 7777 7778 7779 777a 777b 777d 7788 7789
778a 778c 778d 7799 779b 779c 779d 77aa 77ab 77ac 77bb 77dd 7888 7899 789b 78ac 78bb 78dd 7999
799a 799b 799c 79aa 79ad 79bd 79cd 7aaa 7aad 7abb 7abc 7add 7bbb 7bbc 7bbd 7bcc 7bcd 7bdd 7ccc
7cdd 7ddd 8888 8889 8899 889a 88aa 88ab 88bb 88dd 8999 899a 899b 899d 89aa 89ab 89dd 8aaa 8aab
8aad 8abc 8abd 8bbb 8bbc 8bbd 8bcd 8bdd 8ccc 8ccd 8cdd 8ddd 9999 999a 999b 999d 99aa 99ab 99ac
99bb 99dd 9aaa 9aab 9aac 9abb 9add 9bbc 9bbd 9ccd 9cdd 9ddd aaaa aaab aabb aadd abbb abdd bbbb
bbdd dddd
"""

# the fewest distinct solutions first
HARDEST = """
37dd 229a 344a 488b 2bbb 235c 127c 4558 22dd 1118 577a 7abd 5aad 2258 5677 5668 446d 22bb 139a
39aa 88ac 4599 889d 277a 266d 488d 78aa 47aa 16bd 3cdd 158d 1bbc 18cc 9ccc 446b 114a 6888 1188
366a 56dd 2227 1666 56bb 457a 334d 277d 67bb 35aa 3339 1169 2477 4777 299b 1346 1aac 58cc 5666
7aac 3bbc 4799 226d 3377 239c 227a 6aad 155c 1277 689a 2aab 177c 89bb 49ab 117a 1555 3478 3444
4449 444b 8bcc 67aa 6bcc 68ab 69bc 2ddd 22ab 557b 129b 47dd 6ccd 377c 6bcd 357d 4abd 3388 2455
478b 15bb 288b 47bb 45dd
"""


def hands(digits: str) -> tuple[tuple[int, ...], ...]:
    """Hands from their digits."""
    return tuple(tuple(int(each, 14) for each in hand) for hand in digits.split())


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
    # none is among the hundred hard puzzles of Tree of Thoughts
    solved = (((1, 2, 4, 6), 24), ((2, 6, 8, 10), 24), ((5, 6, 7, 8), 24))

    name = "game24"

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
