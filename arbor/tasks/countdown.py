"""Countdown: combine every given number once with + - * / so that the target comes out.

One thought is one line, ``10 - 4 = 6 (left: 5 6 6)`` and a newline: two numbers that are left,
their exact result, and what is left afterwards. A path ends when one number is left.
`arbor.tasks.game24` is the case of four numbers and 24.

Source: Game of 24 as a search problem is Yao et al., Tree of Thoughts (arXiv 2305.10601), section
4.1. Differs from its released grader, which evaluates model text: here an answer is parsed by
`parse_expression`, all arithmetic is exact (integers and fractions), and every line is checked.

In words, for models that were not trained on it, the prompts have the forms of that paper: solved
inputs before the problem, a step on each line, and a value prompt whose labels are sure, likely and
impossible. Three things differ: text and puzzles are arbor's own, the last step is not written
again as an expression, and a label is read at once, without lines of calculation before it.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from arbor.components import ONLY_IF_SET
from arbor.errors import InputError, check_settings
from arbor.support.texts import clipped
from arbor.tasks.base import BlockLimits, DataColumns, Grade, Problem, Proposal, Question
from arbor.tasks.generated import Generated
from arbor.tasks.splits import content_id, split_of

Number = int | Fraction
State = tuple[Number, ...]

_NUMBER = r"-?[0-9]{1,40}(?:/[0-9]{1,40})?"
_STEP = re.compile(
    rf"({_NUMBER}) ([-+*/]) ({_NUMBER}) = ({_NUMBER}) \(left: ({_NUMBER}(?: {_NUMBER})*)\)\n?"
)
_LISTED = re.compile(rf"(?<![\w./-]){_STEP.pattern}")  # also after a bullet or a number
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-", "·": "*", "⋅": "*", "∗": "*"})
_MARKS = re.compile(r"[$`]|\\[()\[\]]")  # around a formula or code
_CHEER = re.compile(r"(=\s*[0-9]+)\s*!+$")  # no factorial: the target needs none
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}
_LABEL = re.compile(r"^(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*)", re.IGNORECASE)
_BOLD = re.compile(r"(^|[^\s*)}\d])\s*\*\*(.+?)\*\*")  # behind a number or a bracket ** is a power
_BOX = re.compile(r"\\boxed\s*\{(.*)\}")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_ANSWER = 500
_EXAMPLE: State = (2, 3, 5, 12)  # the numbers of the example in the question for next steps
_LINES = 8  # of that example
_LARGEST_INPUT = 999_999
_MOST_DRAWS = 100_000  # for one more problem

# worth of a label, in the released proportion of 20, 1 and 0.001
LABELS: Mapping[str, float] = {" sure": 1.0, " likely": 0.05, " impossible": 0.0}
_JUDGED = (
    ("4 20", 24, "sure"),
    ("7 9", 24, "impossible"),
    ("4 9 11", 24, "sure"),
    ("3 5 8", 24, "likely"),
    ("1 2 2", 24, "impossible"),
    ("3 5 9", 60, "likely"),
    ("6 8", 48, "sure"),
)


def _plain(value: Fraction) -> Number:
    """An integer as int, anything else as it is."""
    return value.numerator if value.denominator == 1 else value


def _read(text: str) -> Number | None:
    """The number a line writes as ``7``, ``-7`` or ``7/3``; None for a zero denominator."""
    top, _, bottom = text.partition("/")
    if bottom and int(bottom) == 0:
        return None
    return _plain(Fraction(int(top), int(bottom))) if bottom else int(top)


def calculate(a: Number, sign: str, b: Number) -> Number | None:
    """Exact ``a sign b``; None for a division by zero."""
    if sign == "+":
        return a + b
    if sign == "-":
        return a - b
    if sign == "*":
        return a * b
    return None if b == 0 else _plain(Fraction(a) / Fraction(b))


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """One line of a solution: ``a sign b = result`` and the sorted numbers `left` after it."""

    a: Number
    sign: str
    b: Number
    result: Number
    left: State

    @property
    def text(self) -> str:
        """The thought."""
        return f"{self.a} {self.sign} {self.b} = {self.result} (left: {' '.join(map(str, self.left))})\n"


def parse_step(thought: str) -> ParsedStep | None:
    """The step written in a thought, checked for form only; None for any other line."""
    match = _STEP.fullmatch(thought.translate(_SIGNS))
    if match is None:
        return None
    a, b, result = (_read(match[i]) for i in (1, 3, 4))
    left = [_read(word) for word in match[5].split(" ")]
    if a is None or b is None or result is None or None in left:
        return None
    return ParsedStep(a, match[2], b, result, tuple(sorted(n for n in left if n is not None)))


def take(state: State, thought: str) -> ParsedStep | None:
    """The step of a thought from a state; None unless numbers, result and rest are right."""
    step = parse_step(thought)
    if step is None:
        return None
    rest = list(state)
    for operand in (step.a, step.b):
        if operand not in rest:
            return None
        rest.remove(operand)
    if calculate(step.a, step.sign, step.b) != step.result:
        return None
    return step if tuple(sorted([*rest, step.result])) == step.left else None


def replay(numbers: Sequence[int], thoughts: Sequence[str]) -> list[ParsedStep] | None:
    """The steps of a path, in order; None if any of them is not legal."""
    state: State = tuple(sorted(numbers))
    steps = []
    for thought in thoughts:
        step = take(state, thought)
        if step is None:
            return None
        steps.append(step)
        state = step.left
    return steps


def left_after(numbers: Sequence[int], thoughts: Sequence[str]) -> State | None:
    """The numbers that are left after a path, sorted; None if a step of it is not legal."""
    steps = replay(numbers, thoughts)
    if steps is None:
        return None
    return steps[-1].left if steps else tuple(sorted(numbers))


def _pairs(state: State) -> Iterator[tuple[Number, Number, State]]:
    """Every distinct pair (a <= b) of a sorted state, and the rest."""
    seen = []
    for i, j in itertools.combinations(range(len(state)), 2):
        a, b = state[i], state[j]
        if (a, b) not in seen:
            seen.append((a, b))
            yield a, b, state[:i] + state[i + 1 : j] + state[j + 1 :]


def exact_steps(state: State) -> list[ParsedStep]:
    """Every distinct step from a sorted state, fractions included, in a fixed order.

    ``a + b`` and ``a * b`` are written with a <= b, and of ``a - b`` and ``b - a`` only the one
    that is not negative (enough while no number is negative); each line is a different text.
    """
    steps = []
    negative = bool(state) and state[0] < 0
    for a, b, rest in _pairs(state):
        lines = [(a, "+", b), (b, "-", a), (a, "*", b)]
        if negative and a != b:
            lines.append((a, "-", b))
        if a != 0:
            lines.append((b, "/", a))
        if b != 0 and a != b:
            lines.append((a, "/", b))
        for x, sign, y in lines:
            result = calculate(x, sign, y)
            if result is not None:
                steps.append(ParsedStep(x, sign, y, result, tuple(sorted((*rest, result)))))
    return steps


def legal_steps(state: tuple[int, ...]) -> list[ParsedStep]:
    """The steps of `exact_steps` that stay among the non-negative integers."""
    return [step for step in exact_steps(state) if isinstance(step.result, int)]


@lru_cache(maxsize=1 << 19)
def can_reach(state: State, target: int) -> bool:
    """Whether a sorted state can reach the target with each number used once; exact, memoised."""
    if len(state) == 1:
        return state[0] == target
    if len(state) == 2:  # without making a fraction
        a, b = state
        return (
            target in (a + b, a - b, b - a, a * b)
            or (b != 0 and a == target * b)
            or (a != 0 and b == target * a)
        )
    whole_first = sorted(exact_steps(state), key=lambda step: isinstance(step.result, Fraction))
    return any(can_reach(step.left, target) for step in whole_first)


def solve(numbers: Sequence[int], target: int) -> list[str] | None:
    """The thoughts of the first solution in the order of `exact_steps`, or None."""
    state: State = tuple(sorted(numbers))
    if not can_reach(state, target):
        return None
    thoughts = []
    while len(state) > 1:
        step = next(step for step in exact_steps(state) if can_reach(step.left, target))
        thoughts.append(step.text)
        state = step.left
    return thoughts


def compose(numbers: Sequence[int], thoughts: Sequence[str]) -> str | None:
    """The expression of a legal full path, with only the parentheses it needs; None otherwise.

    Of two equal numbers the step takes the one that has been there longer.
    """
    steps = replay(numbers, thoughts)
    if steps is None or len(steps) != len(numbers) - 1:
        return None
    # (value, expression, binding strength: 1 sum, 2 product, 3 number)
    items: list[tuple[Number, str, int]] = [(n, str(n), 3) for n in numbers]

    def pick(value: Number) -> tuple[str, int]:
        index = next(i for i, item in enumerate(items) if item[0] == value)
        _, text, strength = items.pop(index)
        return text, strength

    for step in steps:
        (a, a_strength), (b, b_strength) = pick(step.a), pick(step.b)
        strength = 1 if step.sign in "+-" else 2
        if a_strength < strength:
            a = f"({a})"
        if b_strength < strength or (b_strength == strength and step.sign in "-/"):
            b = f"({b})"
        items.append((step.result, f"{a} {step.sign} {b}", strength))
    return items[0][1]


def parse_expression(text: str) -> tuple[Fraction, list[int]]:
    """Exact value of an expression and its numbers, left to right. Parses, never evaluates.

    Raises:
        ValueError: anything but non-negative integers, + - * / and parentheses, or a division by
            zero; says which.
    """
    if len(text) > _LONGEST_ANSWER:
        raise ValueError(f"longer than {_LONGEST_ANSWER} characters")
    if stray := re.search(r"[^0-9\s+*/()-]", text):
        raise ValueError(f"'{stray[0]}' is neither a number nor one of + - * / ( )")
    if zero := re.search(r"\b0[0-9]+", text):
        raise ValueError(f"'{zero[0]}' is not how a number is written")
    leaves: list[int] = []

    def value_of(part: ast.expr) -> Fraction:
        match part:
            case ast.Constant(value=int(number)):
                leaves.append(number)
                return Fraction(number)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                one, two = value_of(left), value_of(right)
                if isinstance(sign, ast.Div) and two == 0:
                    raise ValueError("a division by zero")
                return _OPERATORS[type(sign)](one, two)
        raise ValueError("not numbers with + - * or / between them")

    try:
        whole = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("an operator, a number or a parenthesis is missing") from error
    return value_of(whole), leaves


def normalise(answer: str) -> str:
    """The last line of an answer without label, marks of a formula, of code or of bold text,
    ``\\boxed{}`` and full stop."""
    lines = [line.strip() for line in _MARKS.sub(" ", answer).splitlines() if line.strip()]
    text = (lines[-1] if lines else "").translate(_SIGNS)
    for name, sign in _LATEX.items():
        text = text.replace(name, sign)
    before = None
    while text != before and len(text) <= 2 * _LONGEST_ANSWER:
        before = text
        text = _BOLD.sub(r"\1 \2 ", _LABEL.sub("", text)).strip().rstrip(".").rstrip()
        text = _CHEER.sub(r"\1", text)
        boxed = _BOX.fullmatch(text)
        text = boxed[1] if boxed else text
    return text


def _has_value(key: str, target: int) -> bool:
    """Whether an answer key is the target, also as 24.0, or an expression of that value."""
    expression, equals, right = re.sub(r"(?<=\d)\.0+$", "", normalise(key)).partition("=")
    try:
        value, _ = parse_expression(expression)
    except ValueError:
        return False
    return value == target and (not equals or right.strip() == str(target))


@dataclass(frozen=True)
class Countdown(Generated):
    """Reach a target with four to six numbers; text form ``3 7 25 50 -> 331``.

    Attributes:
        fewest, most: how many numbers a problem has.
        largest: the largest number in generated problems.
        targets: smallest and largest target in generated problems.
        words: prompts with instructions and examples; a model that reads words gets them anyway.
    """

    fewest: int = 4
    most: int = 6
    largest: int = 25
    targets: tuple[int, int] = (10, 99)
    words: bool = field(default=False, metadata=ONLY_IF_SET)

    name = "countdown"
    columns = DataColumns()

    def __post_init__(self) -> None:
        low, high = self.targets
        check_settings(
            self,
            fewest=(2 <= self.fewest <= self.most, f"from 2 to most={self.most}"),
            largest=(1 <= self.largest <= _LARGEST_INPUT, f"from 1 to {_LARGEST_INPUT:,}"),
            targets=(0 <= low <= high, "two numbers of at least 0, the larger one last"),
        )

    @property
    def grading(self) -> str:
        return f"{self.name}/3"

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(stop=("\n",), max_tokens=48, max_depth=self.most - 1)

    example = "3 7 25 50 -> 331"

    def make(self, numbers: Sequence[int], target: int) -> Problem:
        """The problem of these numbers and this target; its id does not depend on their order."""
        canonical = f"{' '.join(map(str, sorted(numbers)))} -> {target}"
        data: dict[str, Any] = {"numbers": list(numbers), "target": target}
        text = f"{' '.join(map(str, numbers))} -> {target}"
        return Problem(content_id("countdown", canonical), self.name, text, str(target), data)

    def parse(self, text: str) -> Problem:
        self._demand_text(text)
        head, arrow, tail = text.partition("->")
        words = head.replace(",", " ").split()
        target = tail.strip()
        if not arrow or not re.fullmatch("[0-9]{1,6}", target):
            raise self._invalid(text, "names no target after '->'")
        numbers = self._numbers(text, words)
        if not self.fewest <= len(numbers) <= self.most:
            raise self._invalid(
                text, f"has {len(numbers)} numbers; {self.fewest} to {self.most} are needed"
            )
        return self.make(numbers, int(target))

    def _numbers(self, text: str, words: Sequence[str]) -> list[int]:
        for word in words:
            if not re.fullmatch("[0-9]{1,6}", word) or int(word) == 0:
                raise self._invalid(
                    text, f"'{clipped(word)}' is not a whole number from 1 to {_LARGEST_INPUT}"
                )
        return [int(word) for word in words]

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; a key is the target or an expression of that value."""
        target = self.parse(problem).data["target"]
        if answer is not None and not _has_value(answer, target):
            raise InputError(
                "dataset-invalid",
                f"its answer {answer!r:.40} is neither {target} nor an expression of that value.",
                "Leave the answer out: the target is the key.",
            )
        return problem, answer

    def _generate(self, split: str) -> Iterator[Problem]:
        """Each solvable in whole numbers; four numbers and 24 never in train. They end where
        `_MOST_DRAWS` in a row give none."""
        rng = random.Random(f"countdown {split}")
        seen: dict[str, None] = {}
        draws = 0
        while draws < _MOST_DRAWS:
            draws += 1
            count = rng.randint(self.fewest, self.most)
            numbers = [rng.randint(1, self.largest) for _ in range(count)]
            state = tuple(sorted(numbers))
            while len(state) > 1:
                state = rng.choice(legal_steps(state)).left  # type: ignore[assignment]
            target = state[0]
            if not self.targets[0] <= target <= self.targets[1]:
                continue
            problem = self.make(numbers, target)
            member = "test" if count == 4 and target == 24 else split_of(problem.id)
            if member == split and problem.id not in seen:
                seen[problem.id] = None
                draws = 0
                yield problem

    def in_words(self) -> Countdown:
        return dataclasses.replace(self, words=True)

    # numbers and targets of the examples in words
    solved: ClassVar[Sequence[tuple[tuple[int, ...], int]]] = (
        ((2, 5, 7, 10), 45),
        ((3, 4, 6, 9, 20), 74),
        ((1, 5, 8, 11), 58),
    )

    def prompt(self, problem: Problem) -> str:
        numbers, target = sorted(problem.data["numbers"]), problem.data["target"]
        if not self.words:
            return f"Target {target} (left: {' '.join(map(str, numbers))})\n"
        shown = "".join(f"{asked}\nSteps:\n{steps}\n" for asked, steps in self._examples())
        return f"{_instruction(target)}\n\n{shown}{_in_words(numbers, target)}\nSteps:\n"

    def turns(self, problem: Problem) -> list[dict[str, str]]:
        """See `GivesTurns`; the examples in words are earlier turns."""
        if not self.words:
            return [{"role": "user", "content": self.prompt(problem)}]
        numbers, target = sorted(problem.data["numbers"]), problem.data["target"]
        messages: list[dict[str, str]] = []
        for asked, steps in self._examples():
            first = asked if messages else f"{_instruction(target)}\n\n{asked}"
            messages.append({"role": "user", "content": first})
            messages.append({"role": "assistant", "content": steps.rstrip("\n")})
        return [*messages, {"role": "user", "content": _in_words(numbers, target)}]

    def _examples(self) -> list[tuple[str, str]]:
        """Problems and their steps."""
        return [
            (_in_words(numbers, target), "".join(solve(numbers, target) or ()))
            for numbers, target in self.solved
        ]

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """True when one number is left, a line is illegal, or all pairs should have been joined."""
        numbers = problem.data["numbers"]
        return len(thoughts) >= len(numbers) - 1 or replay(numbers, thoughts) is None

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The expression of the steps; None if it misses the target, which needs no key to see."""
        expression = compose(problem.data["numbers"], thoughts)
        return expression if self._judged(problem, expression).correct else None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """See `Task.grade`; by a key of another value than the target no answer is correct."""
        grade, key, target = self._judged(problem, answer), problem.expected, problem.data["target"]
        if not grade.correct or key is None or _has_value(key, target):
            return grade
        wrong = f"The key {key!r:.40} is neither {target} nor an expression of that value."
        return Grade(False, grade.extracted, wrong)

    def _judged(self, problem: Problem, answer: str | None) -> Grade:
        """The grade by the numbers and the target alone."""
        if answer is None or not answer.strip():
            return Grade(False, None, "There is no answer.")
        text = normalise(answer)
        target = problem.data["target"]
        expression, equals, right = text.partition("=")
        if equals and right.strip() != str(target):
            return Grade(False, None, f"The right side is '{right.strip()[:20]}', not {target}.")
        try:
            value, leaves = parse_expression(expression)
        except ValueError as error:
            return Grade(False, None, f"Not an expression: {error}.")
        extracted = expression.strip()
        numbers = sorted(problem.data["numbers"])
        if sorted(leaves) != numbers:
            used, given = (" ".join(map(str, ns)) for ns in (sorted(leaves), numbers))
            return Grade(False, extracted, f"Uses {used}; the numbers are {given}.")
        if value != target:
            return Grade(False, extracted, f"The value is {value}, not {target}.")
        return Grade(True, extracted, f"Uses every number once and is exactly {target}.")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        left = left_after(problem.data["numbers"], thoughts)
        return float(left is not None and can_reach(left, problem.data["target"]))

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        if not self.words:
            return Question("Reachable?", {" yes": 1.0, " no": 0.0})
        state = left_after(problem.data["numbers"], thoughts)
        left = "no numbers" if state is None else " ".join(map(str, state))
        judged = "".join(f"{given} -> {goal}: {label}\n" for given, goal, label in _JUDGED)
        return Question(
            "\nCan the numbers that are left reach the target, each used once? "
            f"sure, likely or impossible.\n{judged}{left} -> {problem.data['target']}:",
            LABELS,
        )

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        """See `Proposes`: one example and the numbers that are left, as in the released prompt."""
        numbers = problem.data["numbers"]
        left = left_after(numbers, thoughts) or tuple(sorted(numbers))
        text = f"{_steps_of(_EXAMPLE)}{_example_lines()}{_steps_of(left)}"
        return Proposal(text, 10 * self.boundary.max_tokens, ("\n\n", "Input:"))

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> list[str]:
        """See `Proposes`: every line with a step, right or wrong; other text is left out."""
        found = (_LISTED.search(line) for line in text.translate(_SIGNS).splitlines())
        steps = (parse_step(match[0].strip("\n")) for match in found if match)
        return [step.text for step in steps if step is not None]


def _instruction(target: int) -> str:
    """What is asked in words, and the form of a line."""
    return (
        f"Reach {target} with all of the numbers, each used exactly once, with + - * and /. In each "
        "step two of the numbers that are left become one. Write only the steps, each on a line of "
        "its own, followed by the numbers that are left after it, as in the examples."
    )


def _in_words(numbers: Sequence[int], target: int) -> str:
    """A problem as the model is shown it."""
    return f"Numbers: {' '.join(map(str, numbers))} (target {target})"


def _steps_of(state: State) -> str:
    """The head of a list of next steps."""
    return f"Input: {' '.join(map(str, state))}\nPossible next steps:\n"


def _example_lines() -> str:
    """Next steps of the example: with every sign, from the pairs at the front and at the back."""
    steps = legal_steps(tuple(int(number) for number in _EXAMPLE))
    shown = steps[: _LINES // 2] + steps[-_LINES // 2 :]
    return "".join(step.text for step in shown)
