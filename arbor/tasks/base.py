"""What a task is: problems, the text the model sees, where a thought ends, and who is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        id: stable content hash (hex); splits and resumption go by it, never by a row number.
        task: name of the task, e.g. ``game24``.
        text: what a user would type, e.g. ``4 5 6 10``.
        expected: the answer key where the task has one; never shown to the model.
        data: the parsed problem, JSON-able (e.g. ``{"numbers": [4, 5, 6, 10], "target": 24}``).
    """

    id: str
    task: str
    text: str
    expected: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Where a thought ends.

    Attributes:
        stop: a thought ends with the first token whose text contains one of these (it belongs to the thought).
        max_tokens: a thought is cut after so many tokens.
        max_depth: thoughts on one path before the search gives the path up.
    """

    stop: tuple[str, ...]
    max_tokens: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader says of an answer.

    Attributes:
        correct: right or wrong.
        extracted: the answer in the grader's canonical form; None if there was none.
        reason: one sentence that says why.
    """

    correct: bool
    extracted: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """What the model is asked about a state, and how its next token is read as a value.

    Attributes:
        text: appended to the path's text; the model's next token is the verdict.
        values: verdict text -> value in [0, 1]. The value of a state is the mean of these, weighted by the
            model's probabilities of the verdicts, renormalised over them.
    """

    text: str
    values: Mapping[str, float]


@runtime_checkable
class Task(Protocol):
    """A family of problems. Implementations are frozen dataclasses without I/O at construction.

    `thoughts` is always the list of thought texts of one path, root excluded, in order.
    """

    @property
    def name(self) -> str: ...

    @property
    def example(self) -> str:
        """A text that `parse` takes."""
        ...

    @property
    def boundary(self) -> BlockLimits: ...

    def parse(self, text: str) -> Problem:
        """A user's text as a problem; raises `InputError` naming what is wrong and a text that would work."""
        ...

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """The problems of a split, in a fixed order; splits are disjoint by content hash."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The text at the root of the tree."""
        ...

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the path has come to an end (an answer, right or wrong, or a state with no next step)."""
        ...

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The answer a finished path gives; None if it gives none."""
        ...

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Judges an answer with the key. Parses, never evaluates, what a model wrote."""
        ...

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """Exact worth of a state in [0, 1], from the problem alone: 0 for an illegal or hopeless state."""
        ...

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        """What a self-judging model is asked at this state.

        A task whose questions grow with the thoughts should declare `BoundedQuestions`.
        """
        ...


@runtime_checkable
class BoundedQuestions(Protocol):
    """The part of a task whose questions grow with the thoughts: a bound that the plan counts.

    Without it the plan counts the question at no thoughts.
    """

    @property
    def max_question_tokens(self) -> int | None:
        """The most tokens of a question, at any thoughts; None: the question never grows."""
        ...
