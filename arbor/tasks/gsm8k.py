"""GSM8K: word problems of primary school whose answers are numbers.

Rows of the data set have ``question`` and ``answer``, the solution with ``#### 72`` at its end
(Cobbe et al., arXiv 2110.14168). Their grader takes the first number after ``####`` as text; here
it is compared as a number, so that 72.00 and $72 are 72, and a \\boxed{} or "the answer is" counts
where there is no ``####``. A text that goes on with further problems keeps its first ``####``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arbor.errors import InputError
from arbor.tasks.base import Columns, Problem
from arbor.tasks.grading import extraction
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.exact import Numeric, number_of, said_number
from arbor.tasks.worded import Worded


@dataclass(frozen=True)
class GSM8K(Worded):
    """Word problems of primary school (GSM8K); the answer is a number after ``####``."""

    max_depth: int = 64
    path_tokens: int = 1024

    example = "A baker makes 4 trays of 12 rolls and sells 30. How many rolls are left?"
    columns = Columns(("question", "problem"), ("answer",))

    @property
    def name(self) -> str:
        return "gsm8k"

    @property
    def judge(self) -> Grader:
        return Numeric()

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
        boxed = extraction.boxes(text)
        return extraction.hashed(text) or (boxed[-1] if boxed else None)

    def stated(self, problem: Problem, text: str) -> str | None:
        marked = self.marked(problem, text)
        return said_number(text) if marked is None else marked

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last number of the text."""
        numbers = extraction.numbers_in(text)
        return numbers[-1] if numbers else None
