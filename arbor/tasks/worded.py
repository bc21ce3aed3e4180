r"""Worded: base of the tasks whose problems are texts and whose models reason in words."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from arbor.errors import InputError, UsageError, check_settings
from arbor.support.texts import clipped, refuse_surrogates, surrogate_of
from arbor.tasks.base import BlockLimits, Grade, Problem, Proposal, Question
from arbor.tasks.grading.base import Equates, Grader
from arbor.tasks.grading.extraction import first_problem, marked
from arbor.tasks.prompt_template import PromptTemplate, read_template
from arbor.tasks.splits import content_id


def sureness(subject: str) -> Question:
    """How sure it is that a subject is correct, as a model for conversations is asked.

    The words are those of Tree of Thoughts' value prompt; for what they are worth next to yes and
    no see docs/experiments/controllers.md.
    """
    verdicts = {
        spelling: value
        for word, value in (("sure", 1.0), ("likely", 0.5), ("impossible", 0.0))
        for spelling in (word, word.capitalize())
    }
    return Question(
        f"Evaluate if the {subject} above is correct (sure/likely/impossible). "
        "Answer with one word.",
        verdicts,
    )


STOPS: Mapping[str, tuple[str, ...]] = {
    "paragraph": ("\n",),  # and `ends_thought`
    "stop": ("\n\n",),
    "line": ("\n",),
    "sentence": (".", "!", "?", ". ", ".\n", "\n\n"),  # and `ends_sentence`
    "length": (),
}
_MARK = re.compile(r"\s*(?:[-*\u2022]|\(?[0-9]{1,3}[.):])\s+")  # of an entry of a list
THINKING, THOUGHT = "<think>", "</think>"  # tags around reasoning that is not the answer


@dataclass(frozen=True)
class Worded(ABC):
    """A problem in words; the model reasons in steps, and a marked answer ends the path.

    Text of the prompt is never searched for the answer, nor text between thinking tags.

    Attributes:
        stop: strings that end a thought, instead of `steps`.
        max_tokens: a thought is cut after so many tokens.
        max_depth: thoughts on one path; with paragraphs `path_tokens` is reached first.
        path_tokens: a path is cut after so many tokens of thoughts.
        yes, no: verdicts of a model that judges its own thoughts, as written after the question,
            which names the first of each; for models whose verdicts begin with the same token.
            A model for conversations is asked for them only where they are changed (`sureness`).
        steps: where a thought ends: at the end of a ``paragraph`` (`ends_paragraph`), of a
            ``line`` or of a ``sentence`` (`ends_sentence`); at an empty line (``stop``); or after
            `max_tokens` alone (``length``).
        template: file of the prompt (`PromptTemplate`), or the name of a built-in one; empty for
            the task's own.
        shots: solved examples in the prompt; None: those that the template is best with, all of
            them as text and none in a chat.
        system: the system message; empty for the template's.
        chat: ``off`` for a base model: the prompt is plain text, whatever its tokenizer has.
    """

    stop: tuple[str, ...] = ()
    max_tokens: int = 192
    max_depth: int = 128
    path_tokens: int = 2048
    yes: tuple[str, ...] = (" yes", " Yes")
    no: tuple[str, ...] = (" no", " No")
    steps: Literal["paragraph", "stop", "line", "sentence", "length"] = "paragraph"
    template: str = ""
    shots: int | None = None
    system: str = ""
    chat: Literal["auto", "off"] = "auto"

    # longest thoughts that fit into a list of next steps
    listed: ClassVar[int] = 4

    def __post_init__(self) -> None:
        limits = ("max_tokens", "max_depth", "path_tokens")
        check_settings(self, **{name: (getattr(self, name) >= 1, "at least 1") for name in limits})
        for name in ("stop", "yes", "no"):
            half = next(filter(None, map(surrogate_of, getattr(self, name))), "")
            if half:
                raise UsageError("setting-range", f"{name} holds {half}, half of a character.")
        if "" in self.stop:
            raise UsageError(
                "setting-range", "stop holds an empty text, which every token contains."
            )
        if not all(map(str.strip, self.yes)) or not all(map(str.strip, self.no)):
            raise UsageError("setting-range", "yes or no holds an empty verdict.")
        if self.shots is not None and self.shots < 0:
            raise UsageError("setting-range", f"shots={self.shots}: it must be at least 0.")
        if not self.yes or not self.no or set(self.yes) & set(self.no):
            raise UsageError(
                "setting-range",
                f"yes={','.join(self.yes)} and no={','.join(self.no)}: each needs a verdict, and "
                "they share none.",
            )

    # What a task of this kind adds

    @property
    @abstractmethod
    def name(self) -> str:
        """The registered name."""

    @property
    @abstractmethod
    def example(self) -> str:
        """A text that `parse` accepts."""

    @abstractmethod
    def marked(self, problem: Problem, text: str) -> str | None:
        """The answer that a text marks, which ends the path."""

    @abstractmethod
    def stated(self, problem: Problem, text: str) -> str | None:
        """The answer that a text states, marked or in words."""

    @abstractmethod
    def guess(self, problem: Problem, text: str) -> str | None:
        """What may be the answer of a text that states none."""

    @property
    @abstractmethod
    def judge(self) -> Grader:
        """The grader of answers."""

    # The task

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(
            stop=self.stop or STOPS[self.steps],
            max_tokens=self.max_tokens,
            max_depth=self.max_depth,
            path_tokens=self.path_tokens,
            ends=None if self.stop else ENDS.get(self.steps),
        )

    @property
    def grading(self) -> str:
        return self.judge.version

    def parse(self, text: str) -> Problem:
        """See `Task.parse`.

        Raises:
            UsageError: the grader needs a package that is not installed.
        """
        refuse_surrogates(text, "the problem")
        if not text.strip():
            raise InputError("problem-empty", "the problem is empty.", f"Try: {self.example}")
        self.judge.check()
        self.prompt_template()
        return Problem(content_id(self.name, text.strip()), self.name, text.strip())

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """See `Task.problems`.

        Raises:
            UsageError: always; the task ships no problems.
        """
        shown = clipped(" ".join(self.example.split()), 80)
        raise UsageError(
            "no-problems",
            f"the task '{self.name}' ships no problems.",
            f'Give one: arbor solve --task {self.name} "{shown}"',
        )

    def prompt(self, problem: Problem) -> str:
        """The template with the problem and `shots` examples."""
        return self.prompt_template().text(problem.text, self.shots)

    def turns(self, problem: Problem) -> list[dict[str, str]]:
        return self.prompt_template().turns(problem.text, self.shots)

    @property
    def system_message(self) -> str:
        return self.system or self.prompt_template().system

    @property
    def uses_chat(self) -> bool:
        return self.chat == "auto"

    @property
    def prompt_version(self) -> str:
        return replace(self.prompt_template(), system=self.system_message).digest(self.shots)

    def prompt_template(self) -> PromptTemplate:
        """The template of the prompt.

        Raises:
            InputError: its file cannot be read.
            UsageError: it is invalid, or has fewer examples than `shots`.
        """
        found = read_template(self.template or self.name)
        if (self.shots or 0) > len(found.examples):
            raise UsageError(
                "setting-range",
                f"shots={self.shots}: the template has {len(found.examples)} examples.",
                "Add some to a copy: arbor prompt TASK --template > mine.toml, then "
                "--set template=mine.toml.",
            )
        return found

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the path holds a complete marked answer, or went on to a problem of its own."""
        text = spoken("".join(thoughts))
        own = first_problem(text)
        return len(own) < len(text) or self.marked(problem, own) is not None

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The answer that the path states, else a guess."""
        text = first_problem(spoken("".join(thoughts)))
        stated = self.stated(problem, text)
        return self.guess(problem, text) if stated is None else stated

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the answer is not stated by the text."""
        text = first_problem(spoken("".join(thoughts)))
        return self.stated(problem, text) is None and self.guess(problem, text) is not None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        return self.judge.grade(answer, problem.expected)

    def same_answer(
        self, problem: Problem, first: str, second: str, seconds: float = math.inf
    ) -> bool:
        """Whether the grader takes two answers for equal; after `seconds` without a verdict, no."""
        judge = self.judge
        if isinstance(judge, Equates):
            return judge.equal(first, second, seconds)
        return judge.grade(first, second).correct or judge.grade(second, first).correct

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        raise self.no_exact_checker()

    def no_exact_checker(self) -> UsageError:
        """The error of a request for exact values."""
        return UsageError(
            "no-exact-verifier",
            f"the task '{self.name}' has no exact checker, only an answer key.",
            "Use --verifier self.",
        )

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        subject = "final answer" if self.is_terminal(problem, thoughts) else "reasoning so far"
        gap = "" if thoughts and thoughts[-1].endswith("\n") else "\n\n"
        asked = f"Is the {subject} correct? Answer {self.yes[0].strip()} or {self.no[0].strip()}."
        verdicts = dict.fromkeys(self.yes, 1.0) | dict.fromkeys(self.no, 0.0)
        own = (self.yes, self.no) != (Worded.yes, Worded.no)
        turn = Question(asked, verdicts) if own else sureness(subject.removesuffix(" so far"))
        return Question(f"{gap}{asked}\nAnswer:", verdicts, turn)

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        """See `Proposes`; the template's question, else the task's."""
        text = self.prompt_template().question(problem.text) or self.list_question(
            problem, thoughts
        )
        gap = "" if thoughts and thoughts[-1].endswith("\n") else "\n\n"
        return Proposal(f"{gap}{text}", self.listed * self.boundary.max_tokens)

    def list_question(self, problem: Problem, thoughts: Sequence[str]) -> str:
        """The question for next steps of a template that has none."""
        return "Several possible next steps, each on a line of its own.\nPossible next steps:\n"

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> list[str]:
        """See `Proposes`: every line that is not empty, without the mark of a list."""
        lines = (_MARK.sub("", line, count=1).strip() for line in spoken(text).splitlines())
        return [self._ended(line) for line in lines if line]

    def _ended(self, line: str) -> str:
        """A line with the end of a thought, see `boundary`."""
        boundary = self.boundary
        if boundary.ends is not None:
            return f"{line}\n\n"
        ends = ("\n", "\n\n", *boundary.stop)
        whole = (line + end for end in ends if (line + end).endswith(boundary.stop))
        return next(whole, f"{line}\n")


def ends_thought(text: str, tokens: int) -> bool:
    """Whether a thought ends at a line break: a paragraph does, or one that marks an answer."""
    return ends_paragraph(text, tokens) or marked(text) is not None


def spoken(text: str) -> str:
    """A text after its thinking tags; empty where they are still open."""
    _, closed, rest = text.rpartition(THOUGHT)
    rest = rest if closed else text
    return rest.partition(THINKING)[0]


LEAST = 16  # tokens of a paragraph that stands alone; a shorter one goes on with the next
LONG = 64  # tokens from which a line's end is enough
_PAIRS = (("\\[", "\\]"), ("\\begin{", "\\end{"))
_FENCES = ("$$", "```")
_ESCAPED = re.compile(r"\\[\\$]")  # a line break, as in ``\\[4pt]``, or a dollar sign
_FORMULA = r"(?=[^$\s])[^$\n]*(?<=\S)"
# formulas within a line, which may touch: ``$x$$y$``
_INLINE = re.compile(rf"(?<!\$)\${_FORMULA}(?:\$\${_FORMULA})*\$(?!\$)")


def ends_paragraph(text: str, tokens: int) -> bool:
    """Whether a thought that has come to the end of a line ends there.

    Args:
        text: of the thought so far, with the line break.
        tokens: of it.
    """
    if tokens < LEAST or is_open(text):
        return False
    written = text.rstrip()
    if written.rstrip("*_ ").endswith(":"):
        return False
    return tokens >= LONG or text.count("\n", len(written)) > 1


def is_open(text: str) -> bool:
    """Whether a text ends inside of a display, an environment or code."""
    text = _INLINE.sub("", _ESCAPED.sub(".", text))
    return any(text.count(begin) > text.count(end) for begin, end in _PAIRS) or any(
        text.count(fence) % 2 for fence in _FENCES
    )


# words that end with a full stop, in small letters
_SHORT = ("mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "e.g", "i.e", "cf", "fig", "eq")
_SENTENCE = re.compile(r"(\S*\w\S*?)([.!?])[)\]\"'\u201d\u2019*_]*$")
_NUMBER = re.compile(r"(?:^|\n)(.*)\d\.[ \t]+[A-Z]\S*$")  # and the first word after it


def ends_sentence(text: str, tokens: int) -> bool:
    """Whether a thought that has come to a full stop, ``!``, ``?`` or an empty line ends there.

    A full stop after a number may be a point: what follows it, a line break or a capital letter,
    ends the sentence.

    Args:
        text: of the thought so far.
        tokens: of it.
    """
    if is_open(text) or not text.strip():
        return False
    written = text.rstrip()
    if text.count("\n", len(written)) > 1:
        return True
    found = _SENTENCE.search(written)
    if found is None:
        number = _NUMBER.search(text)
        return number is not None and bool(number[1].strip())
    word = found[1].lstrip("([\"'*_")
    is_short = word.lower() in _SHORT or re.fullmatch(r"(?:.*\W)?[A-Za-z]", word) is not None
    is_point = word[-1].isdigit() and written == text
    return found[2] != "." or not (is_point or is_short)


ENDS = {"paragraph": ends_thought, "sentence": ends_sentence}  # what is asked at one of `STOPS`
