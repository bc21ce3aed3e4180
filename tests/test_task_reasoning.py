r"""Problems in words: the end of a path, its answer, and which answers a strict grader equates."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import InputError, UsageError
from arbor.tasks.base import Guesses, Problem, Task
from arbor.tasks.grading.extraction import boxes
from arbor.tasks.grading.notation import normalise, number
from arbor.tasks.reasoning import Reasoning

TASK = Reasoning()


def correct(answer: str | None, expected: str) -> bool:
    return TASK.grade(Problem("0", "reasoning", "?", expected), answer).correct


def test_it_is_a_task_with_the_boundary_it_is_given() -> None:
    task = Reasoning(stop=("\n", ";"), max_tokens=32, max_depth=4)

    assert isinstance(task, Task)
    assert (task.boundary.stop, task.boundary.max_tokens, task.boundary.max_depth) == (
        ("\n", ";"),
        32,
        4,
    )
    assert TASK.boundary.stop == ("\n",) and TASK.boundary.ends is not None


def test_settings_are_checked() -> None:
    invalid: tuple[dict[str, Any], ...] = (
        {"max_tokens": 0},
        {"max_depth": 0},
        {"stop": ("",)},
        {"yes": ()},
        {"no": (" ",)},
        {"yes": ("no",), "no": ("no",)},
    )
    for settings in invalid:
        with pytest.raises(UsageError) as caught:
            Reasoning(**settings)
        assert caught.value.code == "setting-range"


def test_a_problem_is_identified_by_what_it_says() -> None:
    assert TASK.parse(" How many? \n") == TASK.parse("How many?")
    assert TASK.parse("How many?").id != TASK.parse("How much?").id
    assert "How many?" in TASK.prompt(TASK.parse("How many?"))
    with pytest.raises(InputError, match="problem-empty"):
        TASK.parse(" \n")


def test_what_it_has_not_it_says() -> None:
    problem = TASK.parse("How many?")

    with pytest.raises(UsageError, match="--verifier self"):
        TASK.value(problem, [])
    with pytest.raises(UsageError, match="ships no problems"):
        TASK.problems("test")


@pytest.mark.parametrize(
    ("thoughts", "terminal"),
    [
        ([], False),
        (["So it is 5.\n\n"], False),
        (["The answer is 5."], False),
        (["So \\boxed{5}.\n\n"], True),
        (["So \\boxed{", "5} it is."], True),
        (["So \\boxed{\\frac{1}{2"], False),
        (["Put it in \\boxed{} now."], False),
        (["Put it in \\boxed."], False),
        (["#### 72"], True),
        (["#### Step 1: read"], False),
        (["#### 1. Read it"], False),
        (["####"], False),
    ],
)
def test_a_path_ends_with_a_complete_marked_answer(thoughts: list[str], terminal: bool) -> None:
    assert TASK.is_terminal(TASK.parse("?"), thoughts) is terminal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first \\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{1+\\frac{2}{3}}}}", "\\frac{1}{\\sqrt{1+\\frac{2}{3}}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ 1, 2 \\right.}", "\\left\\{ 1, 2 \\right."),
        ("\\boxed{12} and \\boxed{13", "12"),
        ("\\fbox{7}", "7"),
        ("so \\boxed 7.", "7"),
        ("\\boxed{} is empty, 3", "3"),
        ("48/2 = <<48/2=24>>24\n#### 72\n\nQ: next\n#### 9", "72"),
        ("#### \\$70{,}000", "\\$70{,}000"),
        ("\\boxed{5}\n#### 6", "5"),
        ("The answer is 5. Wait, the answer is 6. Done", "6"),
        ("The final answer is $5$. I hope it is correct.", "5"),
        ("**Answer:** 3.14", "3.14"),
        ("The answer is 72 clips.", "72 clips"),
        ("The answer is 5 million.", "5 million"),
        ("The answer is 3 x", "3 x"),
        ("The answer is (B)", "(B)"),
        ("it costs $29.00.", "29.00"),
        ("we get 1,234 in all", "1,234"),
        ("5-3 = 2", "2"),
        ("which leaves -2", "-2"),
        ("that is 10-3", "3"),
        ("so 3/4 of it", "3/4"),
        ("x2 and version v3", None),
        ("no number here", None),
        ("", None),
        (" , . ", None),
    ],
)
def test_the_answer_that_is_taken(text: str, answer: str | None) -> None:
    assert TASK.answer(TASK.parse("?"), [text[:4], text[4:]]) == answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("72", "72"),
        ("72.", "72"),
        ("72.0", "72"),
        ("29.00.", "29"),
        ("$70,000", "70000"),
        ("\\$70{,}000", "70,000"),
        ("1,234.50", "1234.5"),
        ("$\\frac{14}{3}$", "14/3"),
        ("\\dfrac{1}{2}", "\\frac12"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("3/6", "1/2"),
        ("0.5", "1/2"),
        (".5", "0.5"),
        ("2.54\\times10^3", "2540"),
        ("2.54 \\cdot 10^{3}", "2540"),
        ("1e-3", "0.001"),
        ("033", "33"),
        ("−5", "-5"),
        ("50\\%", "50"),
        ("50", "50%"),
        ("90^\\circ", "90"),
        ("72 \\text{ clips}", "72"),
        ("12 \\text{ cm}^2", "12"),
        ("x = 5", "5"),
        ("x=3/6", "x = 1/2"),
        ("\\text{Yes}", "yes"),
        ("(C)", "C"),
        ("\\text{(C)}", "(C)"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\boxed{5}", "5"),
        ("5", "... = 5\n#### 5"),
        ("**6**", "6"),
        ("\\(6\\).", "6"),
        ("\\sqrt{3}", "\\sqrt{ 3 }"),
    ],
)
def test_one_answer_written_in_two_ways_is_correct(answer: str, expected: str) -> None:
    assert correct(answer, expected)
    assert correct(expected, answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("50", "0.5"),
        ("50%", "0.5"),
        ("2500", "25"),
        ("10001", "10000"),
        ("4.6667", "14/3"),
        ("1.732", "\\sqrt{3}"),
        ("b", "a+b"),
        ("(1,2)", "[1,2)"),
        ("(1,2)", "\\{1,2\\}"),
        ("2,1", "1,2"),
        ("52", "52_8"),
        ("1/2006!", "1/2004!"),
        ("e^{-100}", "e^{-101}"),
        ("\\frac{1}{10^{20}}", "\\frac{1}{10^{21}}"),
        ("0.3333333", "\\frac13"),
        ("3.14159265", "\\pi"),
        ("2,1", "\\{1,2\\}"),
        ("9^{9^{9^{9}}}", "1"),
        ("2^{10^{10}}", "3"),
        ("(" * 150 + "1" + ")" * 150, "1"),
        ("25", "125"),
        ("12,34", "1234"),
        ("5 million", "5"),
        ("5 \\text{ million}", "5"),
        ("2\\pi", "2"),
        ("1 1/2", "11/2"),
        ("y = 5", "x = 5"),
        ("(1, y = 5)", "(1, 5)"),
        ("1/0", "0"),
        ("c", "C"),
        ("1e9999999999", "1"),
        ("9" * 500, "1"),
        ("", "1"),
        (" . ", "1"),
        (None, "1"),
    ],
)
def test_another_answer_is_wrong(answer: str | None, expected: str) -> None:
    assert not correct(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2x+3", "3+2x"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("\\{2,1\\}", "\\{1,2\\}"),
    ],
)
def test_equal_expressions_of_another_form_are_not_recognised(answer: str, expected: str) -> None:
    assert not correct(answer, expected)
    assert correct(answer, answer) and correct(expected, expected)


def test_an_invalid_answer_is_none_and_a_wrong_one_is_shown() -> None:
    problem = Problem("0", "reasoning", "?", "7")

    assert TASK.grade(problem, None).extracted is None
    assert TASK.grade(problem, "  ").extracted is None
    assert TASK.grade(problem, "$8,000.").extracted == "8,000"
    assert TASK.grade(problem, "8").reason == "Is 8, not 7."


def test_without_a_key_nothing_is_correct_and_that_is_the_reason() -> None:
    grade = TASK.grade(TASK.parse("?"), "\\boxed{8}")

    assert (grade.correct, grade.extracted) == (False, "8")
    assert "no answer key" in grade.reason


def test_the_question_fits_where_the_path_stands() -> None:
    problem = TASK.parse("?")

    assert "reasoning so far" in TASK.question(problem, ["Half of 48 is 24.\n\n"]).text
    assert "final answer" in TASK.question(problem, ["\\boxed{72}"]).text
    assert TASK.question(problem, ["a\n\n"]).text.startswith("Is")
    assert TASK.question(problem, ["a"]).text.startswith("\n\nIs")
    assert TASK.question(problem, []).values == {" yes": 1.0, " Yes": 1.0, " no": 0.0, " No": 0.0}
    assert TASK.question(problem, []).text.endswith("Answer yes or no.\nAnswer:")


def test_the_words_of_the_verdicts_can_be_chosen() -> None:
    task = Reasoning(yes=("right",), no=(" wrong", "false"))

    question = task.question(task.parse("How many?"), [])

    assert question.values == {"right": 1.0, " wrong": 0.0, "false": 0.0}
    assert question.text.endswith("correct? Answer right or wrong.\nAnswer:")


@pytest.mark.parametrize(
    ("text", "answer", "guess"),
    [
        ("So 3 + 4 makes 7.", "7", True),
        ("\\boxed{7} of 9", "7", False),
        ("#### 7\nof 9", "7", False),
        ("The answer is 7, of 9.", "7", False),
        ("Nothing.", None, False),
        ("", None, False),
    ],
)
def test_the_last_number_is_a_guess(text: str, answer: str | None, guess: bool) -> None:
    problem, thoughts = TASK.parse("How many?"), [text[:5], text[5:]]

    assert TASK.answer(problem, thoughts) == answer
    assert TASK.is_guess(problem, thoughts) is guess
    assert isinstance(TASK, Guesses)


@given(
    st.recursive(
        st.text("ab1+ ", min_size=1), lambda inner: inner.map(lambda t: f"\\frac{{{t}}}{{2}}")
    )
)
def test_any_nesting_of_braces_comes_out_whole(inside: str) -> None:
    found = boxes(f"so \\boxed{{{inside}}} and }} more")

    assert found == ([inside.strip()] if inside.strip() else [])


@given(
    st.fractions(-(10**6), 10**6),
    st.sampled_from(["{}/{}", "\\frac{{{}}}{{{}}}", " \\dfrac{{{}}}{{{}}}. "]),
)
def test_a_fraction_is_read_exactly(value: Fraction, form: str) -> None:
    assert number(normalise(form.format(value.numerator, value.denominator))) == value


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_two_integers_are_the_same_answer_only_if_equal(first: int, second: int) -> None:
    assert correct(f"${first:,}$", str(first))
    assert correct(f"${first:,}$", str(second)) is (first == second)


@given(st.text(max_size=60), st.text("0123456789,.$%/\\{}()=-ex boxed", max_size=30))
def test_no_text_breaks_the_grader_and_every_text_equals_itself(first: str, second: str) -> None:
    for text in (first, second):
        answer = TASK.answer(TASK.parse("?"), [text])
        assert TASK.grade(Problem("0", "reasoning", "?", second or "1"), answer).reason
        if answer is not None and TASK.grade(TASK.parse("?"), answer).extracted is not None:
            assert correct(answer, answer)
