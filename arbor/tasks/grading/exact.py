"""Exact comparisons: of numbers, of integers of a range, of texts up to notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from arbor.tasks.base import Grade
from arbor.tasks.grading.base import Grader, graded, invalid
from arbor.tasks.grading.extraction import EMPTY_BOX, marked, numbers_in, single_number, stated
from arbor.tasks.grading.notation import LONGEST, in_thousands, normalise, number, same
from arbor.tasks.grading.number_words import PARTS


@dataclass(frozen=True)
class ExactGrader(Grader):
    """No rounding, no tolerance, no factor of 100: 4.6667 is not 14/3, and 50 % is 50, not 0.5."""

    version = "exact/6"

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`."""
        extracted = canonical(answer)
        if isinstance(extracted, Grade):
            return extracted
        if expected is None:
            return Grade(False, extracted, "The problem has no answer key.")
        key = normalise(marked(expected) or expected)
        extracted = extracted if number(key) is None else in_thousands(extracted)
        method = "text" if number(extracted) is None else "number"
        return graded(same(extracted, key), extracted, key, method)


def canonical(answer: str | None) -> str | Grade:
    """An answer without notation; the grade of a text without one."""
    if answer is None or not EMPTY_BOX.sub("", answer).strip():
        return invalid("There is no answer.")
    extracted = normalise(marked(answer) or answer)
    if not extracted or len(extracted) > LONGEST:
        return invalid("The answer is empty or far too long.")
    return extracted


_SHARE = rf"\d\s+(?:[bm]n|(?i:{PARTS}))\b"
_CHANGED = re.compile(  # a number that is not the value
    rf"{_SHARE}|\d\s*(?:[kKM]\b|squared|cubed|[xyzn]\b|[_^!])|\b(?i:minus|negative)\s+[£€]?\.?\d"
)

LARGEST = 999  # integer

_AND_PART = re.compile(r"(?<=\d)\s+and\s+(?=\d+\s*/\s*\d+$|\\frac)")  # 2 and 1/3 cups


@dataclass(frozen=True)
class NumberGrader(Grader):
    """Numbers compared as exact fractions: ``$1,234.50`` is 1234.5, and 72 clips are 72."""

    version = "number/5"
    method = "number"

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`."""
        value = number_of(answer)
        if value is None:
            return invalid("There is no number in the answer.")
        if expected is None:
            return Grade(False, str(value), "The problem has no answer key.")
        key = number_of(expected)
        shown = expected if key is None else str(key)
        return graded(value == key, str(value), shown, self.method)


@dataclass(frozen=True)
class IntegerGrader(NumberGrader):
    """Integers from 0 to 999, compared as integers: 033 is 33, and 25 is not in 125."""

    version = "integer/5"
    method = "integer"

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`; any other number is wrong."""
        value = number_of(answer)
        if value is not None and (value.denominator != 1 or not 0 <= value <= LARGEST):
            reason = f"Is {value}, not an integer from 0 to {LARGEST}."
            return Grade(False, str(value), reason, self.method)
        return super().grade(answer, expected)


def said_number(text: str) -> str | None:
    """What a text says is its answer, if that is a number; several, or parts, are refused later."""
    said = stated(text)
    if not said or number_of(said) is not None:
        return said
    return said if len(numbers_in(said)) > 1 or re.search(_SHARE, said) else None


def number_of(text: str | None) -> Fraction | None:
    """The exact value of an answer that is a number, also with a unit in words.

    None for a text with several numbers that are not an equation.
    """
    if text is None or len(text) > 10_000:
        return None
    plain = _AND_PART.sub(" ", normalise(marked(text) or text))
    one = single_number(plain)
    if one is not None:
        return number(one)
    found = numbers_in(plain)
    alone = len(found) == 1 and "\\" not in plain and not _CHANGED.search(plain)
    return number(found[0]) if alone else None
