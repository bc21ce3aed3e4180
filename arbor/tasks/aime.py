r"""AIME: problems of the American Invitational Mathematics Examination; integers from 0 to 999."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arbor.errors import InputError
from arbor.tasks.base import Columns, Problem
from arbor.tasks.grading import extraction
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.exact import Integer, said_number
from arbor.tasks.worded import Worded


@dataclass(frozen=True)
class AIME(Worded):
    r"""Problems of the AIME; the answer is an integer from 0 to 999 in \boxed{}."""

    max_tokens: int = 256

    example = "Find the remainder when $3^{100}$ is divided by $1000$."
    columns = Columns(
        ("problem", "Problem", "question"), ("answer", "Answer"), ("id", "ID", "unique_id")
    )

    @property
    def name(self) -> str:
        return "aime"

    @property
    def judge(self) -> Grader:
        return Integer()

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; a key that is not an integer from 0 to 999 is refused."""
        if answer is None:
            return problem, None
        if not Integer().grade(answer, answer).correct:
            raise InputError(
                "dataset-invalid", f"its answer {answer!r:.40} is not an integer from 0 to 999."
            )
        return problem, answer

    def marked(self, problem: Problem, text: str) -> str | None:
        return extraction.marked(text)

    def stated(self, problem: Problem, text: str) -> str | None:
        marked = self.marked(problem, text)
        return said_number(text) if marked is None else marked

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last number of the text."""
        numbers = extraction.numbers_in(text)
        return numbers[-1] if numbers else None
