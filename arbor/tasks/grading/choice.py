"""Choice: the letter of an option, never the article "A" of a sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from arbor.tasks.base import Grade
from arbor.tasks.grading.base import graded, invalid
from arbor.tasks.grading.extraction import stated
from arbor.tasks.grading.notation import normalise
from arbor.tasks.grading.number_words import in_digits

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_WHOLE = re.compile(r"\(?([A-Za-z])\)?(?:[.):]\s*.*)?", re.DOTALL)
_STANDALONE = re.compile(r"(?<![\w'’])\(?([A-Z])\)?(?![\w'’])")


@dataclass(frozen=True)
class Choice:
    """Letters compared as letters; ``(b)``, ``B.`` and ``B. gravity`` are B."""

    version = "choice/3"

    def check(self) -> None:
        """No package is needed."""

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`."""
        letter = None if answer is None else letter_of(answer)
        if letter is None:
            return invalid("There is no letter of an option in the answer.")
        if expected is None:
            return Grade(False, letter, "The problem has no answer key.")
        key = letter_of(expected) or expected
        return graded(letter == key, letter, key, "choice")


def letter_of(text: str) -> str | None:
    """The letter of an answer that is one: ``B``, ``(B)``, ``b)``, ``B. gravity``."""
    found = _WHOLE.fullmatch(normalise(text).strip())
    return found[1].upper() if found else None


def stated_letter(text: str, options: Sequence[str]) -> str | None:
    r"""The letter that a text states: in \boxed{}, or after "answer is"; also by the option's text.

    Args:
        options: texts of the options, in the order of their letters.
    """
    answer = stated(text)
    if answer is None:
        return None
    letter = letter_of(answer)
    if letter is None:
        for read in (_written, _plain):
            said = read(answer)
            same = [place for place, option in enumerate(options) if read(option) == said]
            if len(same) == 1:
                return LETTERS[same[0]]
        leading = _STANDALONE.match(normalise(answer))
        letter = leading[1] if leading else None
    return letter if letter and letter in LETTERS[: len(options)] else None


def last_letter(text: str, options: Sequence[str]) -> str | None:
    """The last letter of an option that stands alone in the last line of a text."""
    lines = [line for line in text.splitlines() if line.strip()]
    allowed = LETTERS[: len(options)]
    found = [each for each in _STANDALONE.findall(lines[-1]) if each in allowed] if lines else []
    return found[-1] if found else None


def _written(text: str) -> str:
    """A text with its units, which may be all that options differ in."""
    return " ".join(in_digits(text.strip(" .*$")).casefold().split())


def _plain(text: str) -> str:
    return " ".join(normalise(text).casefold().split())
