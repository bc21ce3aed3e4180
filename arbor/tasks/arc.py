"""ARC: science questions with options; a problem is a question and a line for each option.

    Which of these attracts iron?
    A. a magnet
    B. a mirror

Rows of the data set have ``question``, ``choices`` (``text`` and ``label``) and ``answerKey``
(AI2 Reasoning Challenge, Clark et al., arXiv 1803.05457). Labels 1 to 5 become the letters A to E;
a question has two options or more, not always four.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arbor.errors import InputError
from arbor.tasks.base import DataColumns, Grade, Problem
from arbor.tasks.grading.base import Grader, graded, invalid
from arbor.tasks.grading.extraction import stated
from arbor.tasks.grading.notation import normalise
from arbor.tasks.grading.number_words import in_digits
from arbor.tasks.worded import Worded

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_WHOLE = re.compile(r"\(?([A-Za-z])\)?(?:[.):]\s*.*)?", re.DOTALL)
_STANDALONE = re.compile(r"(?<![\w'’])\(?([A-Z])\)?(?![\w'’])")


@dataclass(frozen=True)
class LetterGrader(Grader):
    """LetterGrader compared as letters; ``(b)``, ``B.`` and ``B. gravity`` are B."""

    version = "choice/4"

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


_OPTION = re.compile(r"\s*\(?([A-Z]|[1-9])[).:]\s*(\S.*)")


@dataclass(frozen=True)
class ARC(Worded):
    """Questions with options (ARC); the answer is a letter."""

    max_depth: int = 64
    path_tokens: int = 1024

    example = "Which of these attracts iron?\nA. a magnet\nB. a mirror\nC. a candle"
    columns = DataColumns(("question", "problem"), ("answerKey", "answer"))

    name = "arc"
    judge = LetterGrader()

    def parse(self, text: str) -> Problem:
        """See `Task.parse`; options of a text are its last lines, with letters or numbers."""
        problem = super().parse(text)
        lines = problem.text.splitlines()
        options = _last_options(lines)
        question = "\n".join(lines[: len(lines) - len(options)]).strip()
        if len(options) < 2 or not question:
            raise InputError(
                "problem-invalid",
                "the problem is not a question and two options or more, one per line, from A or 1 "
                "on.",
                f"As in: {self.example!r}.",
            )
        listed = (f"{LETTERS[place]}. {option}" for place, option in enumerate(options))
        shown = "\n".join([question, *listed])
        return replace(super().parse(shown), data={"question": question, "options": options})

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; a row without ``choices`` has its options in the question."""
        choices = row.get("choices")
        if choices is not None:
            texts, labels = _choices(choices)
            listed = (f"{LETTERS[place]}. {text}" for place, text in enumerate(texts))
            problem = "\n".join([problem.strip(), *listed])
        else:
            labels = list(LETTERS[: len(_options(self.parse(problem)))])
        if answer is None:
            return problem, None
        key = answer.strip()
        if key not in labels and key.isdecimal() and 1 <= int(key) <= len(LETTERS):
            key = LETTERS[int(key) - 1]
        if key not in labels:
            known = ", ".join(labels[:8])
            raise InputError(
                "dataset-invalid",
                f"its answer {answer!r:.40} is not the label of an option.",
                f"Labels: {known}.",
            )
        return problem, LETTERS[labels.index(key)]

    def marked(self, problem: Problem, text: str) -> str | None:
        return stated_letter(text, _options(problem))

    def stated(self, problem: Problem, text: str) -> str | None:
        return stated_letter(text, _options(problem))

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last letter of an option that stands alone in the last line."""
        return last_letter(text, _options(problem))


def _last_options(lines: Sequence[str]) -> list[str]:
    """The options that lines end with, labelled from A or 1 on; those before these are another
    part of the question."""
    options: list[str] = []
    above: int | None = None  # the place that the label before has
    for line in reversed(lines):
        match = _OPTION.fullmatch(line)
        place = _place(match[1]) if match else None
        if match is None or place is None or above not in (None, place):
            break
        options.insert(0, match[2].strip())
        if place == 0:
            return options
        above = place - 1
    return []


def _place(label: str) -> int:
    """0 of A and 1, 1 of B and 2, and so on."""
    return int(label) - 1 if label.isdigit() else LETTERS.index(label)


def _options(problem: Problem) -> Sequence[str]:
    options: Sequence[str] = problem.data["options"]
    return options


def _choices(choices: Any) -> tuple[list[str], list[str]]:
    """Texts and labels of a row's options; JSON in a text is read.

    Raises:
        InputError: neither, or not as many of both.
    """
    if isinstance(choices, str):
        try:
            choices = json.loads(choices)
        except (ValueError, RecursionError):
            choices = None
    if isinstance(choices, Mapping):
        texts, labels = choices.get("text"), choices.get("label")
        if isinstance(texts, Sequence) and isinstance(labels, Sequence):
            found = [" ".join(str(each).split()) for each in texts]
            named = [str(each).strip() for each in labels]
            several = 2 <= len(found) <= len(LETTERS)
            if len(found) == len(set(named)) == len(named) and several and all(found):
                return found, named
    raise InputError(
        "dataset-invalid",
        f"its choices are not as many texts as labels, from two to {len(LETTERS)}.",
        'As in: "choices": {"text": ["a magnet", "a mirror"], "label": ["A", "B"]}',
    )
