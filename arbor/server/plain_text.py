"""PlainText: a text to continue by one block, which is plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arbor.tasks.base import BlockLimits, Grade, Problem, Question


@dataclass(frozen=True)
class PlainText:
    """A text to continue, as token ids: a path is one block, and its text is the answer.

    A problem's data hold ``tokens``, its prompt.
    """

    name = "text"
    example = "Once upon a time"

    @property
    def boundary(self) -> BlockLimits:
        """A length without stop strings; requests have limits of their own."""
        return BlockLimits((), 16, 1)

    def parse(self, text: str) -> Problem:
        """No text is parsed: prompts are token ids."""
        raise NotImplementedError("a prompt is given as token ids")

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """None."""
        return iter(())

    def prompt(self, problem: Problem) -> str:
        """The text of the prompt."""
        return problem.text

    def prompt_tokens(self, problem: Problem) -> Sequence[int]:
        """The token ids of the prompt."""
        tokens: Sequence[int] = problem.data["tokens"]
        return tokens

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Always: one block is the whole path."""
        return True

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The text."""
        return "".join(thoughts)

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Wrong: a text to continue has no answer key."""
        return Grade(False, None, "a text to continue has no answer key")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """1: every text is as good as any."""
        return 1.0

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        """None is asked."""
        raise NotImplementedError("a text to continue is not judged")


def plain_problem(tokens: Sequence[int], text: str) -> Problem:
    """A prompt as a problem.

    Args:
        tokens: at least one id.
        text: for readers.
    """
    return Problem("", PlainText.name, text, data={"tokens": list(tokens)})
