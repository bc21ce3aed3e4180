r"""Problems in words: the end of a path, its answer, and which answers a strict grader equates."""

from __future__ import annotations

import pytest

from arbor.tasks.base import Guesses, Problem
from arbor.tasks.reasoning import Reasoning

TASK = Reasoning()


def correct(answer: str | None, expected: str) -> bool:
    return TASK.grade(Problem("0", "reasoning", "?", expected), answer).correct


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
