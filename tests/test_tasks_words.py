"""Chains and recall: generators, exact values, graders, splits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from arbor.errors import InputError
from arbor.tasks.chains import (
    Chains,
)
from arbor.tasks.recall import Recall
from arbor.tasks.splits import split_of

CHAINS = Chains()
RECALL = Recall()
TASKS = [CHAINS, RECALL]
TEXT = (
    "Facts: Tom has 4 more than Amy. Bob has 7. Amy has 3. Sue has 2 times as many as Tom. "
    "How many does Sue have?"
)
AMY = "Then Amy has 3: Amy = 3\n"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_solution_is_worth_one_at_each_step_and_grades_correct(
    task: Chains | Recall, split: str
) -> None:
    for problem in task.problems(split, 25):
        path = task.solution(problem)
        assert [task.value(problem, path[:i]) for i in range(len(path) + 1)] == [1.0] * (
            len(path) + 1
        )
        assert [task.is_terminal(problem, path[:i]) for i in range(len(path))] == [False] * len(
            path
        )
        assert task.is_terminal(problem, path)
        assert task.grade(problem, task.answer(problem, path)).correct
        assert len(path) <= task.boundary.max_depth
        assert task.parse(problem.text) == problem
        assert split_of(problem.id) == split


@pytest.mark.parametrize(
    "thoughts",
    [
        ["Then Amy has 4: Amy = 4\n"],  # not the fact
        ["Then Tom has 4 more than Amy: Amy = 3, 3 + 4 = 7, Tom = 7\n"],  # Amy is not known yet
        [AMY, "Then Tom has 4 more than Amy: Amy = 3, 3 + 4 = 8, Tom = 8\n"],
        [AMY, "Then Tom has 4 more than Amy: Amy = 2, 2 + 5 = 7, Tom = 7\n"],
        [AMY, "Then Tom has 4 more than Amy: Amy = 3, 3 + 4 = 7, Tom = 8\n"],
        [AMY, "Then Tom has 4 more than Amy\n"],
        ["Answer: 14\n"],  # not worked out
        ["Plan: Sue Amy\n"],
        [AMY, "Plan: Sue Tom Amy\n"],
        ["Amy has 3\n"],
        [""],
    ],
)
def test_a_wrong_line_is_worth_nothing(thoughts: list[str]) -> None:
    assert CHAINS.value(CHAINS.parse(TEXT), thoughts) == 0.0


@pytest.mark.parametrize("key", ["14", "14.", "Answer: 14", "the answer is 14"])
def test_a_key_is_read_as_an_answer_is(key: str) -> None:
    problem = replace(CHAINS.parse(TEXT), expected=key)

    assert CHAINS.grade(problem, "14").correct
    assert not CHAINS.grade(problem, "13").correct


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("Tom has 9 fewer than Amy. Amy has 3. How many does Tom have?", "gives Tom -6"),
        ("Tom has 3 fewer than Amy. Amy has 3. How many does Amy have?", "gives Tom 0"),
        ("Tom has 9 times as many as Amy. Amy has 99. How many does Tom have?", "gives Tom 891"),
    ],
)
def test_quantities_are_from_1_to_99(facts: str, words: str) -> None:
    with pytest.raises(InputError, match=f"{words}, which is not from 1 to 99"):
        CHAINS.parse(f"Facts: {facts}")


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"P{a}{b}{c}" for a in letters[:3] for b in letters for c in letters][:1500]
    facts = [f"{names[0]} has 5"]
    for place, (above, name) in enumerate(pairwise(names)):
        facts.append(f"{name} has 1 {'fewer' if place % 2 else 'more'} than {above}")

    problem = CHAINS.parse(f"Facts: {'. '.join(facts)}. How many does {names[-1]} have?")

    assert (problem.expected, problem.data["steps"]) == ("6", 1500)
    assert CHAINS.value(problem, CHAINS.solution(problem)) == 1.0


def test_a_key_that_is_no_number_is_named() -> None:
    grade = CHAINS.grade(replace(CHAINS.parse(TEXT), expected="seven"), "14")

    assert not grade.correct and grade.reason == "The key 'seven' is not a number."


def test_a_key_of_recall_is_read_as_an_answer_is() -> None:
    problem = next(RECALL.problems("train", 1))
    way = problem.expected
    assert way is not None

    assert RECALL.grade(replace(problem, expected=f"Answer: {way}."), way).correct
