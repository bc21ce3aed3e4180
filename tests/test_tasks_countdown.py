"""Countdown and Game of 24: the grader, the legal steps, the exact values, the splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import InputError, UsageError
from arbor.measure.evaluation.dataset import of_rows
from arbor.measure.evaluation.rows import DataRow
from arbor.tasks import countdown
from arbor.tasks.base import Problem
from arbor.tasks.countdown import (
    Countdown,
    compose,
    exact_steps,
    legal_steps,
    solve,
)
from arbor.tasks.game24 import Game24, classic

GAME = Game24()
COUNTDOWN = Countdown()
PROBLEM = GAME.parse("4 5 6 10")


def correct(problem: Problem, answer: str | None) -> bool:
    return GAME.grade(problem, answer).correct


@pytest.mark.parametrize(
    "answer",
    [
        "5 * 6 - (10 - 4)",
        "(10 − 4) × 5 − 6",
        "(10-4)*5-6=24",
        "Answer: (10 - 4) * 5 - 6 = 24",
        "The answer is (10 - 4) * 5 - 6.",
        "**Answer:** (10 - 4) * 5 - 6",
        "**Answer: (10 - 4) * 5 - 6**",
        r"\boxed{(10 - 4) \times 5 - 6}",
        r"$(10 - 4) \cdot 5 - 6 = 24$",
        "Answer: **(10 - 4) * 5 - 6**",
        "The answer is **(10 - 4) * 5 - 6**.",
        "The answer is **(10 - 4) * 5 - 6.**",
        "**Final answer:** **(10 - 4) * 5 - 6**",
        "(10 - 4) * 5 - 6 = **24**",
        "**(10 - 4) * 5 - 6** = **24**",
        r"$\boxed{(10 - 4) * 5 - 6}$.",
        r"The answer is $\boxed{(10 - 4) * 5 - 6}$.",
        r"**Answer:** $\boxed{(10 - 4) * 5 - 6 = 24}$.",
        r"$(10 - 4) * 5 - 6$ = $24$",
        r"\( (10 - 4) \times 5 - 6 \)",
        r"The answer is \(\boxed{(10 - 4) * 5 - 6}\).",
        "\\[\n\\boxed{(10 - 4) * 5 - 6 = 24}\n\\]",
        "`(10 - 4) * 5 - 6`",
        "```\n(10 - 4) * 5 - 6\n```",
        "(10 - 4) * 5 - 6 = 24!",
        "**(10 - 4) * 5 - 6 = 24**!",
        "((10) - (4)) * 5 - 6",
        "Let me think.\n\nAnswer: (10 - 4) · 5 – 6 = 24\n",
    ],
)
def test_a_right_answer_is_accepted_however_it_is_written(answer: str) -> None:
    assert correct(PROBLEM, answer), GAME.grade(PROBLEM, answer).reason


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "  \n",
        "24",
        "(10 - 4) * 5 - 6 = 25",  # a wrong right side
        "(10 - 4) * 5 - 6 = 24 = 24",
        "(10 - 4) * 5 - 6 =",
        "(10 - 4) * 5 - 6 = 25!",
        "(10 - 4) * 5 - 6!",
        "(1`0 - 4) * 5 - 6",
        "(10 - 4) * 5",  # a number missing
        "(10 - 4) * 5 - 6 + 5 - 5",  # a number too often
        "10 + 4 + 5 + 6",  # another value
        "(10 - 4) * 5 - 6.0",
        "(10 - 4) * 5 - 06",
        "(10 - 4) * 5 - 6 # 24",
        "(10 - 4)(5) - 6",
        "-(4 - 10) * 5 - 6",
        "(10 - 4) * 5 - +6",
        "(10 - 4 * 5 - 6",
        "10 - 4) * 5 - 6",
        "() * 10",
        "(10 - 4) * 5 -",
        "(10 - 4) * 5 - ６",  # a full-width digit
        "10 / (4 - 4) * 5 - 6",
        "10 - 4 ** 5 - 6",
        "**10 - 4** * 5 - 6 ** 1",
        "Answer: 10 - 4**5 - 6**",
        "(10 - 4) ** 5 - 6",
        "(10 - 4) * 5 - 6 = **25**",
        "(1**0 - 4**) * 5 - 6",
        "(1$0 - 4) * 5 - 6",
        "(10 - 4) * 5 - 6 if True else 0",
        "(" * 400 + "24" + ")" * 400,
        "9" * 5000,
    ],
)
def test_a_wrong_answer_is_not(answer: str | None) -> None:
    grade = GAME.grade(PROBLEM, answer)
    assert not grade.correct
    assert grade.reason


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [
        ("1 1 1 4", "4! * 1 * 1 * 1"),
        ("1 1 1 4", "factorial(4)*1*1*1"),
        ("1 2 12 12", "12+12**1**2"),
        ("1 1 1 4", "4*1*1*1*len('aaaaaa')"),
        ("1 1 1 4", "__import__('os').getpid() * 0 + 24"),
        ("4 4 6 8", "(4+8)(6-4)"),
        ("1 1 2 2", "24 if [1, 1, 2, 2] else 0"),
        ("1 2 3 4", "1_2 * (3 - 4)"),
        ("1 1 1 4", "0x18 + 1 - 1 + 4 - 4"),
        ("2 2 2 2", "2 << 2 + 2 * 2"),
        ("2 4 5 7", "24 (2 4 5 7)"),
        ("1 2 3 4", "12 + 3 * 4"),
        ("4 4 6 8", "(4 + 8) * (6 - 4) = 25"),
        ("1 1 1 4", "4.__class__.__name__ * 0 + 24"),
    ],
)
def test_what_deceived_other_graders_does_not_deceive_this_one(numbers: str, answer: str) -> None:
    assert not correct(GAME.parse(numbers), answer)


@given(st.data())
def test_a_composed_path_is_right_exactly_when_it_ends_at_the_target(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(1, 25), min_size=4, max_size=6))
    fractions = data.draw(st.booleans())
    state = tuple(sorted(numbers))
    path = []
    while len(state) > 1:
        steps = exact_steps(state) if fractions else legal_steps(state)  # type: ignore[arg-type]
        step = data.draw(st.sampled_from(steps))
        path.append(step.text)
        state = step.left
    target = data.draw(st.sampled_from((24, max(0, int(state[0])))))
    problem = COUNTDOWN.make(numbers, target)
    expression = compose(numbers, path)
    assert expression is not None
    assert COUNTDOWN.grade(problem, expression).correct == (state[0] == target)
    assert COUNTDOWN.answer(problem, path) == (expression if state[0] == target else None)
    assert COUNTDOWN.value(problem, path) == float(state[0] == target)


def test_the_longest_results_of_six_numbers_are_read() -> None:
    numbers = [999_999] * 6
    state: tuple[Any, ...] = tuple(numbers)
    path = []
    while len(state) > 1:
        products = [step for step in exact_steps(state) if step.sign == "*"]
        step = max(products, key=lambda each: each.result)
        path.append(step.text)
        state = step.left

    assert len(str(state[0])) == 36
    assert compose(numbers, path) == " * ".join(["999999"] * 6)


def test_solve_finds_a_solution_for_every_classic_hand() -> None:
    assert len(classic()) == 1362
    for hand in classic()[::100]:
        path = solve(hand, 24)
        assert path is not None
        problem = GAME.make(hand)
        assert correct(problem, GAME.answer(problem, path))
    assert solve([1, 1, 1, 1], 24) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"fewest": 6, "most": 4},
        {"fewest": 1, "most": 1},
        {"largest": 0},
        {"targets": (99, 10)},
        {"targets": (-5, 10)},
    ],
    ids=str,
)
def test_a_setting_of_generated_problems_out_of_range_is_refused(settings: Any) -> None:
    with pytest.raises(UsageError, match="it must be"):
        Countdown(**settings)


def test_problems_end_where_no_more_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown, "_MOST_DRAWS", 200)

    assert list(Countdown(targets=(500_000, 500_001)).problems("train")) == []


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (GAME, "4 5 6"),
        (GAME, "4 5 6 10 11"),
        (GAME, "4 5 six 10"),
        (GAME, "4 5 6 0"),
        (GAME, "4 5 6 -10"),
        (GAME, "4 5 6 1.5"),
        (GAME, "4 5 6 ５"),
        (COUNTDOWN, "3 7 25 50"),
        (COUNTDOWN, "3 7 25 50 ->"),
        (COUNTDOWN, "3 7 25 -> 331"),
        (COUNTDOWN, "3 7 25 50 1 2 3 -> 331"),
        (COUNTDOWN, "3 7 25 x -> 331"),
    ],
)
def test_an_invalid_problem_says_why_and_what_would_work(task: Countdown, text: str) -> None:
    with pytest.raises(InputError) as error:
        task.parse(text)
    assert error.value.code == "problem-invalid"
    assert task.parse(error.value.hint.removeprefix("Try: "))


SOLUTION = "(10 - 4) * 5 - 6"
KEYS = ["24", "24.0", "$24$.", SOLUTION, f"{SOLUTION} = 24", f"Answer: **{SOLUTION}**", "12 * 2"]
OTHER_KEYS = ["25", "10 + 4 + 5 + 6", f"{SOLUTION} = 25", "25 = 24", "24.5", "solvable", "="]


@pytest.mark.parametrize("key", [None, *KEYS])
def test_a_key_may_be_the_target_or_an_expression_of_it(key: str | None) -> None:
    assert GAME.entry({}, "4 5 6 10", key) == ("4 5 6 10", key)
    assert correct(replace(PROBLEM, expected=key), "5 * 6 - (10 - 4)")


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_key_of_another_value_is_refused_in_a_row_and_named_in_a_grade(key: str) -> None:
    with pytest.raises(InputError, match="neither 24 nor an expression") as error:
        GAME.entry({}, "4 5 6 10", key)
    assert error.value.code == "dataset-invalid" and repr(key) in error.value.message

    keyed = replace(PROBLEM, expected=key)
    grade = GAME.grade(keyed, SOLUTION)
    assert (grade.correct, grade.extracted) == (False, SOLUTION)
    assert repr(key) in grade.reason
    assert GAME.answer(keyed, solve([4, 5, 6, 10], 24) or ()) is not None  # needs no key


def test_a_row_with_a_key_of_another_value_is_not_read() -> None:
    rows = [
        DataRow(f"line {line}", {"problem": "3 7 25 50 -> 331", "answer": answer})
        for line, answer in enumerate((331, 332), 1)
    ]
    right, wrong = of_rows(rows, COUNTDOWN, "my.jsonl")
    assert right.error is None and right.problem is not None
    assert wrong.problem is None and "my.jsonl, line 2: its answer '332'" in str(wrong.error)


# Lists of next steps
