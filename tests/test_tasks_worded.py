r"""Tasks in words: rows of well-known data files, the end of a path, its answer, and the grade."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor import Solver, components
from arbor.cli.build import OF_USERS
from arbor.errors import InputError, UsageError
from arbor.registry import BUILTIN
from arbor.tasks.aime import AIME
from arbor.tasks.arc import ARC
from arbor.tasks.base import Converses, Guesses, Proposes, ReadsRows, Task, Versioned
from arbor.tasks.gsm8k import GSM8K
from arbor.tasks.math import Math
from arbor.tasks.reasoning import Reasoning
from arbor.tasks.worded import Worded, spoken

TASKS: list[Any] = [AIME(), ARC(), GSM8K(), Math(grader="exact"), Reasoning()]
CHOICES = {"text": ["a magnet", "a mirror", "a candle"], "label": ["A", "B", "C"]}


def graded(task: Any, row: dict[str, Any], text: str, problem: str, answer: str) -> bool:
    """Whether a text solves the problem of a row."""
    words, key = task.entry(row, problem, answer)
    parsed = replace(task.parse(words), expected=key)
    found: bool = task.grade(parsed, task.answer(parsed, [text])).correct
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_in_words_has_every_part(task: Any) -> None:
    problem = task.parse(task.example)

    assert isinstance(task, Task) and isinstance(task, Guesses)
    assert isinstance(task, Versioned) and isinstance(task, Converses)
    assert task.name == problem.task and BUILTIN["task"][task.name]
    assert problem.text in task.prompt(problem)
    assert task.parse(task.example).id == problem.id
    assert task.grading and task.prompt_version
    with pytest.raises(InputError, match="problem-empty"):
        task.parse("  ")
    with pytest.raises(UsageError, match="no-problems"):
        task.problems("test")
    with pytest.raises(UsageError, match="no-exact-verifier"):
        task.value(problem, [])


def test_exact_values_of_a_task_that_has_none_are_refused_before_anything_loads() -> None:
    with pytest.raises(UsageError, match="no-exact-verifier"):
        Solver(task="gsm8k", verifier="combined,parts=self,exact")
    with pytest.raises(UsageError, match="no-exact-verifier"):
        Solver(task=Reasoning(), verifier="exact")


def test_the_list_of_tasks_without_problems_is_complete() -> None:
    built = {name: components.build("task", name) for name in BUILTIN["task"]}

    assert {name for name, task in built.items() if isinstance(task, Worded)} == set(OF_USERS)
    assert all(isinstance(task, Versioned) for task in built.values())


@pytest.mark.parametrize("task", TASKS[:4], ids=lambda task: task.name)
def test_the_tasks_of_data_sets_read_rows(task: Any) -> None:
    assert isinstance(task, ReadsRows)
    row = {"choices": CHOICES}
    answer = "B" if task.name == "arc" else "7"

    assert task.entry(row, "Which?", None)[1] is None
    assert task.entry(row, "Which?", answer)[1] == answer


# GSM8K


def test_gsm8k_takes_the_key_after_the_hashes() -> None:
    task = GSM8K()

    assert task.entry({}, "How many?", "48/2 = <<48/2=24>>24\n#### 1,072") == ("How many?", "1,072")
    assert task.entry({}, "How many?", "72") == ("How many?", "72")
    with pytest.raises(InputError, match="no number after ####"):
        task.entry({}, "How many?", "It depends.\n#### some")


@pytest.mark.parametrize(
    ("text", "correct", "terminal", "guess"),
    [
        ("48/2 = 24\n#### 72", True, True, False),
        ("#### 72\n\nQuestion: more\nAnswer: 3\n#### 9", True, True, False),
        ("#### 72 clips", True, True, False),
        ("So \\boxed{\\$72.00}", True, True, False),
        ("The answer is $72.", True, False, False),
        ("which makes 72.", True, False, True),
        ("#### 1. Count\nso 72 clips", True, False, True),
        ("#### 71", False, True, False),
        ("none", False, False, False),
    ],
)
def test_gsm8k(text: str, correct: bool, terminal: bool, guess: bool) -> None:
    task = GSM8K()
    problem = task.parse("How many?")

    assert graded(task, {}, text, "How many?", "#### 72") is correct
    assert task.is_terminal(problem, [text]) is terminal
    assert task.is_guess(problem, [text]) is guess


# MATH


def test_math_takes_the_last_box_of_a_solution() -> None:
    task = Math(grader="exact")

    assert (
        task.entry({}, "x?", "We have \\boxed{1}, so\n\\boxed{\\frac{1}{2}}.")[1] == "\\frac{1}{2}"
    )
    assert task.entry({}, "x?", " \\frac12 ")[1] == "\\frac12"
    with pytest.raises(InputError, match=r"no \\boxed"):
        task.entry({}, "x?", "We have\nnothing.")


def test_math_grades_by_value() -> None:
    pytest.importorskip("math_verify")

    assert graded(Math(), {}, "So $\\boxed{2\\sqrt{3}}$.", "x?", "\\sqrt{12}")
    assert not graded(Math(grader="exact"), {}, "So $\\boxed{2\\sqrt{3}}$.", "x?", "\\sqrt{12}")
    assert "math-verify" in Math().grading


# AIME


@pytest.mark.parametrize("key", ["1000", "-1", "2.5", "n", ""])
def test_aime_refuses_a_key_outside_its_range(key: str) -> None:
    with pytest.raises(InputError, match="not an integer from 0 to 999"):
        AIME().entry({}, "n?", key)


@given(st.integers(0, 999), st.integers(0, 999))
def test_aime_compares_integers(one: int, two: int) -> None:
    assert graded(AIME(), {}, f"So \\boxed{{{one:03d}}}.", "n?", str(two)) is (one == two)


# ARC


def test_arc_writes_the_options_below_the_question() -> None:
    text, key = ARC().entry({"choices": CHOICES}, "Which attracts iron?", "A")

    assert text == "Which attracts iron?\nA. a magnet\nB. a mirror\nC. a candle"
    assert key == "A"
    assert ARC().parse(text).data["options"] == ["a magnet", "a mirror", "a candle"]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_arc_maps_numbers_to_letters_and_has_any_number_of_options(count: int) -> None:
    for key in range(1, count + 1):
        choices = {
            "text": [f"option {each}" for each in range(count)],
            "label": [str(each + 1) for each in range(count)],
        }
        text, letter = ARC().entry({"choices": choices}, "Which?", str(key))
        assert letter == "ABCDE"[key - 1]
        assert graded(ARC(), {"choices": choices}, f"The answer is {letter}.", "Which?", str(key))
        assert not graded(ARC(), {"choices": choices}, "The answer is F.", "Which?", str(key))
        assert len(ARC().parse(text).data["options"]) == count


@pytest.mark.parametrize(
    ("choices", "key", "words"),
    [
        (CHOICES, "D", "not the label of an option"),
        (CHOICES, "", "not the label of an option"),
        ({"text": ["a"], "label": ["A", "B"]}, "A", "as many texts as labels"),
        ({"text": ["a", "b"], "label": ["A", "A"]}, "A", "as many texts as labels"),
        ({"text": "ab"}, "A", "as many texts as labels"),
        (["a", "b"], "A", "as many texts as labels"),
        ("[", "A", "as many texts as labels"),
    ],
)
def test_arc_refuses_a_row_without_labels(choices: Any, key: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ARC().entry({"choices": choices}, "Which?", key)


@pytest.mark.parametrize(
    "text", ["Which?", "Which?\nA. one", "A. one\nB. two", "Which?\nA one\nB two"]
)
def test_arc_refuses_a_problem_without_options(text: str) -> None:
    with pytest.raises(InputError, match="two options or more"):
        ARC().parse(text)


@pytest.mark.parametrize(
    ("thoughts", "answer", "terminal", "guess"),
    [
        (["A mirror is smooth.\n", "The answer is A.\n"], "A", True, False),
        (["The answer is a candle.\n"], "C", True, False),
        (["A magnet attracts iron.\n", "So it is (B)"], "B", False, True),
        (["A magnet attracts iron.\n", "So it is that one"], None, False, False),
        (["The answer is D.\n"], "D", True, False),
    ],
)
def test_arc_reads_letters(
    thoughts: list[str], answer: str | None, terminal: bool, guess: bool
) -> None:
    problem = ARC().parse("Which?\nA. a magnet\n(B) a mirror\n3) a candle\nD: a cup")

    assert ARC().answer(problem, thoughts) == answer
    assert ARC().is_terminal(problem, thoughts) is terminal
    assert ARC().is_guess(problem, thoughts) is guess


# Thinking tags and steps


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("plain", "plain"),
        ("<think>\\boxed{1}</think>\\boxed{2}", "\\boxed{2}"),
        ("\\boxed{1}</think>\nSo 2", "\nSo 2"),
        ("<think>\\boxed{1}", ""),
        ("so <think>hm", "so "),
    ],
)
def test_text_between_thinking_tags_is_not_an_answer(text: str, rest: str) -> None:
    assert spoken(text) == rest
    assert Reasoning().is_terminal(Reasoning().parse("?"), [text]) is ("boxed" in rest)


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({}, ("\n",)),
        ({"stop": ("<step>",)}, ("<step>",)),
        ({"steps": "stop"}, ("\n\n",)),
        ({"steps": "line"}, ("\n",)),
        ({"steps": "length"}, ()),
    ],
)
def test_where_a_thought_ends_is_a_setting(settings: Any, stop: tuple[str, ...]) -> None:
    assert Reasoning(**settings).boundary.stop == stop


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Each tray has 12 rolls, so the four trays have 4 * 12 rolls.\n\n", True),
        ("Each tray has 12 rolls, so the four trays have 4 * 12 rolls.\n", False),
        ("**Step 1: How many rolls the four trays have in the morning:**\n\n", False),
        ("The four trays of the baker hold together, in the morning, rolls:\n\n", False),
        ("So they have\n\\[\n4 \\times 12 = 48 \\text{ rolls in the morning}\n\n", False),
        ("So they have\n\\[\n4 \\times 12 = 48 \\text{ rolls in the morning}\n\\]\n\n", True),
        ("```python\nrolls = 4 * 12\nprint(rolls)  # in the morning\n\n", False),
        ("Therefore:\n\n", False),
        ("\n\n", False),
        ("The answer is \\boxed{18}.\n", True),
        ("".join(f"{n}. Then {n} trays have {12 * n} rolls.\n" for n in range(1, 8)), True),
    ],
)
def test_a_paragraph_is_a_thought(text: str, ends: bool) -> None:
    rule = Reasoning().boundary.ends

    assert rule is not None
    tokens = len(re.findall(r"\w+|[^\w ]", text))  # about as a tokenizer counts
    assert rule(text, tokens) is ends


def test_strings_that_are_given_end_a_thought_wherever_they_are() -> None:
    assert Reasoning(stop=("\n",)).boundary.ends is None
    assert Reasoning(steps="line").boundary.ends is None


def test_a_decimal_point_ends_no_sentence() -> None:
    stops = Reasoning(steps="sentence").boundary.stop

    assert not any(stop in "It is 3.14 or e.g.x" for stop in stops)
    assert any(stop in "It is 3. Then" for stop in stops)


# Lists of next steps


@pytest.mark.parametrize(
    ("steps", "thoughts"),
    [
        ("stop", ["Add 2.\n\n", "Then. 1.5 of 3\n\n", "-4 is left\n\n"]),
        ("line", ["Add 2.\n", "Then. 1.5 of 3\n", "-4 is left\n"]),
        ("sentence", ["Add 2.\n", "Then. 1.5 of 3\n\n", "-4 is left\n\n"]),
        ("length", ["Add 2.\n", "Then. 1.5 of 3\n", "-4 is left\n"]),
    ],
)
def test_a_line_of_a_list_ends_as_a_thought_does(steps: Any, thoughts: list[str]) -> None:
    task = Reasoning(steps=steps)
    problem = task.parse(task.example)
    text = "1. Add 2.\n\n  - Then. 1.5 of 3\n(3) -4 is left\n*\t\n"

    assert task.proposals(problem, (), text) == thoughts
    ends = task.boundary.stop
    assert all(each.endswith(ends) for each in thoughts) or not ends


def test_what_a_model_thinks_is_not_in_its_list() -> None:
    problem = Reasoning().parse("2+2?")

    assert Reasoning().proposals(problem, (), "<think>\nhm\n</think>\na\n") == ["a\n\n"]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_in_words_asks_for_next_steps(task: Any) -> None:
    assert isinstance(task, Proposes)
    problem = task.parse(task.example)

    first, later = task.proposal(problem, ()), task.proposal(problem, ("Then.\n\n",))

    assert first.text == f"\n\n{later.text}" and later.text.endswith("next steps:\n")
    assert first.max_tokens == 4 * task.boundary.max_tokens
