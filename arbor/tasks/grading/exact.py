"""Exact comparison: the same number exactly, or the same text up to notation."""

from __future__ import annotations

from dataclasses import dataclass

from arbor.tasks.base import Grade
from arbor.tasks.grading.base import graded, invalid
from arbor.tasks.grading.extraction import EMPTY_BOX, marked
from arbor.tasks.grading.notation import LONGEST, normalise, number, same


@dataclass(frozen=True)
class Exact:
    """No rounding, no tolerance, no factor of 100: 4.6667 is not 14/3, and 50 % is 50, not 0.5."""

    version = "exact/3"

    def check(self) -> None:
        """No package is needed."""

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`."""
        extracted = canonical(answer)
        if isinstance(extracted, Grade):
            return extracted
        if expected is None:
            return Grade(False, extracted, "The problem has no answer key.")
        key = normalise(marked(expected) or expected)
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
