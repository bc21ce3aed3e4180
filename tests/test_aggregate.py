"""Aggregates against tables computed by hand, and what holds for any finished paths."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from arbor import Solver
from arbor.aggregate.argmax import Argmax
from arbor.aggregate.base import Aggregate, AnswerVotes, FinishedPath, reduced, total
from arbor.aggregate.best import Best
from arbor.aggregate.majority import Majority
from arbor.aggregate.weighted import Weighted
from arbor.errors import UsageError
from arbor.run.answers import AnswerGroups, compares_answers, ranked
from arbor.run.plugin_answers import checked_task
from arbor.tasks.base import Problem
from arbor.tasks.game24 import Game24
from arbor.tasks.grading import mathematics
from arbor.tasks.grading.worker import Reply
from arbor.tasks.reasoning import Math, Reasoning
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

REFUSED = Reply("answered", {"equal": False})
# Best first, as a controller ranks them: by the last value.
PATHS = [
    FinishedPath(1, None, None, (1.0,)),
    FinishedPath(2, "a", 0, (0.1, 0.9)),
    FinishedPath(3, "b", 1, (0.8, 0.6)),
    FinishedPath(4, " b", 1, (0.2, 0.7)),
    FinishedPath(5, "c", 2, (0.5, 0.4)),
    FinishedPath(6, "c ", 2, (0.6, 0.4)),
]


def table(aggregate: Aggregate) -> list[tuple[str, int, float, tuple[int, ...]]]:
    return [
        (each.answer, each.votes, round(each.score, 4), each.paths)
        for each in aggregate.rank(PATHS)
    ]


@pytest.mark.parametrize("steps", ["last", "min", "mean", "product"])
def test_scores_of_values_whose_sum_is_beyond_any_float_are_finite(steps: Any) -> None:
    huge = [replace(path, values=(1e308, 1.7e308)) for path in PATHS]

    for aggregate in (Weighted(steps), Argmax(steps)):
        scores = [each.score for each in aggregate.rank(huge)]
        assert all(map(math.isfinite, scores)) and min(scores) >= 1e308
    assert reduced((1e308, 1.7e308, 1.5e308), "mean") == 1.4e308
    assert reduced((0.1, 0.7, 0.4), "mean") == math.fsum((0.1, 0.7, 0.4)) / 3
    assert total([5e-324]) == reduced((5e-324,), "mean") == 5e-324


def test_majority_counts_paths_and_leaves_ties_to_the_order_of_the_controller() -> None:
    assert table(Majority()) == [("b", 2, 2, (3, 4)), ("c", 2, 2, (5, 6)), ("a", 1, 1, (2,))]
    unvalued = [replace(path, values=(0.0,)) for path in PATHS]
    assert [each.answer for each in Majority().rank(unvalued)] == ["b", "c", "a"]


@st.composite
def finished(draw: st.DrawFn) -> list[FinishedPath]:
    groups = draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12))
    values = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=4)
    return [
        FinishedPath(node, None if group is None else "abcd"[group], group, tuple(draw(values)))
        for node, group in enumerate(groups)
    ]


# Equal answers ------------------------------------------------------------------------------------


def leaves(texts: Sequence[str]) -> list[Node]:
    """Finished paths of one thought each."""
    tree = ThoughtTree([0])
    found = []
    for text in texts:
        node = tree.fork(tree.root)
        node.text, node.state, node.value = text, NodeState.TERMINAL, 0.5
        found.append(node)
    return found


def test_equal_scores_go_by_the_order_of_the_controller() -> None:
    paths = [
        FinishedPath(0, "2", 0, (0.1, 0.9)),
        FinishedPath(1, "0", 1, (0.5, 0.8)),
        FinishedPath(2, "2", 0, (0.5, 0.7)),
    ]

    assert Argmax("min").rank(paths)[0].answer == "0"


@pytest.mark.parametrize("expected", [None, "7"])
def test_answers_are_equal_as_the_task_compares_them(expected: str | None) -> None:
    texts = ["Answer: 1/2", "Answer: 0.5", "Answer: 7", "so nothing", "Answer: 7.0"]
    task = Reasoning()
    problem = Problem("id", task.name, "a question", expected)

    paths = AnswerGroups(task, problem).paths(leaves(texts))

    groups = [path.group for path in paths]
    assert groups[0] == groups[1] and groups[2] == groups[4] and groups[0] != groups[2]
    assert task.same_answer(problem, "1/2", "0.5")
    assert not task.same_answer(problem, "1/2", "2")


@pytest.mark.parametrize(
    "texts", list(itertools.permutations(["50", "0.5", "50\\%", "\\frac{1}{2}"]))[::5]
)
def test_the_groups_do_not_depend_on_the_order_of_paths(texts: Sequence[str]) -> None:
    """A grader takes 50 % for 50 as well as for 0.5; a vote takes it for 50."""
    task = Math()
    problem = Problem("id", task.name, "a question", None)
    ends = leaves([f"So \\boxed{{{each}}}." for each in texts])

    paths = AnswerGroups(task, problem).paths(ends)

    together = {frozenset(p.answer for p in paths if p.group == group) for group in range(2)}
    assert together == {frozenset({"50", "50\\%"}), frozenset({"0.5", "\\frac{1}{2}"})}


@pytest.mark.parametrize(
    ("texts", "together"),
    [
        (["7", "7", "(a, b)", "(b, a)", "a, b"], [{"(a, b)", "a, b"}, {"(b, a)"}, {"7"}]),
        (["(a, b)", "(b, a)", "(b, a)", "a, b"], [{"(b, a)", "a, b"}, {"(a, b)"}]),
        (["a, b", "b, a"], [{"a, b", "b, a"}]),
    ],
)
def test_a_third_answer_joins_no_two_that_differ(
    texts: Sequence[str], together: list[set[str]]
) -> None:
    """A list without brackets equals a pair in either order; it goes with the more frequent one."""
    task = Math()
    for order in list(itertools.permutations(texts))[::23]:
        ends = leaves([f"So \\boxed{{{each}}}." for each in order])

        paths = AnswerGroups(task, Problem("id", task.name, "a question", None)).paths(ends)

        groups = {path.group for path in paths}
        found = [{p.answer for p in paths if p.group == group} for group in groups]
        assert sorted(map(sorted, found)) == sorted(map(sorted, together))


@pytest.mark.parametrize(
    ("aggregate", "compares"),
    [(Best(), False), (Argmax(), False), (Majority(), True), (Weighted(), True)],
)
def test_only_an_aggregate_that_votes_has_answers_compared(
    aggregate: Aggregate, compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the process that compares mathematics is asked about x+1 and 1+x."""
    pytest.importorskip("math_verify")
    asked: list[Any] = []
    monkeypatch.setattr(mathematics, "_compare", lambda *given: asked.append(given) or REFUSED)
    groups = AnswerGroups(Math(), Problem("id", "math", "?"), compares=compares_answers(aggregate))

    groups.paths(leaves(["\\boxed{x+1}", "\\boxed{1+x}", "\\boxed{0.5}", "\\boxed{1/2}"]))

    assert bool(asked) is compares


# Through the solver -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Last:
    """An aggregate of a plug-in: the answer of the last path, or something else."""

    instead: Any = None

    def rank(self, paths: Sequence[FinishedPath]) -> Any:
        if self.instead is not None:
            return self.instead
        answered = [path for path in paths if path.answer is not None]
        return [AnswerVotes(str(answered[-1].answer), 1, 0.5, (answered[-1].node,))]


def test_a_plug_in_chooses_the_answer() -> None:
    with Solver(controller="best-of-n", verifier="exact", aggregate=Last()) as solver:
        solution = solver.solve("4 5 6 10")
    answered = [each for each in solution.candidates if each.answer is not None]
    assert solution.path[-1] == answered[-1].node
    assert solution.answer == answered[-1].answer

    with pytest.raises(UsageError) as caught:
        ranked(Last(), [])
    assert caught.value.code == "aggregate-raised"


def votes(**parts: Any) -> list[AnswerVotes]:
    first = AnswerVotes("a", 1, 1.0, (2,))
    return [first, replace(AnswerVotes("b", 2, 1.0, (3, 4)), **parts)]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("b", "with 'b', not AnswerVotes"),
        (["b"], "with 'b', not AnswerVotes"),
        (votes(answer=None), "with {'answer': None}, not a text"),
        (votes(votes=1.5), "with {'votes': 1.5}, not a whole number of at least 1"),
        (votes(votes="2"), "with {'votes': '2'}, not a whole number of at least 1"),
        (votes(score=math.nan), "with {'score': nan}, not a finite number"),
        (votes(score="high"), "with {'score': 'high'}, not a finite number"),
        (votes(paths=3), "with {'paths': 3}, not ids of finished paths with an answer"),
        (votes(paths=()), "with {'paths': ()}, not ids of finished paths with an answer"),
        (votes(paths=(3, 1)), "with {'paths': (3, 1)}, not ids of finished paths"),
        (votes(paths=(3, [4])), "with {'paths': (3, [4])}, not ids of finished paths"),
    ],
)
def test_what_a_plug_in_ranks_is_checked_and_the_fault_shown(returned: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        ranked(Last(returned), PATHS)

    assert caught.value.code == "aggregate-answer"
    assert f"test_aggregate:Last' answered 'rank' {words}" in caught.value.message


def test_numbers_of_numpy_in_votes_become_plain_ones() -> None:
    found = ranked(
        Last(votes(votes=np.int64(2), score=np.float64(0.5), paths=[np.int64(3)])), PATHS
    )

    assert json.dumps(asdict(found[1])) == json.dumps(
        {"answer": "b", "votes": 2, "score": 0.5, "paths": [3]}
    )


@dataclass(frozen=True)
class OwnEquality(Game24):
    """A task of a plug-in whose comparison fails for some problems, or answers something else."""

    refuses: str = "4"
    answers: Any = True

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return "".join(thoughts)[-3:]

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        if "".join(thoughts) == "fails":
            raise LookupError
        return False

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        if problem.text.startswith(self.refuses):
            raise ValueError("no such comparison")
        same: bool = self.answers
        return same


@pytest.mark.parametrize(
    ("task", "texts", "code", "member"),
    [
        (OwnEquality(), ["a", "b"], "task-raised", "same_answer"),
        (OwnEquality(refuses="none", answers=None), ["a", "b"], "task-answer", "same_answer"),
        (OwnEquality(), ["fails"], "task-raised", "is_guess"),
    ],
)
def test_a_comparison_of_a_plug_in_is_checked(
    task: OwnEquality, texts: list[str], code: str, member: str
) -> None:
    groups = AnswerGroups(checked_task(task), Problem("id", "own", "4 5 6 10"))

    with pytest.raises(UsageError) as caught:
        groups.paths(leaves(texts))

    assert (caught.value.code, caught.value.data["member"]) == (code, member)


def test_a_comparison_that_raises_ends_its_own_problem_only() -> None:
    with Solver(
        task=OwnEquality(), controller="best-of-n,samples=8", aggregate="majority", max_depth=1
    ) as solver:
        found = solver.solve_batch(["1 2 3 4", "4 5 6 10", "2 3 4 6"], on_error="return")

    assert [each.error and each.error["code"] for each in found] == [None, "task-raised", None]
