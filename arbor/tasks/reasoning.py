r"""Problems in words, for any model that reasons: steps in paragraphs, the answer in \boxed{}.

Answers are compared here, not by math-verify (0.9.0, Hugging Face), which this file was measured
against. It recognises equal expressions that this grader calls different, because their texts
differ: ``2x+3`` and ``3+2x``, ``2\sqrt{3}`` and ``\sqrt{12}``, ``(x+1)^2`` expanded, unions in
another order, ``\{2,1\}`` and ``\{1,2\}``. But it also calls equal what is not, which a strict
grader must not: ``1/2006!`` and ``1/2004!``, ``e^{-100}`` and ``e^{-101}``, ``10^{-20}`` and
``10^{-21}``, ``0.3333333`` and ``1/3``, ``3.14159265`` and ``\pi``, 50 % and 0.5, ``52`` and
``52_8``, ``5 \text{ million}`` and ``5``, ``(1,2)`` and ``\{1,2\}``, ``2,1`` and ``1,2``, ``c`` and
``C``. It misses some forms that this one reads: ``1e-3``, ``**6**``, ``\(6\).``, ``\boxed{72.}``.
Its import takes 0.5 s, a first comparison 0.05 to 0.5 s, and ``9^{9^{9^{9}}}`` and ``2^{10^{10}}``
run beyond 5 s, so it needs a process that can be killed; here a grade takes microseconds and
evaluates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from arbor.errors import InputError, UsageError
from arbor.support.texts import refuse_surrogates, surrogate_of
from arbor.tasks.base import BlockLimits, Grade, Problem, Question
from arbor.tasks.splits import content_id

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"-?\d[\d.,/]*(?<![.,/])")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_ANSWER_IS = re.compile(r"\banswer\s*(?:\*\*)?\s*(?:is|:)\s*(?:\*\*)?\s*:?", re.IGNORECASE)
_COUNTED = re.compile(r"(-?\$?\d(?:[\d,]*\d)?(?:\.\d+)?)((?:\s+[A-Za-z]{2,})+)")  # 72 clips
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_LAST_NUMBER = re.compile(r"(?:(?<![\w)\]}.])[-−])?(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?(?:/\d+)?")

_LONGEST = 400  # characters of an answer; a longer text does not count as one
_SPACING = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|displaystyle\b|left\b|right\b)|~")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}])\s*\\(?:text|textrm|mathrm|mbox)\s*\{\s*([^{}\d]*)\}\s*(?:\^\{?[23]\}?)?$"
)
_FACTOR = re.compile(
    r"(?i)\b(?:hundred|thousand|million|billion|trillion|dozen|score|half|pi|percent)s?\b"
)
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°")
_VARIABLE = re.compile(r"([A-Za-z])\s*=\s*(?=\S)")
_CHOICE = re.compile(r"\(([A-Z])\)")
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "\u00a0": " ", "\u202f": " ", "\u2009": " "})

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)\s*\$?\s*({_DIGITS})\s*%?")
_POWER = re.compile(
    rf"([+-]?)({_DIGITS})(?:e([+-]?\d{{1,3}})|\s*(?:\\times|\\cdot|\*)\s*10\^\{{?([+-]?\d{{1,3}})\}}?)"
)
_SLASH = re.compile(rf"([+-]?)\s*({_DIGITS})\s*/\s*({_DIGITS})")
_FRACTION = re.compile(
    r"([+-]?)\s*\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
)


@dataclass(frozen=True)
class Reasoning:
    r"""A problem in words; the model reasons in steps, and its first \boxed{answer} ends the path.

    The answer of a path is the last complete \boxed{} (braces counted, so that any nesting works),
    else what follows the first ``####``, else what follows the last "answer is", else the last
    number, which is a guess and marked as one. Text of the prompt is never searched.

    Attributes:
        stop: what ends a thought; an empty line by default.
        max_tokens: a thought is cut after so many tokens.
        max_depth: thoughts on one path.
        yes, no: verdicts of a model that judges its own thoughts, as written after the question,
            which names the first of each; for models whose verdicts begin with the same token.
    """

    stop: tuple[str, ...] = ("\n\n",)
    max_tokens: int = 128
    max_depth: int = 16
    yes: tuple[str, ...] = (" yes", " Yes")
    no: tuple[str, ...] = (" no", " No")

    example = "A train covers 60 km in 45 minutes. What is its speed in km/h?"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_depth"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be at least 1."
                )
        for name in ("stop", "yes", "no"):
            half = next(filter(None, map(surrogate_of, getattr(self, name))), "")
            if half:
                raise UsageError("setting-range", f"{name} holds {half}, half of a character.")
        if "" in self.stop:
            raise UsageError(
                "setting-range", "stop holds an empty text, which every token contains."
            )
        if not all(map(str.strip, self.yes)) or not all(map(str.strip, self.no)):
            raise UsageError("setting-range", "yes or no holds an empty verdict.")
        if not self.yes or not self.no or set(self.yes) & set(self.no):
            raise UsageError(
                "setting-range",
                f"yes={','.join(self.yes)} and no={','.join(self.no)}: each needs a verdict, and "
                "they share none.",
            )

    @property
    def name(self) -> str:
        return "reasoning"

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(stop=self.stop, max_tokens=self.max_tokens, max_depth=self.max_depth)

    def parse(self, text: str) -> Problem:
        refuse_surrogates(text, "the problem")
        if not text.strip():
            raise InputError("problem-empty", "the problem is empty.", f"Try: {self.example}")
        return Problem(content_id("reasoning", text.strip()), self.name, text.strip())

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """None: this task is for problems of the user's own."""
        raise UsageError(
            "no-problems",
            "the task 'reasoning' ships no problems.",
            f'Give one: arbor solve --task reasoning "{self.example}"',
        )

    def prompt(self, problem: Problem) -> str:
        return (
            "Solve the problem. Reason step by step, in short steps with an empty line after each. "
            "Put the final answer in \\boxed{}.\n\n"
            f"Problem: {problem.text}\n\n"
            "Solution:\n"
        )

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        r"""Whether the path holds a complete \boxed{...} or ``#### x``."""
        return marked("".join(thoughts)) is not None

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return extract("".join(thoughts))

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the answer is the last number of a text that marks none."""
        text = "".join(thoughts)
        return stated(text) is None and extract(text) is not None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Right if both are the same number exactly, or the same text up to notation.

        No rounding, no tolerance, no factor of 100: 4.6667 is not 14/3, and 50 % is 50, not 0.5.
        """
        if answer is None or not answer.strip():
            return Grade(False, None, "There is no answer.")
        extracted = normalise(marked(answer) or answer)
        if not extracted or len(extracted) > _LONGEST:
            return Grade(False, None, "The answer is empty or far too long.")
        if problem.expected is None:
            return Grade(False, extracted, "The problem has no answer key.")
        expected = normalise(marked(problem.expected) or problem.expected)
        if same(extracted, expected):
            return Grade(True, extracted, f"Is {expected}.")
        return Grade(False, extracted, f"Is {extracted}, not {expected}.")

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        """Whether two answers are equal, as `grade` compares one with the key."""
        return same(*(normalise(marked(answer) or answer) for answer in (first, second)))

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        raise UsageError(
            "no-exact-verifier",
            "the task 'reasoning' has no exact checker, only an answer key.",
            "Use --verifier self.",
        )

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        subject = "final answer" if self.is_terminal(problem, thoughts) else "reasoning so far"
        gap = "" if thoughts and thoughts[-1].endswith("\n") else "\n\n"
        return Question(
            f"{gap}Is the {subject} correct? Answer {self.yes[0].strip()} or "
            f"{self.no[0].strip()}.\nAnswer:",
            dict.fromkeys(self.yes, 1.0) | dict.fromkeys(self.no, 0.0),
        )


def boxes(text: str) -> list[str]:
    r"""Contents of every complete, non-empty \boxed{...} or \fbox{...}, and of ``\boxed 7``.

    Braces are counted. An escaped brace (``\{``) is text. A box that is never closed does not
    count.
    """
    found = []
    for match in _BOX.finditer(text):
        if text.startswith("{", match.end()):
            inside = _balanced(text, match.end())
        else:
            bare = _BARE.match(text, match.end())
            inside = bare[0] if bare else None
        if inside is not None and inside.strip():
            found.append(inside.strip())
    return found


def _balanced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it; None if none does."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 1 : at]
        at += 1
    return None


def marked(text: str) -> str | None:
    r"""The marked answer of a text: its last complete \boxed{}, or first number after ``####``.

    None without such a mark. Only numbers count after ``####``, which also begins Markdown
    headings.
    """
    boxed = boxes(text)
    if boxed:
        return boxed[-1]
    hashes = (match[1].strip() for match in _HASHES.finditer(text))
    return next((line for line in hashes if number(normalise(line)) is not None), None)


def extract(text: str) -> str | None:
    """The answer of a text: stated, else the last number."""
    answer = stated(text)
    if answer is not None:
        return answer
    numbers = [match[0] for match in _LAST_NUMBER.finditer(text)]
    return numbers[-1] if numbers else None


def stated(text: str) -> str | None:
    """The answer that a text states: marked, else after the last "answer is"."""
    answer = marked(text)
    if answer is not None:
        return answer
    said = list(_ANSWER_IS.finditer(text))
    if said:
        answer = _SENTENCE_END.split(text[said[-1].end() :].lstrip(), maxsplit=1)[0].strip()
        counted = _COUNTED.fullmatch(answer)
        if counted and not _FACTOR.search(counted[2]):
            return str(counted[1])
        if normalise(answer):
            return str(answer)
    return None


def normalise(answer: str) -> str:
    """An answer without notation: dollar signs, bold marks, spacing commands, units, full stop."""
    text = answer.translate(_SIGNS).strip()
    for opening, closing in (
        ("\\(", "\\)"),
        ("\\[", "\\]"),
        ("**", "**"),
        ("$$", "$$"),
        ("$", "$"),
    ):
        if len(text) >= len(opening) + len(closing) and text.startswith(opening):
            inner = text.rstrip(".")
            if inner.endswith(closing) and inner != opening:
                text = inner[len(opening) : -len(closing)].strip()
    text = text.replace("\\$", "").replace("\\%", "%").replace("{,}", ",").replace("\\!", "")
    text = _SPACING.sub(" ", text)
    text = _DEGREES.sub("", text).rstrip(" .,;")
    unit = _UNIT.search(text)
    if unit and not _FACTOR.search(unit[1]):
        text = text[: unit.start()]
    text = _WRAPPED.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\s+", " ", text).rstrip(" .,;").strip()
    return text.removeprefix("$").strip()


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number; None for anything else.

    Such as 1,234.50, $5, 50%, 3/4, \frac{3}{4}, 2.5\times10^3, 1e-3.
    Commas must group by threes. A percent sign is a unit and changes no value.
    """
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    if match := _NUMBER.fullmatch(text):
        return _signed(match[1], Fraction(_plain(match[2])))
    if match := _POWER.fullmatch(text):
        return _signed(
            match[1], Fraction(_plain(match[2])) * Fraction(10) ** int(match[3] or match[4])
        )
    if match := _SLASH.fullmatch(text):
        above, below = Fraction(_plain(match[2])), Fraction(_plain(match[3]))
    elif match := _FRACTION.fullmatch(text):
        above, below = Fraction(match[2] or match[3]), Fraction(match[4] or match[5])
    else:
        return None
    return _signed(match[1], above / below) if below else None


def _plain(digits: str) -> str:
    return digits.replace(",", "").rstrip(".")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def same(answer: str, expected: str) -> bool:
    """Whether two normalised answers are equal: as numbers, or as text.

    Text is compared without spaces; plain words also without case; a single capital letter also in
    parentheses. ``x = 5`` is 5, but not ``y = 5``.
    """
    mine, theirs = _VARIABLE.match(answer), _VARIABLE.match(expected)
    if mine is None or theirs is None or mine[1] == theirs[1]:
        answer = answer[mine.end() :] if mine else answer
        expected = expected[theirs.end() :] if theirs else expected
    left, right = number(answer), number(expected)
    if left is not None or right is not None:
        return left == right
    left_text, right_text = _bare(answer), _bare(expected)
    if left_text.isalpha() and len(left_text) > 1:
        return left_text.casefold() == right_text.casefold()
    return left_text == right_text


def _bare(text: str) -> str:
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else re.sub(r"\s", "", text)
