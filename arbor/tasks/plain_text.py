"""PlainText: a text to continue, by one block (plain decoding) or by steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arbor.tasks.base import BlockLimits, Grade, Problem, Question
from arbor.tasks.worded import sureness


@dataclass(frozen=True)
class PlainText:
    """A text to continue, as token ids: a path is one block, and its text is the answer.

    A problem's data hold ``tokens``, its prompt, and whether it ``is_conversation``.
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
        return iter(())

    def prompt(self, problem: Problem) -> str:
        return problem.text

    def prompt_tokens(self, problem: Problem) -> Sequence[int]:
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
        raise NotImplementedError("a text to continue is not judged")


@dataclass(frozen=True)
class SteppedText(PlainText):
    """A text to continue by steps, so that a search can choose among them.

    Attributes:
        ends: strings that end the text; the answer is what comes before.
        steps: strings that end a step.
        max_tokens: of a step.
        max_depth: steps of a text.
        path_tokens: of a text; None: as many as its steps hold.
    """

    name = "stepped-text"

    ends: tuple[str, ...] = ()
    steps: tuple[str, ...] = ("\n",)
    max_tokens: int = 128
    max_depth: int = 32
    path_tokens: int | None = None

    @property
    def boundary(self) -> BlockLimits:
        """A step ends at one of `steps` or `ends`."""
        stops = tuple(dict.fromkeys((*self.ends, *self.steps)))
        return BlockLimits(stops, self.max_tokens, self.max_depth, path_tokens=self.path_tokens)

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether one of `ends` has come."""
        text = "".join(thoughts)
        return any(end in text for end in self.ends)

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The text before the first of `ends`."""
        return cut_at("".join(thoughts), self.ends)

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        subject = "answer" if self.is_terminal(problem, thoughts) else "reasoning so far"
        gap = "" if thoughts and thoughts[-1].endswith("\n") else "\n\n"
        text = f"{gap}Is the {subject} correct? Answer yes or no.\nAnswer:"
        yes = dict.fromkeys((" yes", " Yes"), 1.0)
        return Question(
            text,
            yes | dict.fromkeys((" no", " No"), 0.0),
            sureness(subject.removesuffix(" so far")),
        )


def cut_at(text: str, ends: Sequence[str]) -> str:
    """A text before the first of several strings."""
    return text[: min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]


def plain_problem(tokens: Sequence[int], text: str, *, is_conversation: bool = False) -> Problem:
    """A prompt as a problem.

    Args:
        tokens: at least one id.
        text: for readers.
        is_conversation: the tokens are those that the model's chat template writes.
    """
    data = {"tokens": list(tokens), "is_conversation": is_conversation}
    return Problem("", PlainText.name, text, data=data)
