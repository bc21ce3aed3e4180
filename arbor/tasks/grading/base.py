"""Grader: the comparison of an answer with its key, and the version of its rules."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from arbor.tasks.base import Grade

NOTHING = "none"  # method of a grade without an extracted answer


class Grader(Protocol):
    """Compares answers with keys. Implementations are stateless and never evaluate an answer."""

    @property
    def version(self) -> str:
        """Name and number of the rules, as in ``exact/1``; another number may grade otherwise."""
        ...

    def check(self) -> None:
        """Refuse to begin where something is missing; most graders need nothing.

        Raises:
            UsageError: names the package to install.
        """
        return

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """Judge an answer by the key; without a key, extract only."""
        ...


@runtime_checkable
class Equates(Protocol):
    """The part of a grader whose comparisons take time; without it, votes compare by `grade`."""

    def equal(self, first: str, second: str, seconds: float) -> bool:
        """Whether two answers of a vote are equal; the same in either order.

        Args:
            first, second: answers, as texts state them.
            seconds: most for the comparison; what is not decided by then is not equal.
        """
        ...


def invalid(reason: str) -> Grade:
    """The grade of a text without an answer."""
    return Grade(False, None, reason, NOTHING)


def graded(correct: bool, extracted: str, expected: str, method: str) -> Grade:
    """The grade of an extracted answer."""
    reason = f"Is {expected}." if correct else f"Is {extracted}, not {expected}."
    return Grade(correct, extracted, reason, method)
