"""A task: combine four digits with + - * / so that ten comes out, as on a train ticket."""

import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arbor.errors import InputError
from arbor.tasks.base import BlockLimits, Grade, Problem, Question
from arbor.tasks.splits import content_id, split_of

STEP = re.compile(r"(\d{1,6}) ([-+*/]) (\d{1,6}) = (\d{1,6}) \(left: [\d ]+\)\s*")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def after(left: Sequence[int], thought: str) -> list[int] | None:
    """The numbers left after one step, sorted; None for an illegal step."""
    match = STEP.fullmatch(thought)
    if match is None:
        return None
    a, sign, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
    rest = list(left)
    for number in (a, b):
        if number not in rest:
            return None
        rest.remove(number)
    calculate, exact = SIGNS[sign], sign != "/" or (b != 0 and a % b == 0)
    return sorted([*rest, result]) if exact and calculate(a, b) == result else None


@dataclass(frozen=True)
class MakeTen:
    """Make ten from four digits, each used once."""

    name = "make-ten"
    example = "1 2 3 4"
    boundary = BlockLimits(stop=("\n",), max_tokens=32, max_depth=3)

    def parse(self, text: str) -> Problem:
        digits = text.split()
        if len(digits) != 4 or not all(re.fullmatch("[1-9]", digit) for digit in digits):
            raise InputError("problem-invalid", "not four digits.", f"Try: {self.example}")
        left = sorted(map(int, digits))
        identity = content_id(self.name, " ".join(map(str, left)))
        return Problem(identity, self.name, " ".join(digits), "10", {"digits": left})

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        hands = itertools.combinations_with_replacement("123456789", 4)
        every = (self.parse(" ".join(hand)) for hand in hands)
        return itertools.islice((each for each in every if split_of(each.id) == split), limit)

    def prompt(self, problem: Problem) -> str:
        return f"Target 10 (left: {problem.text})\n"

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        left = self._left(problem, thoughts)
        return left is None or len(left) == 1

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        left = self._left(problem, thoughts)
        return "; ".join(map(str.strip, thoughts)) if left == [10] else None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        left = self._left(problem, answer.split("; ")) if answer else None
        correct = left == [10]
        return Grade(correct, answer, f"The steps {'end' if correct else 'do not end'} in 10.")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        left = self._left(problem, thoughts)
        return 0.0 if left is None else 1.0 if left == [10] else 0.5

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        return Question("Reachable?", {" yes": 1.0, " no": 0.0})

    def _left(self, problem: Problem, thoughts: Sequence[str]) -> list[int] | None:
        left: list[int] | None = problem.data["digits"]
        for thought in thoughts:
            left = None if left is None else after(left, thought)
        return left
