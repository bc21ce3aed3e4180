"""Answers of a search: equal answers grouped, an aggregate's ranking, and its confidence."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Integral

from arbor.aggregate.base import Aggregate, AnswerVotes, Confident, FinishedPath
from arbor.run.plugin_answers import CheckedTask, PluginCalls, is_count, is_finite, path_answer
from arbor.tasks.base import Problem, Task
from arbor.tree import Node

COMPARISONS_S = 30.0  # most for the comparisons of one search, without an earlier end


def compares_answers(aggregate: Aggregate) -> bool:
    """Whether an aggregate's choice depends on which answers are equal, see `Aggregate`."""
    return bool(getattr(aggregate, "compares", True))


class AnswerGroups:
    """The finished paths of one search, equal answers in one group.

    Two answers are in one group if the grader extracts the same text from them, or by the task's
    `same_answer`. Two that differ are never in one, even if a third one equals both: it goes with
    the answer that more paths give. Neither the order of the paths nor whether an answer is right
    plays a part. Each pair is compared once in a search.

    Args:
        task, problem: of the search.
        compares: False: only what takes no time is compared, for an aggregate that needs no more.
    """

    def __init__(self, task: Task, problem: Problem, *, compares: bool = True) -> None:
        self._task = task
        self._problem = problem
        self._compares = compares
        self._equal: dict[tuple[str, str], bool] = {}  # of two canonical forms, in order
        self._left_s = COMPARISONS_S

    def paths(self, leaves: Sequence[Node], seconds: float = math.inf) -> list[FinishedPath]:
        """The finished paths, with the groups of their answers.

        Args:
            leaves: terminal blocks, best first.
            seconds: until the end of the search; answers not compared by then are not equal.
        """
        answers = [path_answer(self._task, self._problem, leaf)[0] for leaf in leaves]
        forms = [None if each is None else self._canonical(each) for each in answers]
        texts: dict[str, str] = {}  # an answer of each form, the same in any order of paths
        for answer, form in zip(answers, forms, strict=True):
            if answer is not None and form is not None:
                texts[form] = min(answer, texts.get(form, answer))
        first = self._first_equal(texts, Counter(forms), seconds)
        numbers: dict[str, int] = {}
        found = []
        for leaf, answer, form in zip(leaves, answers, forms, strict=True):
            group = None if form is None else numbers.setdefault(first[form], len(numbers))
            values = tuple(
                node.value if node.score is None else node.score for node in leaf.path[1:]
            )
            found.append(FinishedPath(leaf.id, answer, group, values))
        return found

    def _canonical(self, answer: str) -> str:
        """The text that the grader extracts; a plug-in's grader is not asked without a key."""
        plug_in = isinstance(self._task, CheckedTask)
        if plug_in and self._problem.expected is None:
            return answer.strip()
        problem = self._problem if plug_in else dataclasses.replace(self._problem, expected=None)
        extracted = self._task.grade(problem, answer).extracted
        return answer.strip() if extracted is None else extracted

    def _first_equal(
        self, texts: Mapping[str, str], paths: Mapping[str | None, int], seconds: float
    ) -> dict[str, str]:
        """For each form the first of its group.

        Args:
            texts: an answer of each form.
            paths: how many have each form.
            seconds: see `paths`.
        """
        forms = sorted(texts, key=lambda form: (len(form), form))
        first = {form: form for form in forms}
        ends = time.monotonic() + min(seconds, self._left_s)
        for one, two in itertools.combinations(forms, 2):
            if first[one] != first[two] and self._are_equal(one, two, texts, ends):
                low, high = sorted((first[one], first[two]), key=forms.index)
                first = {form: low if of == high else of for form, of in first.items()}
        for name in set(first.values()):
            linked = [form for form in forms if first[form] == name]
            different = {
                frozenset((one, two))
                for one, two in itertools.combinations(linked, 2)
                if self._are_equal(one, two, texts, ends) is False
            }
            if different:
                for group in _without(different, linked, paths):
                    first |= dict.fromkeys(group, group[0])
        return first

    def _are_equal(self, one: str, two: str, texts: Mapping[str, str], ends: float) -> bool | None:
        """Whether two forms are equal; None if that was not decided in time."""
        same: Callable[..., bool] | None = getattr(self._task, "same_answer", None)
        if same is None:
            return False
        if (one, two) not in self._equal:
            began = time.monotonic()
            left = max(0.0, ends - began) if self._compares else 0.0
            given = (self._problem, texts[one], texts[two])
            if isinstance(self._task, CheckedTask):
                equal = left > 0 and same(*given)
            else:
                equal = same(*given, left)
            now = time.monotonic()
            self._left_s = max(0.0, self._left_s - (now - began))
            if not equal and self._compares and now >= ends:
                return None
            self._equal[one, two] = equal
        return self._equal[one, two]


def _without(
    different: Set[frozenset[str]], forms: Sequence[str], paths: Mapping[str | None, int]
) -> list[list[str]]:
    """Groups of forms without a pair of different ones.

    A form that equals two different ones comes last, and goes with the most paths.

    Args:
        different: the pairs that are not equal.
        forms: of the groups.
        paths: how many have each form.
    """

    def links(form: str) -> bool:
        equal = [each for each in forms if frozenset((form, each)) not in different]
        return any(frozenset(pair) in different for pair in itertools.combinations(equal, 2))

    groups: list[list[str]] = []
    for form in sorted(forms, key=links):
        fitting = [
            group
            for group in groups
            if all(frozenset((form, each)) not in different for each in group)
        ]
        if fitting:
            max(fitting, key=lambda group: sum(paths[each] for each in group)).append(form)
        else:
            groups.append([form])
    return groups


def ranked(aggregate: Aggregate, paths: Sequence[FinishedPath]) -> tuple[AnswerVotes, ...]:
    """An aggregate's ranking, checked where it is a plug-in's.

    Raises:
        UsageError: it raised an exception, or what it returned is not `AnswerVotes` of these paths.
    """
    if type(aggregate).__module__.startswith("arbor."):
        return tuple(aggregate.rank(paths))
    known = {path.node for path in paths if path.answer is not None}
    calls = PluginCalls("aggregate", aggregate)
    found = calls.each_right(
        "rank",
        lambda: aggregate.rank(paths),
        lambda each: isinstance(each, AnswerVotes),
        "AnswerVotes",
    )
    for votes in found:
        for part, wanted in _wrong_in(votes, known):
            raise calls.wrong("rank", {part: getattr(votes, part)}, wanted)
    return tuple(
        dataclasses.replace(
            each, votes=int(each.votes), score=float(each.score), paths=tuple(map(int, each.paths))
        )
        for each in found
    )


def _wrong_in(votes: AnswerVotes, known: Set[int]) -> Iterator[tuple[str, str]]:
    """The parts of a plug-in's votes that are wrong, with what they have to be.

    Args:
        votes: for one answer.
        known: ids of the last blocks of paths with an answer.
    """
    if not isinstance(votes.answer, str):
        yield "answer", "a text"
    if not is_count(votes.votes):
        yield "votes", "a whole number of at least 1"
    if not is_finite(votes.score):
        yield "score", "a finite number"
    paths = votes.paths if isinstance(votes.paths, list | tuple) else ()
    if not paths or not all(isinstance(each, Integral) and each in known for each in paths):
        yield "paths", "ids of finished paths with an answer"


def confidence(aggregate: Aggregate, votes: Sequence[AnswerVotes]) -> float:
    """The confidence in the first of the ranked answers: the aggregate's own, else its score.

    Raises:
        UsageError: a plug-in's confidence is not a finite number, or it raised an exception.
    """
    if not isinstance(aggregate, Confident):
        return votes[0].score
    found = PluginCalls("aggregate", aggregate).right(
        "confidence", lambda: aggregate.confidence(votes), is_finite, "a finite number"
    )
    return float(found)
