"""Answers of a search: equal answers grouped, an aggregate's ranking, and its confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arbor.aggregate.base import Aggregate, AnswerVotes, FinishedPath
from arbor.aggregate.confidence import Confident
from arbor.run.plugin_answers import Answers, CheckedTask, is_finite, path_answer
from arbor.tasks.base import Problem, Task
from arbor.tree import Node


def finished_paths(task: Task, problem: Problem, leaves: Sequence[Node]) -> list[FinishedPath]:
    """The finished paths of a search, their answers compared by the task.

    An answer joins the first one that it equals: by the task's `same_answer` where it has one, else
    by the canonical form that its grader extracts. Whether an answer is right plays no part.

    Args:
        leaves: terminal blocks, best first.
    """
    same: Callable[[Problem, str, str], bool] | None = getattr(task, "same_answer", None)
    groups: list[tuple[str, str]] = []  # the first answer of each, and its canonical form

    def group_of(answer: str) -> int:
        form = _canonical(task, problem, answer)
        for number, (other, known) in enumerate(groups):
            if form == known or (same is not None and same(problem, other, answer)):
                return number
        groups.append((answer, form))
        return len(groups) - 1

    found = []
    for leaf in leaves:
        answer, _ = path_answer(task, problem, leaf)
        group = None if answer is None else group_of(answer)
        values = tuple(node.value if node.score is None else node.score for node in leaf.path[1:])
        found.append(FinishedPath(leaf.id, answer, group, values))
    return found


def _canonical(task: Task, problem: Problem, answer: str) -> str:
    """The text that the grader extracts; a plug-in's grader is not asked without an answer key."""
    keyless = problem.expected is None and isinstance(task, CheckedTask)
    extracted = None if keyless else task.grade(problem, answer).extracted
    return answer.strip() if extracted is None else extracted


def ranked(aggregate: Aggregate, paths: Sequence[FinishedPath]) -> tuple[AnswerVotes, ...]:
    """An aggregate's ranking, checked where it is a plug-in's.

    Raises:
        UsageError: it raised an exception, or its first answer is not one of these paths'.
    """
    if type(aggregate).__module__.startswith("arbor."):
        return tuple(aggregate.rank(paths))
    answers = Answers("aggregate", aggregate)
    found = answers.of("rank", lambda: aggregate.rank(paths))
    known = {path.node: path.answer for path in paths if path.answer is not None}
    if not isinstance(found, list | tuple) or not all(
        isinstance(each, AnswerVotes) and each.paths and all(node in known for node in each.paths)
        for each in found
    ):
        raise answers.wrong("rank", found, "AnswerVotes with paths of the search")
    return tuple(found)


def confidence(aggregate: Aggregate, votes: Sequence[AnswerVotes]) -> float:
    """The confidence in the first of the ranked answers: the aggregate's own, else its score.

    Args:
        aggregate: that ranked them.
        votes: every answer, best first; at least one.

    Raises:
        UsageError: a plug-in's confidence is not a finite number, or it raised an exception.
    """
    if not isinstance(aggregate, Confident):
        return votes[0].score
    answers = Answers("aggregate", aggregate)
    found = answers.of("confidence", lambda: aggregate.confidence(votes))
    if not is_finite(found):
        raise answers.wrong("confidence", found, "a finite number")
    return float(found)
