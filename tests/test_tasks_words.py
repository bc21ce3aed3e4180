"""Chains and recall: generators, exact values, graders, splits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import InputError, UsageError
from arbor.tasks.base import Task
from arbor.tasks.chains import (
    LARGEST,
    MORE_NAMES,
    NAMES,
    Chains,
    chain_to,
    generate,
    parse_fact,
    quantities,
)
from arbor.tasks.recall import Recall
from arbor.tasks.splits import content_id, split_of

CHAINS = Chains()
RECALL = Recall()
TASKS = [CHAINS, RECALL]
TEXT = (
    "Facts: Tom has 4 more than Amy. Bob has 7. Amy has 3. Sue has 2 times as many as Tom. "
    "How many does Sue have?"
)
AMY = "Then Amy has 3: Amy = 3\n"
ROOMS = "Rooms: K has B R. B has M. M is empty. R has T D. T is empty. D is empty. Find D from K"


def test_both_are_tasks() -> None:
    assert all(isinstance(task, Task) for task in TASKS)


def test_the_solution_of_the_example_is_the_one_in_the_docstring() -> None:
    problem = CHAINS.parse(TEXT)
    assert CHAINS.prompt(problem) == TEXT + "\n"
    assert CHAINS.solution(problem) == [
        "Plan: Sue Tom Amy\n",
        "Then Amy has 3: Amy = 3\n",
        "Then Tom has 4 more than Amy: Amy = 3, 3 + 4 = 7, Tom = 7\n",
        "Then Sue has 2 times as many as Tom: Tom = 7, 7 * 2 = 14, Sue = 14\n",
        "Answer: 14\n",
    ]
    assert problem.expected == "14"
    rooms = RECALL.parse(ROOMS)
    assert RECALL.solution(rooms) == [
        "Enter K: B R\n",
        "Enter B: M\n",
        "Enter M: empty\n",
        "Back to K: R\n",
        "Enter R: T D\n",
        "Enter T: empty\n",
        "Back to R: D\n",
        "Enter D: found\n",
        "Answer: K R D\n",
    ]


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


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_the_stream_is_fixed(task: Chains | Recall) -> None:
    found = {
        split: [p.id for p in task.problems(split, 40)] for split in ("train", "validation", "test")
    }
    ids = [identity for split in found.values() for identity in split]
    assert len(set(ids)) == len(ids)
    assert found == {split: [p.id for p in task.problems(split, 40)] for split in found}


@given(st.integers(0, 10**9), st.integers(2, 16), st.integers(0, 4), st.integers(1, 4))
def test_generated_facts_lead_to_the_answer(
    seed: int, steps: int, others: int, recall: int
) -> None:
    facts, asked = generate(random.Random(seed), steps, others, recall)
    assert len(facts) == steps + others
    known = quantities(facts)
    assert all(1 <= value <= LARGEST for value in known.values())
    assert len(known) == len(facts)
    assert len(chain_to(facts, asked)) == steps
    assert [parse_fact(fact.text) for fact in facts] == facts


def test_problems_with_more_people_than_usual_draw_from_more_names() -> None:
    task = Chains(fewest=32, most=32)
    names = set()
    for problem in task.problems("test", 6):
        path = task.solution(problem)
        order = chain_to(task.facts(problem), problem.data["asked"])
        assert len(order) == 32 and len({fact.who for fact in order}) == 32
        assert task.value(problem, path) == 1.0 and len(path) == 34 <= task.boundary.max_depth
        assert task.parse(problem.text) == problem
        names |= {fact.who for fact in order}
    assert names > set(NAMES) and names <= {*NAMES, *MORE_NAMES}
    # those that fit draw from the names they always had
    assert Chains().people == Chains(most=20).people == NAMES
    assert Chains(most=20, distractors=5).people == (*NAMES, *MORE_NAMES)
    assert CHAINS.boundary.max_tokens == 48


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (Chains, {"most": 41}, "most=41: it must be at most 40"),
        (Chains, {"fewest": 1}, "fewest=1: it must be from 2 to most=16"),
        (Chains, {"fewest": 17}, "fewest=17"),
        (Chains, {"distractors": -1}, "distractors=-1"),
        (Chains, {"recall": 0}, "recall=0"),
        (Recall, {"most": 27}, "most=27: rooms must be 2 to 26"),
        (Recall, {"fewest": 17}, "fewest=17"),
        (Recall, {"fewest": 1}, "fewest=1"),
    ],
)
def test_sizes_are_checked(kind: Any, settings: dict[str, int], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        kind(**settings)


def test_recall_distance_is_the_number_of_lines_back() -> None:
    for distance in (1, 3, 5):
        seen = 0
        for seed in range(20):
            facts, asked = generate(random.Random(seed), 10, 0, distance)
            order = [fact.who for fact in chain_to(facts, asked)]
            for fact in facts:
                if fact.kind == "sum":
                    seen += 1
                    near, far = (order.index(name) for name in fact.needs)
                    assert near - far == distance
                    assert order.index(fact.who) - near == 1
        assert seen


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


def test_a_true_line_that_leads_nowhere_is_no_mistake() -> None:
    assert CHAINS.value(CHAINS.parse(TEXT), ["Then Bob has 7: Bob = 7\n", AMY]) == 1.0


def test_the_wrong_room_is_worth_nothing() -> None:
    problem = RECALL.parse(ROOMS)
    path = RECALL.solution(problem)
    assert RECALL.value(problem, [*path[:3], "Back to B: M\n"]) == 0.0
    assert RECALL.value(problem, [path[0], "Enter R: T D\n"]) == 0.0
    assert not RECALL.grade(problem, "K B R D").correct
    assert not RECALL.grade(problem, None).correct


@pytest.mark.parametrize("answer", ["14", "Answer: 14", "14.", "The answer is 14", " 14\n"])
def test_the_number_counts_and_not_its_wrapping(answer: str) -> None:
    assert CHAINS.grade(CHAINS.parse(TEXT), answer).correct


@pytest.mark.parametrize(
    "answer", [None, "", "114", "1", "4", "14 15", "7 + 7", "fourteen", "14.5", "１４"]
)
def test_other_numbers_do_not(answer: str | None) -> None:
    assert not CHAINS.grade(CHAINS.parse(TEXT), answer).correct


@pytest.mark.parametrize("task", TASKS)
def test_an_empty_problem_says_what_would_work(task: Chains | Recall) -> None:
    with pytest.raises(InputError) as error:
        task.parse("\n")
    assert error.value.code == "problem-empty"
    assert task.parse(error.value.hint.removeprefix("Try: "))


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (CHAINS, "How many does Sue have?"),
        (CHAINS, "Facts: Amy has 3."),
        (CHAINS, "Facts: Amy likes 3. How many does Amy have?"),
        (CHAINS, "Facts: Amy has 3. Amy has 4. How many does Amy have?"),
        (CHAINS, "Facts: Amy has 3 more than Tom. How many does Amy have?"),
        (
            CHAINS,
            "Facts: Amy has 3 more than Tom. Tom has 1 more than Amy. How many does Amy have?",
        ),
        (RECALL, "Rooms: K has B. Find B from K"),
        (RECALL, "Rooms: K has B. B is empty. Find C from K"),
        (RECALL, "Rooms: K has B. B has K. Find B from K"),
        (RECALL, "Rooms: K has B. B is empty. Find K"),
        (RECALL, "Rooms: K is locked. Find K from K"),
    ],
)
def test_an_invalid_problem_says_why_and_what_would_work(task: Chains | Recall, text: str) -> None:
    with pytest.raises(InputError) as error:
        task.parse(text)
    assert error.value.code == "problem-invalid"
    assert task.parse(error.value.hint.removeprefix("Try: "))


@pytest.mark.parametrize("task", TASKS)
def test_an_unknown_split_is_named(task: Chains | Recall) -> None:
    with pytest.raises(InputError, match="dev"):
        task.problems("dev")


def test_content_decides_the_split() -> None:
    shares = [split_of(content_id("x", str(i))) for i in range(4000)]
    assert 0.03 < shares.count("validation") / 4000 < 0.07
    assert 0.07 < shares.count("test") / 4000 < 0.12
