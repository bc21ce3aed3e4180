r"""MATH: problems of competitions whose answers are expressions in \boxed{}.

Rows have ``problem`` and ``answer`` (MATH-500), or ``problem`` and ``solution`` with the answer in
its last \boxed{} (Hendrycks et al., arXiv 2103.03874).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from arbor.errors import InputError
from arbor.tasks.base import Columns
from arbor.tasks.grading.extraction import marked
from arbor.tasks.grading.notation import LONGEST
from arbor.tasks.reasoning import Reasoning


@dataclass(frozen=True)
class Math(Reasoning):
    r"""Competition problems (MATH, MATH-500); the answer is an expression in \boxed{}."""

    grader: Literal["exact", "math"] = "math"

    example = "What is the sum of the solutions of $x^2 - 7x + 10 = 0$?"
    columns = Columns(("problem", "question"), ("answer", "solution"), ("id", "unique_id"))

    @property
    def name(self) -> str:
        return "math"

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        r"""See `ReadsRows.entry`; the key is the answer, or the last \boxed{} of a solution."""
        if answer is None:
            return problem, None
        key = marked(answer)
        if key is None and (len(answer) > LONGEST or "\n" in answer.strip()):
            raise InputError(
                "dataset-invalid", "its solution has no \\boxed{} answer.", "As in: … \\boxed{7}"
            )
        return problem, answer.strip() if key is None else key
