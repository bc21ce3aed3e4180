"""Aggregates against tables computed by hand, and what holds for any finished paths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeTask, Key

from arbor import Solver
from arbor.aggregate.argmax import Argmax
from arbor.aggregate.base import Aggregate, AnswerVotes, FinishedPath, path_score
from arbor.aggregate.best import Best
from arbor.aggregate.majority import Majority
from arbor.aggregate.weighted import Weighted
from arbor.errors import UsageError
from arbor.run.answers import AnswerGroups, compares_answers, ranked
from arbor.run.plugin_answers import CheckedTask, checked_task, is_guess
from arbor.run.solution import Solution
from arbor.tasks.base import Grade, Problem
from arbor.tasks.grading import mathematics
from arbor.tasks.grading.worker import Reply
from arbor.tasks.math import Math
from arbor.tasks.reasoning import Reasoning
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

REFUSED = Reply("answered", {"equal": False})
STEPS = ("last", "min", "mean", "product")

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


def test_the_best_path_with_an_answer_is_the_default() -> None:
    assert table(Best()) == [("a", 1, 0.9, (2,)), ("b", 2, 0.6, (3, 4)), ("c", 2, 0.4, (5, 6))]
    assert Solver().aggregate == Best()


def test_argmax_takes_the_highest_score() -> None:
    assert table(Argmax()) == [("a", 1, 0.9, (2,)), (" b", 2, 0.7, (4, 3)), ("c", 2, 0.4, (5, 6))]
    assert table(Argmax("min")) == [
        ("b", 2, 0.6, (3, 4)),
        ("c", 2, 0.4, (5, 6)),
        ("a", 1, 0.1, (2,)),
    ]
    assert [row[0] for row in table(Argmax("mean"))] == ["b", "a", "c "]  # 0.7, 0.5, 0.5
    assert [row[2] for row in table(Argmax("product"))] == [0.48, 0.24, 0.09]


def test_majority_counts_paths_and_leaves_ties_to_the_order_of_the_controller() -> None:
    assert table(Majority()) == [("b", 2, 2, (3, 4)), ("c", 2, 2, (5, 6)), ("a", 1, 1, (2,))]
    unvalued = [replace(path, values=(0.0,)) for path in PATHS]
    assert [each.answer for each in Majority().rank(unvalued)] == ["b", "c", "a"]


def test_weighted_sums_the_scores() -> None:
    assert table(Weighted()) == [
        (" b", 2, 1.3, (4, 3)),
        ("a", 1, 0.9, (2,)),
        ("c", 2, 0.8, (5, 6)),
    ]
    assert [row[2] for row in table(Weighted("mean"))] == [1.15, 0.95, 0.5]


def test_a_path_is_scored_by_its_values() -> None:
    path = FinishedPath(1, "a", 0, (0.5, 0.25, 0.75))

    scores = {steps: path_score(path, steps) for steps in STEPS}  # type: ignore[arg-type]
    assert scores == {"last": 0.75, "min": 0.25, "mean": 0.5, "product": 0.09375}
    assert path_score(FinishedPath(0, "a", 0, ()), "min") == 0.0


@pytest.mark.parametrize("cls", [Argmax, Weighted])
def test_an_unknown_score_is_refused(cls: type) -> None:
    with pytest.raises(UsageError, match="steps='max'") as caught:
        cls("max")

    assert caught.value.code == "setting-range"


@st.composite
def finished(draw: st.DrawFn) -> list[FinishedPath]:
    groups = draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12))
    values = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=4)
    return [
        FinishedPath(node, None if group is None else "abcd"[group], group, tuple(draw(values)))
        for node, group in enumerate(groups)
    ]


every = st.one_of(
    st.just(Best()),
    st.builds(Argmax, st.sampled_from(STEPS)),
    st.just(Majority()),
    st.builds(Weighted, st.sampled_from(STEPS)),
)


@given(every, finished())
def test_every_answered_path_votes_once(aggregate: Any, paths: list[FinishedPath]) -> None:
    votes = aggregate.rank(paths)

    voted = [node for each in votes for node in each.paths]
    assert sorted(voted) == [path.node for path in paths if path.answer is not None]
    assert all(each.votes == len(each.paths) for each in votes)
    answers = {path.node: path.answer for path in paths}
    assert all({answers[node] for node in each.paths} == {each.answer} for each in votes)
    assert len({each.answer for each in votes}) == len(votes)


@given(finished(), st.sampled_from(STEPS))
def test_the_first_answer_is_the_one_that_counting_finds(
    paths: list[FinishedPath], steps: Any
) -> None:
    answered = [path for path in paths if path.answer is not None]
    if not answered:
        assert all(each.rank(paths) == [] for each in (Best(), Argmax(steps), Majority()))
        return
    count = {a: sum(path.answer == a for path in answered) for a in "abcd"}
    total = {
        a: math.fsum(path_score(path, steps) for path in answered if path.answer == a)
        for a in "abcd"
    }

    assert Best().rank(paths)[0].answer == answered[0].answer
    top = Argmax(steps).rank(paths)[0]
    assert top.score == max(path_score(path, steps) for path in answered)
    assert count[Majority().rank(paths)[0].answer] == max(count.values())
    assert total[Weighted(steps).rank(paths)[0].answer] == max(total.values())


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


@dataclass(frozen=True)
class Near(FakeTask):
    """A task that takes neighbours in the alphabet for the same, and notes what it is asked."""

    asked: list[str] = field(default_factory=list)

    def same_answer(
        self, problem: Problem, first: str, second: str, seconds: float = math.inf
    ) -> bool:
        self.asked.append(f"{first}{second} {seconds > 0}")
        return seconds > 0 and abs(ord(first) - ord(second)) == 1


@pytest.mark.parametrize("texts", list(itertools.permutations(["a!", "b!", "c!", "f!"]))[::5])
def test_answers_are_together_where_a_third_one_equals_both(texts: Sequence[str]) -> None:
    paths = AnswerGroups(Near(), Problem("id", "fake", "fake")).paths(leaves(texts))

    groups = {path.answer: path.group for path in paths}
    assert groups["a"] == groups["b"] == groups["c"] != groups["f"]


def test_each_pair_is_compared_once_in_a_search() -> None:
    task = Near()
    groups = AnswerGroups(task, Problem("id", "fake", "fake"))

    groups.paths(leaves(["a!", "f!"]))
    groups.paths(leaves(["f!", "a!", "k!", "a!"]))

    assert sorted(task.asked) == ["af True", "ak True", "fk True"]


def test_without_time_left_answers_are_equal_only_at_sight_and_nothing_is_kept() -> None:
    groups = AnswerGroups(Near(), Problem("id", "fake", "fake"))
    ends = leaves(["a!", "b!", "a!"])

    assert [path.group for path in groups.paths(ends, seconds=0.0)] == [0, 1, 0]
    assert [path.group for path in groups.paths(ends)] == [0, 0, 0]


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


@dataclass(frozen=True)
class Lower(FakeTask):
    """A task whose grader ignores case."""

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        extracted = None if answer is None else answer.lower()
        return Grade(extracted == problem.expected, extracted, "Same text or not.")


@pytest.mark.parametrize("expected", [None, "x"])
def test_a_graders_canonical_form_is_compared_and_not_its_judgement(expected: str | None) -> None:
    ends = leaves(["x!", "X!", "y!", "nothing", "z!"])

    paths = AnswerGroups(Lower(), Problem("id", "fake", "fake", expected)).paths(ends)

    assert [path.group for path in paths] == [0, 0, 1, None, 2]


@dataclass(frozen=True)
class Keyed(FakeTask):
    """A task of a plug-in whose grader needs a key."""

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        assert problem.expected is not None, "there is a key"
        return super().grade(problem, answer.lower() if answer else None)


def test_a_plug_ins_grader_is_asked_only_with_an_answer_key() -> None:
    task = checked_task(Keyed())
    ends = leaves(["x!", " X!", "x!"])

    def groups(expected: str | None) -> list[int | None]:
        problem = Problem("id", "fake", "fake", expected)
        return [path.group for path in AnswerGroups(task, problem).paths(ends)]

    assert groups(None) == [0, 1, 0]
    assert groups("x") == [0, 1, 0]


class Guessing(FakeTask):
    """A task of a plug-in all of whose answers are guesses."""

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return True


def test_the_optional_parts_of_a_plug_in_are_found_where_isinstance_looks_at_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from Python 3.12 on, where a protocol does not see what ``__getattr__`` finds."""
    monkeypatch.delattr(CheckedTask, "__getattr__")
    (leaf,) = leaves(["x!"])
    problem = Problem("id", "fake", "fake", "x")

    assert is_guess(checked_task(Guessing()), problem, leaf)
    assert not is_guess(checked_task(Keyed()), problem, leaf)


# Through the solver -------------------------------------------------------------------------------


def test_the_votes_are_part_of_the_solution() -> None:
    sampling = {"temperature": 0.7, "top_k": 40}
    with Solver(controller="chain,samples=40", aggregate="majority", sampling=sampling) as solver:
        solution = solver.solve("4 5 6 10")
        again = Solver.from_config(solution.config)

    answered = [each for each in solution.candidates if each.answer is not None]
    assert sum(each.votes for each in solution.votes) == len(answered)
    assert solution.votes[0].votes > solution.votes[-1].votes
    assert solution.answer == solution.votes[0].answer
    assert solution.path[-1] == solution.votes[0].paths[0]
    assert solution.config["aggregate"] == {"name": "majority"}
    assert again.aggregate == Majority()
    assert Solution.from_dict(solution.to_dict()).votes == solution.votes
    older = {key: value for key, value in solution.to_dict().items() if key != "votes"}
    assert Solution.from_dict(older).votes == ()


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_vote_has_the_time_that_the_search_has_left(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    paths = AnswerGroups.paths
    monkeypatch.setattr(
        AnswerGroups,
        "paths",
        lambda self, leaves, seconds: given.append(seconds) or paths(self, leaves, seconds),
    )
    with Solver(controller="chain,samples=4", aggregate="majority") as solver:
        solver.solve("4 5 6 10", timeout=timeout, confidence=0.99)

    assert len(given) > 1 and all(each <= (timeout or math.inf) for each in given)
    assert math.isinf(given[-1]) is (timeout is None)


@dataclass(frozen=True)
class Last:
    """An aggregate of a plug-in: the answer of the last path."""

    wrong: bool = False

    def rank(self, paths: Sequence[FinishedPath]) -> list[AnswerVotes]:
        if self.wrong:
            return [AnswerVotes("made up", 1, 1.0, (0,))]
        answered = [path for path in paths if path.answer is not None]
        return [AnswerVotes(str(answered[-1].answer), 1, 0.5, (answered[-1].node,))]


def test_a_plug_in_chooses_the_answer_and_is_checked() -> None:
    with Solver(controller="best-of-n", verifier="exact", aggregate=Last()) as solver:
        solution = solver.solve("4 5 6 10")
    answered = [each for each in solution.candidates if each.answer is not None]
    assert solution.path[-1] == answered[-1].node
    assert solution.answer == answered[-1].answer

    with pytest.raises(UsageError) as caught:
        ranked(Last(wrong=True), PATHS)
    assert caught.value.code == "aggregate-answer"
    with pytest.raises(UsageError) as caught:
        ranked(Last(), [])
    assert caught.value.code == "aggregate-raised"


@pytest.mark.parametrize("key", list(itertools.islice(itertools.permutations(range(3)), 4)))
def test_the_order_of_paths_decides_only_between_equals(key: Key) -> None:
    paths = [FinishedPath(place, "abc"[place], place, (0.5,)) for place in key]

    for aggregate in (Best(), Argmax(), Majority(), Weighted()):
        assert [each.paths[0] for each in aggregate.rank(paths)] == list(key)
