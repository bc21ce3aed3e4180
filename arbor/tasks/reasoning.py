r"""Problems in words, for any model that reasons: steps in paragraphs, the answer in \boxed{}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arbor.tasks.base import Problem
from arbor.tasks.grading import extraction
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.exact import Exact
from arbor.tasks.grading.mathematics import Mathematics
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

    example = "A train covers 60 km in 45 minutes. What is its speed in km/h?"

    @property
    def name(self) -> str:
        return "reasoning"

    @property
    def judge(self) -> Grader:
        return Mathematics() if self.grader == "math" else Exact()

    def marked(self, problem: Problem, text: str) -> str | None:
        return extraction.marked(text)

    def stated(self, problem: Problem, text: str) -> str | None:
        return extraction.stated(text)

    def guess(self, problem: Problem, text: str) -> str | None:
        """The last number of the text, or the mathematics that it ends with."""
        return extraction.last_value(text)
