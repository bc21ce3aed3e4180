"""Tasks: problems, prompts, the limits of a thought, graders and exact values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from arbor.tasks.step_format import StepFormat

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        id: stable content hash (hex); splits and resumption go by it, never by a row number.
        task: name of the task, e.g. ``game24``.
        text: as a user types it, e.g. ``4 5 6 10``.
        expected: the answer key, if any; never shown to the model.
        data: the parsed problem, JSON-able (e.g. ``{"numbers": [4, 5, 6, 10], "target": 24}``).
    """

    id: str
    task: str
    text: str
    expected: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Limits of thoughts and paths.

    Attributes:
        stop: strings that end a thought; the token that completes one belongs to the thought.
        max_tokens: longest thought, in tokens; a longer one is cut.
        max_depth: longest path, in thoughts; the search gives up paths that reach it.
        form: what every thought has to match before its `stop`; None: anything.
        path_tokens: longest path, in tokens after the prompt; a thought is cut there, and the path
            ends. None: as many as `max_depth` thoughts hold.
        ends: asked where a thought has come to one of `stop`: whether it ends there, by its text
            and its number of tokens. None: always.
    """

    stop: tuple[str, ...]
    max_tokens: int
    max_depth: int
    form: StepFormat | None = None
    path_tokens: int | None = None
    ends: Callable[[str, int], bool] | None = None

    @property
    def longest_path(self) -> int:
        """Most tokens of a path after the prompt."""
        most = self.max_depth * self.max_tokens
        return most if self.path_tokens is None else min(most, self.path_tokens)


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's judgement of an answer.

    Attributes:
        correct: right or wrong.
        extracted: the answer in the grader's canonical form; None without an answer.
        reason: the reason, in one sentence.
        method: how the answer was compared, in one word, as in ``number``; empty if not given.
        scores: shares of the answer that are right, in [0, 1], by name; evaluations report means.
    """

    correct: bool
    extracted: str | None
    reason: str
    method: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the model about a state, and the values of its verdicts.

    Attributes:
        text: appended to the path's text; the model's next token is the verdict.
        values: verdict text -> value in [0, 1]. The value of a state is their mean, weighted by the
            model's probabilities of the verdicts, renormalised over them.
        turn: what a model for conversations is asked instead: its text is a user's message, which
            the model answers in a turn of its own, and its verdicts are written without outer
            spaces. None: such a model is asked like any other.
    """

    text: str
    values: Mapping[str, float]
    turn: Question | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A question to the model that asks for several next thoughts of a state.

    Attributes:
        text: appended to the path's text; what the model writes after it is the completion.
        max_tokens: of the longest completion.
        stop: strings that end a completion, as the model's end of text does; `text` does not end
            with one.
    """

    text: str
    max_tokens: int
    stop: tuple[str, ...] = ()


@runtime_checkable
class Task(Protocol):
    """A family of problems. Implementations are frozen dataclasses without I/O at construction.

    `thoughts` is always the list of thought texts of one path, root excluded, in order.
    """

    @property
    def name(self) -> str: ...

    @property
    def example(self) -> str:
        """A text that `parse` accepts."""
        ...

    @property
    def boundary(self) -> BlockLimits:
        """Where thoughts and paths end."""
        ...

    def parse(self, text: str) -> Problem:
        """A user's text as a problem.

        Raises:
            InputError: names the mistake and a text that works.
        """
        ...

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """The problems of a split, in a fixed order; splits are disjoint by content hash."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The text at the root of the tree."""
        ...

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the path has ended: with an answer, right or wrong, or without a next step."""
        ...

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The answer of a finished path, or None."""
        ...

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Judge an answer by the key. Parses, never evaluates, text of a model."""
        ...

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """Exact value of a state in [0, 1], from the problem alone; 0 if illegal or hopeless."""
        ...

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        """The question to a model that judges its own thoughts, at this state.

        A task whose questions grow with the thoughts should declare `BoundedQuestions`.
        """
        ...


@runtime_checkable
class GivesTokens(Protocol):
    """The part of a task whose prompts are token ids already, such as those of a conversation."""

    def prompt_tokens(self, problem: Problem) -> Sequence[int]:
        """Token ids of the root, at least one; `Task.prompt` is their text, for readers."""
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


@runtime_checkable
class Proposes(Protocol):
    """The part of a task whose model can list next thoughts in one completion.

    Searches that propose thoughts need it (``tot,generate=propose``).
    """

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        """The question for next thoughts at this state.

        The plan counts the question at no thoughts and its longest completion; where the question
        grows with the thoughts, the completion is as much shorter.
        """
        ...

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> Sequence[str]:
        """The thoughts in a completion, in its order; none where it lists none.

        Each ends as the task's thoughts do, so that another may follow it. Repeats are left out by
        the search, and a thought longer than `BlockLimits.max_tokens` is cut.

        Args:
            problem, thoughts: the state.
            text: the completion, in whole lines where it was cut off, with the string that ended it
                otherwise.
        """
        ...


@runtime_checkable
class Guesses(Protocol):
    """The part of a task whose `answer` may be a guess, which results then mark as one."""

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether `answer` takes for an answer what the text does not mark as one."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """The part of a task that names the rules of its grades; evaluations record it."""

    @property
    def grading(self) -> str:
        """Name and version of extraction and comparison, as in ``exact/1``."""
        ...


@dataclass(frozen=True, slots=True)
class DataColumns:
    """Columns of a data file that a task reads; of several names the first that a row has.

    Attributes:
        problem: of the problem.
        answer: of the answer key.
        id: of the sample's id.
        lists: whether problem and answer may be lists of texts, which are then lines.
    """

    problem: tuple[str, ...] = ("problem",)
    answer: tuple[str, ...] = ("answer",)
    id: tuple[str, ...] = ("id",)
    lists: bool = False


@runtime_checkable
class ReadsRows(Protocol):
    """The part of a task that knows the columns of well-known data files."""

    @property
    def columns(self) -> DataColumns:
        """The columns by default."""
        ...

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """Problem, as `Task.parse` reads it, and answer key of a row.

        Args:
            row: every column.
            problem, answer: texts of the two columns.

        Raises:
            InputError: the row lacks something; without the name of the file.
        """
        ...


@runtime_checkable
class GivesTurns(Protocol):
    """The part of a task whose prompt for a chat model is messages of its own."""

    def turns(self, problem: Problem) -> Sequence[Mapping[str, str]]:
        """The messages up to the user's last one, each with ``role`` and ``content``, without the
        system message."""
        ...


@runtime_checkable
class PutsInWords(Protocol):
    """The part of a task whose own prompts are for models trained on it, and which has others, with
    instructions and examples, for models that read words."""

    def in_words(self) -> Task:
        """The task with those prompts."""
        ...


@runtime_checkable
class Converses(Protocol):
    """The part of a task that says how its prompt reaches a model for conversations."""

    @property
    def system_message(self) -> str:
        """The system message; empty for none. Without a chat template it begins the prompt."""
        ...

    @property
    def uses_chat(self) -> bool:
        """Whether the prompt is a message where the tokenizer has a chat template."""
        ...

    @property
    def prompt_version(self) -> str:
        """Digest of everything in the prompt except the problem; evaluations record it."""
        ...
