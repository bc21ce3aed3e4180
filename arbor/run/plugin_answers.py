"""Answers of plug-ins, checked: a wrong answer or an exception becomes one error that names both.

Components of arbor itself are not wrapped: what goes wrong in them is a bug.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from arbor.controllers.base import Controller, Expansion, Foresight, Generate, Proposer, Search
from arbor.errors import ArborError, UsageError
from arbor.registry import name_of
from arbor.tasks.base import (
    BlockLimits,
    Grade,
    Guesses,
    Problem,
    Proposal,
    Proposes,
    Question,
    Task,
)
from arbor.tasks.step_format import StepFormat
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Asker, Encoder, Gate, Inquires, Inquiry, Verdict, Verifier

if TYPE_CHECKING:
    from torch import Tensor

# A frame in these marks an exception that the plug-in only passes on: of a listener, or a bug.
NOT_ITS_OWN = ("arbor.engine.", "arbor.run.callbacks", "arbor.run.questions")
LONGEST_SHOWN = 80  # characters of an answer or a message


class Answers:
    """Calls to one plug-in.

    Args:
        kind: ``task``, ``controller``, ``verifier``.
        component: the plug-in.
    """

    def __init__(self, kind: str, component: Any) -> None:
        self._kind = kind
        self._name = name_of(component)

    def of(self, member: str, call: Callable[[], Any]) -> Any:
        """What a member answers.

        Raises:
            UsageError: the member raised something other than an `ArborError`.
        """
        try:
            return call()
        except ArborError:
            raise
        except Exception as error:
            frames = list(traceback.walk_tb(error.__traceback__))
            modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
            if any(module.startswith(NOT_ITS_OWN) for module in modules):
                raise
            frame, line = frames[-1]
            kind, place = self._kind, f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
            raise UsageError(
                f"{kind}-raised",
                f"the {kind} '{self._name}' raised {type(error).__name__} in '{member}': "
                f"{shown(str(error))} ({place}).",
                f"docs/{kind}.md says what it is called with.",
                name=self._name,
                member=member,
            ) from error

    def wrong(self, member: str, answer: object, wanted: str) -> UsageError:
        """The error for an answer of a member.

        Args:
            wanted: what it should be.
        """
        kind = self._kind
        return UsageError(
            f"{kind}-answer",
            f"the {kind} '{self._name}' answered '{member}' with "
            f"{shown(reprlib.repr(answer))}, not {wanted}.",
            f"docs/{kind}.md says what it answers.",
            name=self._name,
            member=member,
        )


def shown(text: str) -> str:
    """A text on one line, printable and short."""
    line = "".join(each if each.isprintable() else " " for each in text[: LONGEST_SHOWN + 1])
    return line if len(line) <= LONGEST_SHOWN else line[:LONGEST_SHOWN] + "…"


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_finite(value: object) -> bool:
    """Whether a value is a finite number."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def _own(component: Any) -> bool:
    """Whether a component, with the one that it wraps, is arbor's own."""
    inner = getattr(component, "verifier", None) if _is_of_arbor(component) else None
    return _is_of_arbor(component) and (inner is None or _own(inner))


def _is_of_arbor(component: Any) -> bool:
    return type(component).__module__.startswith("arbor.")


# Tasks


def unchecked(task: Task) -> Task:
    """The task itself where its answers are checked."""
    return task.task if isinstance(task, CheckedTask) else task


def is_guess(task: Task, problem: Problem, leaf: Node) -> bool:
    """Whether the answer of a finished path is a guess of the task."""
    own = unchecked(task)
    return isinstance(own, Guesses) and own.is_guess(problem, leaf.thoughts)


def path_answer(task: Task, problem: Problem, leaf: Node) -> tuple[str | None, bool]:
    """The answer of a finished path, and whether it is a guess.

    A path that a limit has cut has no answer but one that its text states.
    """
    answer = task.answer(problem, leaf.thoughts)
    guessed = answer is not None and is_guess(task, problem, leaf)
    return (None, False) if leaf.cut and guessed else (answer, guessed)


def checked_task(task: Task) -> Task:
    """A task whose answers are checked."""
    return task if _own(task) else cast(Task, CheckedTask(task))


class CheckedTask:
    """A task of a plug-in; what is not checked is the task's own.

    Attributes:
        task: the plug-in's. Its optional parts are looked for in it (`unchecked`): from Python 3.12
            on, ``isinstance`` with a protocol does not see what ``__getattr__`` finds.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._answers = Answers("task", task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def parse(self, text: str) -> Problem:
        """See `Task.parse`."""
        return cast(Problem, self._typed("parse", Problem, "a Problem", text))

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """See `Task.problems`."""
        every = self._answers.of("problems", lambda: iter(self.task.problems(split, limit)))
        end = object()
        while (found := self._answers.of("problems", lambda: next(every, end))) is not end:
            if not isinstance(found, Problem):
                raise self._answers.wrong("problems", found, "Problems")
            yield found

    def prompt(self, problem: Problem) -> str:
        """See `Task.prompt`."""
        return cast(str, self._typed("prompt", str, "a text", problem))

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """See `Task.is_terminal`."""
        found = self._typed("is_terminal", bool, "True or False", problem, thoughts)
        return cast(bool, found)

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """See `Task.answer`."""
        found = self._typed("answer", (str, type(None)), "a text or None", problem, thoughts)
        return cast("str | None", found)

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """See `Task.grade`."""
        found: Grade = self._typed("grade", Grade, "a Grade", problem, answer)
        texts = (found.extracted or "", found.reason, found.method)
        numbered = isinstance(found.scores, Mapping) and all(map(is_finite, found.scores.values()))
        if (
            not isinstance(found.correct, bool)
            or not all(isinstance(each, str) for each in texts)
            or not numbered
        ):
            wanted = "a Grade with True or False, texts, and numbers as scores"
            raise self._answers.wrong("grade", found, wanted)
        return found

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """See `Task.value`."""
        found = self._answers.of("value", lambda: self.task.value(problem, thoughts))
        if not is_finite(found):
            raise self._answers.wrong("value", found, "a finite number")
        return float(found)

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        """See `Task.question`."""
        found: Question = self._typed("question", Question, "a Question", problem, thoughts)
        values = found.values
        right = isinstance(found.text, str) and isinstance(values, Mapping)
        if not right or not all(isinstance(k, str) and is_finite(v) for k, v in values.items()):
            raise self._answers.wrong("question", found, "a text and a number for each verdict")
        return found

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        """See `Proposes.proposal`."""
        found: Proposal = self._typed("proposal", Proposal, "a Proposal", problem, thoughts)
        stops = found.stop if isinstance(found.stop, tuple | list) else None
        if (
            not (isinstance(found.text, str) and found.text)
            or not is_count(found.max_tokens)
            or stops is None
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            wanted = "a Proposal with texts and a number of at least 1"
            raise self._answers.wrong("proposal", found, wanted)
        return dataclasses.replace(found, stop=tuple(found.stop), max_tokens=int(found.max_tokens))

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> Sequence[str]:
        """See `Proposes.proposals`."""
        given = (problem, thoughts, text)
        found = self._typed("proposals", (list, tuple), "a list of texts", *given)
        if not all(isinstance(each, str) for each in found):
            raise self._answers.wrong("proposals", found, "a list of texts")
        return cast("Sequence[str]", found)

    def _typed(self, member: str, wanted: Any, words: str, *given: Any) -> Any:
        found = self._answers.of(member, lambda: getattr(self.task, member)(*given))
        if not isinstance(found, wanted):
            raise self._answers.wrong(member, found, words)
        return found


def check_boundary(task: Task) -> BlockLimits:
    """The task's boundary.

    Raises:
        UsageError: not `BlockLimits`, or limits that are not whole numbers of at least 1.
    """
    answers = Answers("task", task)
    found: BlockLimits = answers.of("boundary", lambda: task.boundary)
    if (
        not isinstance(found, BlockLimits)
        or not (is_count(found.max_tokens) and is_count(found.max_depth))
        or not (found.path_tokens is None or is_count(found.path_tokens))
        or not (found.ends is None or callable(found.ends))
        or not isinstance(found.stop, tuple | list)
        or not all(isinstance(stop, str) and stop for stop in found.stop)
        or not isinstance(found.form, StepFormat | None)
    ):
        raise answers.wrong("boundary", found, "BlockLimits with texts and numbers of at least 1")
    return dataclasses.replace(
        found,
        stop=tuple(found.stop),
        max_tokens=int(found.max_tokens),
        max_depth=int(found.max_depth),
        path_tokens=None if found.path_tokens is None else int(found.path_tokens),
    )


# Controllers


def most_blocks(controller: Controller, max_depth: int) -> int:
    """The controller's bound of the blocks of a search.

    Raises:
        UsageError: not a whole number of at least 1.
    """
    answers = Answers("controller", controller)
    found = answers.of("max_blocks", lambda: controller.max_blocks(max_depth))
    if not is_count(found):
        raise answers.wrong("max_blocks", found, "a whole number of at least 1")
    return int(found)


def most_proposals(controller: Controller, max_depth: int) -> int:
    """The controller's bound of the expansions that propose at a time; 0 where it samples.

    Raises:
        UsageError: not a whole number of at least 0.
    """
    if not isinstance(controller, Proposer):
        return 0
    answers = Answers("controller", controller)
    found = answers.of("most_proposals", lambda: controller.most_proposals(max_depth))
    if found != 0 and not is_count(found):
        raise answers.wrong("most_proposals", found, "a whole number of at least 0")
    return int(found)


def proposing(task: Task) -> Proposes | None:
    """A task as one that can ask for several thoughts, its answers checked; None: it cannot."""
    return cast(Proposes, checked_task(task)) if isinstance(unchecked(task), Proposes) else None


def checked_search(
    controller: Controller, search: Search, tree: ThoughtTree, most: int, proposals: int
) -> Search:
    """A search whose answers are checked.

    Args:
        controller: which began it.
        tree: which it grows.
        most: blocks of the search, see `most_blocks`.
        proposals: at a time, see `most_proposals`.
    """
    if _own(controller):
        return search
    kind = _CheckedForesight if isinstance(search, Foresight) else _CheckedSearch
    return kind(Answers("controller", controller), search, tree, most, proposals)


class _CheckedSearch:
    def __init__(
        self, answers: Answers, search: Any, tree: ThoughtTree, most: int, proposals: int
    ) -> None:
        self._answers = answers
        self._search = search
        self._tree = tree
        self._most = most
        self._proposals = proposals
        self.continuous = bool(getattr(search, "continuous", False))
        self._reported = {tree.root.id}  # blocks given to `tell`, and the root

    def ask(self, room: int) -> list[Expansion]:
        """See `Search.ask`."""
        found = self._answers.of("ask", lambda: self._search.ask(room))
        if not isinstance(found, list | tuple) or not all(map(self._can_grow, found)):
            wanted = f"Expansions of closed blocks of its tree with widths from 1 to {self._most}"
            raise self._answers.wrong("ask", found, wanted)
        proposed = sum(each.generate == "propose" for each in found)
        if proposed > self._proposals:
            wanted = f"at most {self._proposals} Expansions that propose (most_proposals)"
            raise self._answers.wrong("ask", found, wanted)
        return [dataclasses.replace(each, width=int(each.width)) for each in found]

    def tell(self, children: Sequence[Node]) -> None:
        """See `Search.tell`."""
        self._reported.update(child.id for child in children)
        self._answers.of("tell", lambda: self._search.tell(children))

    def best(self) -> list[Node]:
        """See `Search.best`."""
        found = self._answers.of("best", lambda: self._search.best())
        if not isinstance(found, list | tuple) or not all(map(self._is_leaf, found)):
            raise self._answers.wrong("best", found, "terminal blocks of its tree")
        return list(found)

    def _can_grow(self, each: object) -> bool:
        return (
            isinstance(each, Expansion)
            and self._is_known(each.leaf)
            and each.leaf.state is NodeState.CLOSED
            and (not self.continuous or each.leaf.id in self._reported)
            and is_count(each.width)
            and each.width <= self._most
            and each.generate in get_args(Generate)
        )

    def _is_leaf(self, node: object) -> bool:
        return self._is_known(node) and cast(Node, node).state is NodeState.TERMINAL

    def _is_known(self, node: object) -> bool:
        nodes = self._tree.nodes
        return isinstance(node, Node) and node.id < len(nodes) and nodes[node.id] is node


class _CheckedForesight(_CheckedSearch):
    def prospects(self) -> Mapping[int, float]:
        """See `Foresight.prospects`."""
        found = self._answers.of("prospects", lambda: dict(self._search.prospects()))
        for node, likely in found.items():
            known = isinstance(node, numbers.Integral) and 0 <= int(node) < len(self._tree)
            if not known or not is_finite(likely) or not 0 <= likely <= 1:
                wanted = "probabilities of ids of blocks"
                raise self._answers.wrong("prospects", {node: likely}, wanted)
        return cast(Mapping[int, float], found)


# Verifiers


def inquiry_of(
    verifier: Inquires,
    task: Task,
    problem: Problem,
    candidates: Sequence[Node],
    encoder: Encoder,
) -> Inquiry | None:
    """A verifier's questions, None if it asks in `verify`; its verdict is checked like that of
    `verdict_of`."""
    if _own(verifier):
        return verifier.inquire(task, problem, candidates, encoder)
    given = unchecked(task)
    answers = Answers("verifier", verifier)
    found = answers.of("inquire", lambda: verifier.inquire(given, problem, candidates, encoder))
    if found is None:
        return None
    if not isinstance(found, Inquiry) or not _are_questions(found):
        raise answers.wrong("inquire", found, "an Inquiry with token ids after blocks")

    def verdict(logits: Tensor) -> Verdict:
        return _checked_verdict(answers, "verdict", lambda: found.verdict(logits))

    return dataclasses.replace(found, verdict=verdict)


def _are_questions(inquiry: Inquiry) -> bool:
    if not all(isinstance(each, list | tuple) for each in (inquiry.nodes, inquiry.questions)):
        return False
    return len(inquiry.nodes) == len(inquiry.questions) and all(
        isinstance(node, Node)
        and isinstance(tokens, list | tuple)
        and tokens
        and all(isinstance(token, numbers.Integral) for token in tokens)
        for node, tokens in zip(inquiry.nodes, inquiry.questions, strict=True)
    )


def verdict_of(
    verifier: Verifier, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
) -> Verdict:
    """A verifier's verdict; its values are neither counted nor checked for range here.

    Args:
        task: whose answers are checked; a plug-in gets the task itself.
    """
    if _own(verifier):
        return verifier.verify(task, problem, candidates, engine)
    given = unchecked(task)
    answers = Answers("verifier", verifier)
    return _checked_verdict(
        answers, "verify", lambda: verifier.verify(given, problem, candidates, engine)
    )


def _checked_verdict(answers: Answers, member: str, call: Callable[[], Any]) -> Verdict:
    found = answers.of(member, call)
    right = isinstance(found, Verdict) and all(
        isinstance(each, tuple | list) for each in (found.values, found.scores)
    )
    asked = found.asked if right else None
    if not isinstance(asked, numbers.Integral) or int(asked) < 0:
        raise answers.wrong(member, found, "a Verdict with a tuple of values")
    gate = found.gate
    if gate is not None and not isinstance(gate, Gate):
        raise answers.wrong(member, found, "a Verdict with a Gate or none")
    return Verdict(tuple(found.values), int(asked), gate=gate, scores=tuple(found.scores))
