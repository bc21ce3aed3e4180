"""Tasks whose problems are made by rule, without end, rather than read from a file."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator

from arbor.errors import InputError
from arbor.tasks.base import SPLITS, Problem


class Generated(ABC):
    """What such tasks share: streams of problems by split, and what is said of a text that is none.

    Attributes:
        example: a problem that can be typed as it stands.
        splits: names of the streams.
    """

    example: str
    splits: tuple[str, ...] = SPLITS

    @property
    @abstractmethod
    def name(self) -> str:
        """As it is registered."""

    @abstractmethod
    def _generate(self, split: str) -> Iterator[Problem]:
        """The problems of a split, always the same in the same order."""

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """Problems of one of `splits`, the first `limit` of them.

        Raises:
            InputError: there is no such split.
        """
        if split not in self.splits:
            known = ", ".join(self.splits)
            raise InputError(
                "split-unknown", f"{self.name} has no split '{split}'.", f"Known: {known}."
            )
        return itertools.islice(self._generate(split), limit)

    def _demand_text(self, text: str) -> None:
        if not text.strip():
            raise InputError("problem-empty", "the problem is empty.", f"Try: {self.example}")

    def _invalid(self, text: str, why: str) -> InputError:
        shown = text.strip()[:60]
        return InputError(
            "problem-invalid", f"'{shown}': {why}.", f"Try: {self.example}", text=shown
        )
