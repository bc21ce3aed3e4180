r"""Problems in words, for any model that reasons: of any kind, and those of three data sets.

MATH (Hendrycks et al., arXiv 2103.03874): competitions whose answers are expressions. Rows have
``problem`` and ``answer`` (MATH-500), or ``problem`` and ``solution`` with a last \boxed{}.

GSM8K (Cobbe et al., arXiv 2110.14168): primary school. Rows have ``question`` and ``answer``, the
solution with ``#### 72`` at its end. Their grader takes the first number after ``####`` as text;
here it is compared as a number, so that 72.00 and $72 are 72, and a \boxed{} or "the answer is"
counts where there is no ``####``.

AIME: the American Invitational Mathematics Examination, whose answers are integers from 0 to 999.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from arbor.errors import InputError
from arbor.tasks.base import DataColumns, Problem
from arbor.tasks.grading import extraction
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.exact import (
    ExactGrader,
    IntegerGrader,
    NumberGrader,
    number_of,
    said_number,
)
from arbor.tasks.grading.mathematics import Mathematics
from arbor.tasks.grading.notation import LONGEST
from arbor.tasks.worded import Worded


@dataclass(frozen=True)
class Reasoning(Worded):
    r"""A problem in words; the model reasons in steps, and its first \boxed{answer} ends the path.

    The answer of a path is the last complete \boxed{} (braces counted, so that any nesting works),
    else what follows the first ``####``, else what follows the last "answer is", else the last
    number, which is a guess and marked as one.

    Attributes:
        grader: ``exact`` compares numbers exactly and texts up to notation; ``math`` recognises
            equal expressions too (`arbor.tasks.grading.mathematics`; needs ``arbor-search[math]``).
    """

    grader: Literal["exact", "math"] = "exact"

    name = "reasoning"
    example = "A train covers 60 km in 45 minutes. What is its speed in km/h?"

    @property
    def judge(self) -> Grader:
        return Mathematics() if self.grader == "math" else ExactGrader()

    def marked(self, problem: Problem, text: str) -> str | None:
        return extraction.marked(text)

    def stated(self, problem: Problem, text: str) -> str | None:
        return extraction.stated(text)

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last number of the text, or the mathematics that it ends with."""
        return extraction.last_value(text)


@dataclass(frozen=True)
class Math(Reasoning):
    r"""Competition problems (MATH, MATH-500); the answer is an expression in \boxed{}."""

    grader: Literal["exact", "math"] = "math"

    name = "math"
    example = "What is the sum of the solutions of $x^2 - 7x + 10 = 0$?"
    columns = DataColumns(("problem", "question"), ("answer", "solution"), ("id", "unique_id"))

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        r"""See `ReadsRows.entry`; the key is the answer, or the last \boxed{} of a solution."""
        if answer is None:
            return problem, None
        key = extraction.marked(answer)
        if key is None and (len(answer) > LONGEST or "\n" in answer.strip()):
            raise InputError(
                "dataset-invalid", "its solution has no \\boxed{} answer.", "As in: … \\boxed{7}"
            )
        return problem, answer.strip() if key is None else key


class Numbers(Worded):
    """Base of the tasks whose answers are numbers."""

    def stated(self, problem: Problem, text: str) -> str | None:
        marked = self.marked(problem, text)
        return said_number(text) if marked is None else marked

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last number of the text."""
        numbers = extraction.numbers_in(text)
        return numbers[-1] if numbers else None


@dataclass(frozen=True)
class GSM8K(Numbers):
    """Word problems of primary school (GSM8K); the answer is a number after ``####``."""

    max_depth: int = 64
    path_tokens: int = 1024

    name = "gsm8k"
    judge = NumberGrader()
    example = "A baker makes 4 trays of 12 rolls and sells 30. How many rolls are left?"
    columns = DataColumns(("question", "problem"), ("answer",))

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; the key is the number after ``####``, or the answer itself."""
        if answer is None:
            return problem, None
        key = extraction.hashed(answer) or extraction.marked(answer) or answer
        if number_of(key) is None:
            raise InputError(
                "dataset-invalid", "its answer has no number after ####.", "As in: … #### 72"
            )
        return problem, key

    def marked(self, problem: Problem, text: str) -> str | None:
        """The first number after ``####``, else the last box; a text may go on with a problem."""
        boxed = extraction.boxes(text)
        return extraction.hashed(text) or (boxed[-1] if boxed else None)


@dataclass(frozen=True)
class AIME(Numbers):
    r"""Problems of the AIME; the answer is an integer from 0 to 999 in \boxed{}."""

    max_tokens: int = 256

    name = "aime"
    judge = IntegerGrader()
    example = "Find the remainder when $3^{100}$ is divided by $1000$."
    columns = DataColumns(
        ("problem", "Problem", "question"), ("answer", "Answer"), ("id", "ID", "unique_id")
    )

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; a key that is not an integer from 0 to 999 is refused."""
        if answer is None:
            return problem, None
        if not self.judge.grade(answer, answer).correct:
            raise InputError(
                "dataset-invalid", f"its answer {answer!r:.40} is not an integer from 0 to 999."
            )
        return problem, answer

    def marked(self, problem: Problem, text: str) -> str | None:
        return extraction.marked(text)
