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
from types import FrameType
from typing import TYPE_CHECKING, Any, cast, get_args

from arbor.controllers.base import (
    Controller,
    Expansion,
    Foresight,
    Generate,
    Proposer,
    ReadsValues,
    Scores,
    Search,
)
from arbor.errors import ArborError, UsageError
from arbor.registry import name_of
from arbor.run.questions import wrong_in
from arbor.support.texts import clipped, one_line
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
from arbor.verifiers.base import (
    Asker,
    Encoder,
    Gate,
    Inquires,
    Inquiry,
    OwnsModel,
    Placement,
    PlansQuestions,
    Verdict,
    Verifier,
    VerifierModel,
    parts_of,
)

if TYPE_CHECKING:
    from torch import Tensor

# A frame in these marks an exception that the plug-in only passes on: of a listener, or a bug.
NOT_ITS_OWN = ("arbor.engine.", "arbor.run.listeners")
LONGEST_SHOWN = 80  # characters of an answer or a message
_SHOWN = reprlib.Repr()
_SHOWN.maxother = LONGEST_SHOWN
_PAGES = {"aggregate": "answers", "policy": "retention"}  # of docs, where not the kind's name


def page_of(kind: str) -> str:
    """The page of docs on components of a kind."""
    return _PAGES.get(kind, kind)


class PluginCalls:
    """Calls to one plug-in."""

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
            if any(_module(frame).startswith(NOT_ITS_OWN) for frame, _ in frames):
                raise
            outside = [each for each in frames if not _module(each[0]).startswith("arbor.")]
            frame, line = (outside or frames)[-1]
            kind, place = self._kind, f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
            raise UsageError(
                f"{kind}-raised",
                f"the {kind} '{self._name}' raised {type(error).__name__} in '{member}': "
                f"{clipped(one_line(str(error)), LONGEST_SHOWN)} ({place}).",
                f"docs/{page_of(kind)}.md says what it is called with.",
                name=self._name,
                member=member,
            ) from error

    def right(
        self, member: str, call: Callable[[], Any], is_right: Callable[[Any], bool], wanted: str
    ) -> Any:
        """What a member answers, where that is right.

        Args:
            member, call: as for `of`.
            is_right: of the answer.
            wanted: what it has to be, for the error.

        Raises:
            UsageError: the member raised an exception, or its answer is wrong.
        """
        found = self.of(member, call)
        if not is_right(found):
            raise self.wrong(member, found, wanted)
        return found

    def each_right(
        self, member: str, call: Callable[[], Any], is_right: Callable[[Any], bool], wanted: str
    ) -> list[Any]:
        """What a member answers as a list or tuple, where each item is right; arguments and errors
        as for `right`, which shows the first wrong item."""
        found = self.right(member, call, lambda items: isinstance(items, list | tuple), wanted)
        for item in found:
            if not is_right(item):
                raise self.wrong(member, item, wanted)
        return list(found)

    def wrong(self, member: str, answer: object, wanted: str) -> UsageError:
        """The error for an answer of a member, or for the part of it that is wrong."""
        kind = self._kind
        return UsageError(
            f"{kind}-answer",
            f"the {kind} '{self._name}' answered '{member}' with "
            f"{clipped(one_line(_SHOWN.repr(answer)), LONGEST_SHOWN)}, not {wanted}.",
            f"docs/{page_of(kind)}.md says what it answers.",
            name=self._name,
            member=member,
        )


def _module(frame: FrameType) -> str:
    """The name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_finite(value: object) -> bool:
    """Whether a value is a finite number."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _own(component: Any) -> bool:
    """Whether a component, with the one that it wraps, is arbor's own."""
    if not type(component).__module__.startswith("arbor."):
        return False
    inner = getattr(component, "verifier", None)
    return inner is None or _own(inner)


# Tasks


def unchecked(task: Task) -> Task:
    """The task itself where its answers are checked."""
    return task.task if isinstance(task, CheckedTask) else task


def path_answer(task: Task, problem: Problem, leaf: Node) -> tuple[str | None, bool]:
    """The answer of a finished path, and whether it is a guess.

    A path that a limit has cut has no answer but one that its text states.
    """
    answer = task.answer(problem, leaf.thoughts)
    if answer is None or not isinstance(unchecked(task), Guesses):
        return answer, False
    if not cast(Guesses, task).is_guess(problem, leaf.thoughts):
        return answer, False
    return (None, False) if leaf.cut else (answer, True)


def checked_task(task: Task) -> Task:
    """A task whose answers are checked."""
    return task if _own(task) else cast(Task, CheckedTask(task))


def _is_decided(value: object) -> bool:
    return isinstance(value, bool)


def _is_grade(found: Any) -> bool:
    return (
        isinstance(found, Grade)
        and isinstance(found.correct, bool)
        and _are_texts((found.extracted or "", found.reason, found.method))
        and isinstance(found.scores, Mapping)
        and all(map(is_finite, found.scores.values()))
    )


def _is_question(found: Any) -> bool:
    return (
        isinstance(found, Question)
        and isinstance(found.text, str)
        and isinstance(found.values, Mapping)
        and all(isinstance(k, str) and is_finite(v) for k, v in found.values.items())
    )


def _is_proposal(found: Any) -> bool:
    return (
        isinstance(found, Proposal)
        and bool(found.text)
        and _are_texts((found.text,))
        and is_count(found.max_tokens)
        and _are_texts(found.stop)
        and all(found.stop)
    )


# by the member of a task: whether an answer is right, and what it has to be
_OF_TASK: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "parse": (lambda found: isinstance(found, Problem), "a Problem"),
    "prompt": (lambda found: isinstance(found, str), "a text"),
    "is_terminal": (_is_decided, "True or False"),
    "answer": (lambda found: found is None or isinstance(found, str), "a text or None"),
    "grade": (_is_grade, "a Grade with True or False, texts, and numbers as scores"),
    "is_guess": (_is_decided, "True or False"),
    "same_answer": (_is_decided, "True or False"),
    "value": (is_finite, "a finite number"),
    "question": (_is_question, "a Question with a text and a number for each verdict"),
    "proposal": (_is_proposal, "a Proposal with texts and a number of at least 1"),
    "proposals": (_are_texts, "a list of texts"),
}


class CheckedTask:
    """A task of a plug-in; what is not checked is the task's own.

    Attributes:
        task: the plug-in's. Its optional parts are looked for in it (`unchecked`): from Python 3.12
            on, ``isinstance`` with a protocol does not see what ``__getattr__`` finds.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._answers = PluginCalls("task", task)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.task, name)
        if name not in _OF_TASK:
            return member
        is_right, wanted = _OF_TASK[name]
        return lambda *given: self._answers.right(name, lambda: member(*given), is_right, wanted)

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        """See `Task.problems`."""
        every = self._answers.of("problems", lambda: iter(self.task.problems(split, limit)))
        end = object()
        while (found := self._answers.of("problems", lambda: next(every, end))) is not end:
            if not isinstance(found, Problem):
                raise self._answers.wrong("problems", found, "Problems")
            yield found


def check_boundary(task: Task) -> BlockLimits:
    """The task's boundary.

    Raises:
        UsageError: not `BlockLimits`, or limits that are not whole numbers of at least 1. The
            boundary's `ends` raises it too, where the task's own raises an exception or answers
            something other than True or False.
    """
    calls = PluginCalls("task", task)
    found: BlockLimits = calls.right(
        "boundary",
        lambda: task.boundary,
        _is_boundary,
        "BlockLimits with texts and numbers of at least 1",
    )
    ends = found.ends
    if ends is not None and not _own(task):
        asked = ends

        def ends(text: str, tokens: int) -> bool:
            return bool(
                calls.right(
                    "boundary.ends", lambda: asked(text, tokens), _is_decided, "True or False"
                )
            )

    return dataclasses.replace(found, stop=tuple(found.stop), ends=ends)


def _is_boundary(found: Any) -> bool:
    return (
        isinstance(found, BlockLimits)
        and is_count(found.max_tokens)
        and is_count(found.max_depth)
        and (found.path_tokens is None or is_count(found.path_tokens))
        and (found.ends is None or callable(found.ends))
        and _are_texts(found.stop)
        and all(found.stop)
        and isinstance(found.form, StepFormat | None)
    )


# Controllers


def most_blocks(controller: Controller, max_depth: int) -> int:
    """The controller's bound of the blocks of a search.

    Raises:
        UsageError: not a whole number of at least 1.
    """
    found = PluginCalls("controller", controller).right(
        "max_blocks",
        lambda: controller.max_blocks(max_depth),
        is_count,
        "a whole number of at least 1",
    )
    return int(found)


def most_blocks_of(controller: Controller, max_depth: int, max_expansions: int) -> int:
    """The same of a search that grows at most this many leaves.

    No leaf gets more children than the root may, which is known of arbor's own controllers.
    """
    most = most_blocks(controller, max_depth)
    return min(most, max_expansions * most_blocks(controller, 1)) if _own(controller) else most


def most_proposals(controller: Controller, max_depth: int) -> int:
    """The controller's bound of the expansions that propose at a time; 0 where it samples.

    Raises:
        UsageError: not a whole number of at least 0.
    """
    if not isinstance(controller, Proposer):
        return 0
    found = PluginCalls("controller", controller).right(
        "most_proposals",
        lambda: controller.most_proposals(max_depth),
        lambda most: most == 0 or is_count(most),
        "a whole number of at least 0",
    )
    return int(found)


def proposing(task: Task) -> Proposes | None:
    """A task as one that can ask for several thoughts, its answers checked; None: it cannot."""
    return cast(Proposes, checked_task(task)) if isinstance(unchecked(task), Proposes) else None


def checked_search(
    controller: Controller, search: Search, tree: ThoughtTree, most: int, proposals: int
) -> Search:
    """A search of at most `most` blocks and `proposals` at a time, whose answers are checked."""
    if _own(controller):
        return search
    kind = _CheckedForesight if isinstance(search, Foresight) else _CheckedSearch
    return kind(PluginCalls("controller", controller), search, tree, most, proposals)


class _CheckedSearch:
    def __init__(
        self, answers: PluginCalls, search: Any, tree: ThoughtTree, most: int, proposals: int
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
        found = self._answers.each_right(
            "ask",
            lambda: self._search.ask(room),
            lambda each: isinstance(each, Expansion),
            "Expansions",
        )
        for each in found:
            for part, wanted in self._wrong_in(each):
                raise self._answers.wrong("ask", {part: getattr(each, part)}, wanted)
        proposing = sum(each.generate == "propose" for each in found)
        if proposing > self._proposals:
            wanted = f"at most {self._proposals} Expansions that propose (most_proposals)"
            raise self._answers.wrong("ask", proposing, wanted)
        told, more = len(self._reported) - 1, sum(each.width for each in found)
        if told + more > self._most:
            wanted = f"at most {self._most} blocks in all (max_blocks), of which it has {told}"
            raise self._answers.wrong("ask", {"widths": more}, wanted)
        return [dataclasses.replace(each, width=int(each.width)) for each in found]

    def tell(self, children: Sequence[Node]) -> None:
        """See `Search.tell`."""
        self._reported.update(child.id for child in children)
        self._answers.of("tell", lambda: self._search.tell(children))

    def best(self) -> list[Node]:
        """See `Search.best`."""
        found = self._answers.each_right(
            "best", self._search.best, self._is_leaf, "terminal blocks of its tree"
        )
        seen: set[int] = set()
        for leaf in found:
            if leaf.id in seen:
                raise self._answers.wrong("best", [leaf, leaf], "each block once")
            seen.add(leaf.id)
        return found

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        """See `ReadsValues.reads`; all of them of a search without it."""
        if not isinstance(self._search, ReadsValues):
            return children
        known = {child.id for child in children}
        return self._answers.each_right(
            "reads",
            lambda: self._search.reads(list(children)),
            lambda each: self._is_known(each) and each.id in known,
            "some of the children that it was asked about",
        )

    def scores(self) -> Mapping[int, float]:
        """See `Scores.scores`; none of a search without it."""
        if not isinstance(self._search, Scores):
            return {}
        return self._by_block("scores", "finite numbers by ids of blocks", is_finite)

    def _by_block(
        self, member: str, wanted: str, is_right: Callable[[Any], bool]
    ) -> Mapping[int, float]:
        """What a member answers: finite numbers by the ids of blocks."""
        found = self._answers.right(
            member,
            lambda: getattr(self._search, member)(),
            lambda answer: isinstance(answer, Mapping),
            wanted,
        )
        for node, number in found.items():
            known = isinstance(node, numbers.Integral) and 0 <= int(node) < len(self._tree)
            if not known or not is_finite(number) or not is_right(number):
                raise self._answers.wrong(member, {node: number}, wanted)
        return dict(found)

    def _wrong_in(self, each: Expansion) -> Iterator[tuple[str, str]]:
        """The parts of an expansion that are wrong, with what they have to be."""
        if not self._is_known(each.leaf):
            yield "leaf", "a block of its tree"
        elif each.leaf.state is not NodeState.CLOSED:
            yield "leaf", "a closed block"
        elif self.continuous and each.leaf.id not in self._reported:
            yield "leaf", "a block that it was told of"
        if not is_count(each.width) or each.width > self._most:
            yield "width", f"a width from 1 to {self._most}"
        if each.generate not in get_args(Generate):
            yield "generate", f"one of {', '.join(get_args(Generate))}"
        if each.begin is not None and not self._can_begin(each):
            yield "begin", "a child of the sampled leaf and a number of its tokens, but not all"

    def _can_begin(self, each: Expansion) -> bool:
        """Whether an expansion begins with some of an earlier child's tokens."""
        if each.generate != "sample" or not isinstance(each.begin, tuple) or len(each.begin) != 2:
            return False
        child, count = each.begin
        return (
            self._is_known(child)
            and child.parent is each.leaf
            and child.state is not NodeState.OPEN
            and is_count(count)
            and count < len(child.tokens)
        )

    def _is_leaf(self, node: object) -> bool:
        return self._is_known(node) and cast(Node, node).state is NodeState.TERMINAL

    def _is_known(self, node: object) -> bool:
        nodes = self._tree.nodes
        return isinstance(node, Node) and node.id < len(nodes) and nodes[node.id] is node


class _CheckedForesight(_CheckedSearch):
    def prospects(self) -> Mapping[int, float]:
        """See `Foresight.prospects`."""
        wanted = "probabilities of ids of blocks"
        return self._by_block("prospects", wanted, lambda likely: 0 <= likely <= 1)


# Verifiers


def own_questions(verifier: Verifier) -> str | None:
    """The name of the first part of a verifier that asks the model and is a plug-in's."""
    asking = (part for part in parts_of(verifier) if part.needs_model and not _own(part))
    return next(map(name_of, asking), None)


def question_bound(
    verifier: PlansQuestions, task: Task, problem: Problem, boundary: BlockLimits, encoder: Encoder
) -> int | None:
    """A verifier's own bound of its questions, in tokens; None: it asks the task's.

    Raises:
        UsageError: a plug-in's is not a whole number of at least 0, or it raised an exception.
    """

    def call() -> int | None:
        return verifier.most_question_tokens(task, problem, boundary, encoder)

    if _own(verifier):
        return call()
    found = PluginCalls("verifier", verifier).right(
        "most_question_tokens",
        call,
        lambda most: most is None or most == 0 or is_count(most),
        "a whole number of at least 0, or None",
    )
    return None if found is None else int(found)


def own_model_of(verifier: OwnsModel, placement: Placement) -> VerifierModel:
    """A verifier's own model, located and not loaded.

    Raises:
        UsageError: a plug-in's is no `VerifierModel`, or it raised an exception.
        ModelError: no such model.
    """
    if _own(verifier):
        return verifier.own_model(placement)
    return cast(
        VerifierModel,
        PluginCalls("verifier", verifier).right(
            "own_model",
            lambda: verifier.own_model(placement),
            lambda model: isinstance(model, VerifierModel),
            "a VerifierModel",
        ),
    )


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
    answers, given = PluginCalls("verifier", verifier), unchecked(task)
    found: Inquiry | None = answers.right(
        "inquire",
        lambda: verifier.inquire(given, problem, candidates, encoder),
        lambda inquiry: inquiry is None or _has_lists(inquiry),
        "an Inquiry with lists of blocks and of token ids of the model",
    )
    if found is None:
        return None
    if wrong := wrong_in(found.nodes, found.questions, getattr(encoder, "vocabulary", 0)):
        wanted = f"token ids of the model after each block: {wrong}"
        raise answers.wrong("inquire", {"questions": found.questions}, wanted)
    verdict = found.verdict

    def checked(logits: Tensor) -> Verdict:
        return _checked_verdict(answers, "verdict", lambda: verdict(logits))

    return dataclasses.replace(found, verdict=checked)


def _has_lists(inquiry: Any) -> bool:
    return (
        isinstance(inquiry, Inquiry)
        and _are_lists((inquiry.nodes, inquiry.questions))
        and all(isinstance(each, list | tuple | str) for each in inquiry.questions)
    )


def _are_lists(values: Sequence[object]) -> bool:
    return all(isinstance(each, list | tuple) for each in values)


def verdict_of(
    verifier: Verifier, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
) -> Verdict:
    """A verifier's verdict; its values are neither counted nor checked for range here. A plug-in
    gets the task itself."""
    if _own(verifier):
        return verifier.verify(task, problem, candidates, engine)
    given = unchecked(task)
    return _checked_verdict(
        PluginCalls("verifier", verifier),
        "verify",
        lambda: verifier.verify(given, problem, candidates, engine),
    )


def _checked_verdict(answers: PluginCalls, member: str, call: Callable[[], Any]) -> Verdict:
    found = answers.right(member, call, _has_values, "a Verdict with a tuple of values")
    if not isinstance(found.asked, numbers.Integral) or int(found.asked) < 0:
        raise answers.wrong(member, {"asked": found.asked}, "a number of questions, at least 0")
    if found.gate is not None and not isinstance(found.gate, Gate):
        raise answers.wrong(member, found, "a Verdict with a Gate or none")
    scores = tuple(found.scores)
    return Verdict(tuple(found.values), int(found.asked), gate=found.gate, scores=scores)


def _has_values(found: Any) -> bool:
    return isinstance(found, Verdict) and _are_lists((found.values, found.scores))
