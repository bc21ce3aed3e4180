r"""Graders: which answers are equal, how that was decided, and which texts hold none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbor.errors import UsageError
from arbor.run.plugin_answers import checked_task
from arbor.tasks.arc import LetterGrader, stated_letter
from arbor.tasks.base import Grade, Problem
from arbor.tasks.grading import mathematics
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.exact import ExactGrader, IntegerGrader, NumberGrader
from arbor.tasks.grading.extraction import hashed
from arbor.tasks.grading.mathematics import Mathematics, never_equal
from arbor.tasks.reasoning import GSM8K, Reasoning

MATH = Mathematics(seconds=20)

# key, answer, whether they are equal, and how math-verify 0.9.0 differs by itself
PAIRS: list[tuple[str, str, bool, str]] = [
    ("0.5", "50", False, ""),
    ("25", "2500", False, ""),
    ("10000", "10001", False, ""),
    ("14/3", "4.6667", False, ""),
    (r"\sqrt{3}", "1.732", False, ""),
    ("a+b", "b", False, ""),
    ("[1,2)", "(1,2)", False, ""),
    ("(1,2)", r"\{1,2\}", False, "a set and a point"),
    ("1,2", "2,1", True, ""),
    (r"\pm 2", "2,-2", True, ""),
    (r"-2\leq x\leq 7", "[-2,7]", True, ""),
    (r"x\in[-2,7]", "[-2,7]", True, ""),
    (r"50\%", "0.5", True, ""),
    ("50", r"50\%", True, ""),
    ("1/2004!", "1/2006!", False, "tiny numbers"),
    ("52_8", "52", False, "the base"),
    ("4210_5", "4210", False, "the base"),
    ("3/6", "1/2", True, ""),
    (r"2.54\times10^3", "2540", True, ""),
    ("6", r"\text{six}", True, ""),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", False, ""),
    # more of the same kinds
    ("0.25", "25", False, ""),
    ("1", "100", False, ""),
    (r"\frac{1}{3}", "0.3333333", False, "rounding"),
    (r"\pi", "3.14159265", False, "rounding"),
    (r"\sqrt{2}", "1.41421356", False, "rounding"),
    ("e^{-100}", "e^{-101}", False, "tiny numbers"),
    ("10^{-20}", "10^{-21}", False, "tiny numbers"),
    ("(1,1/2006!)", "(1,1/2004!)", False, "tiny numbers"),
    (r"\{1,1/2006!\}", r"\{1,1/2004!\}", False, "tiny numbers"),
    ("52_8", "52_{8}", True, ""),
    ("52_8", "52_9", False, "the base"),
    ("c", "C", False, "case"),
    ("2x+3", "2X+3", False, "case"),
    ("5", r"5\text{ million}", False, "a factor in words"),
    ("(0,1]", "[0,1)", False, ""),
    (r"\{1,2\}", r"\{2,1\}", True, ""),
    (r"(-\infty,1)\cup(2,3)", r"(2,3)\cup(-\infty,1)", True, ""),
    ("2x+3", "3+2x", True, ""),
    (r"2\sqrt{3}", r"\sqrt{12}", True, ""),
    ("(x+1)^2", "x^2+2x+1", True, ""),
    ("3x-y+13=0", "y=3x+13", True, ""),
    ("3*x-y+13=0", "y=5", False, ""),
    (r"\frac{\pi}{4}", r"0.25\pi", True, ""),
    ("x=5", "5", True, ""),
    ("x+y", "x-y", False, ""),
    # decimals under a root, in an exponent, in a logarithm
    (r"\frac{\sqrt3}{2}", r"\sqrt{0.75}", True, ""),
    (r"\frac{1}{\sqrt2}", r"\sqrt{0.5}", True, ""),
    (r"\frac{3\sqrt{10}}{10}", r"\sqrt{.9}", True, ""),
    (r"\sqrt{1.25}", r"\frac{\sqrt5}{2}", True, ""),
    (r"\sqrt e", "e^{0.5}", True, ""),
    (r"\log\frac52", r"\log 2.5", True, ""),
    (r"\sqrt2", "2^{0.5}", True, "a decimal as an exponent"),
    (r"\frac{\sqrt6}{2}", r"\sqrt{1.5}", True, "a decimal under a root"),
    (r"(\sqrt{0.5},1)", r"(\frac{\sqrt2}{2},1)", True, ""),
    (r"\sqrt{\frac13}", r"\sqrt{0.333}", False, ""),
    (r"\sqrt{\frac13}", r"\sqrt{0.33333333333333}", False, "rounding"),
    (r"\sqrt e", "e^{0.4999999}", False, "rounding"),
    (r"\frac{2}{3}", r"2\cdot 0.33333333", False, "rounding"),
    (r"\pi", r"3.14159265358979", False, "rounding"),
    ("3.14", r"\pi", False, ""),
    # thousands, powers of ten and factors, which are no lists
    ("10^6", "1,000,000", True, ""),
    ("-10^{7}", "-10,000,000", True, ""),
    ("10^{-3}", "0.001", True, ""),
    ("10^6", "10,000,000", False, ""),
    ("10^6", r"1\text{ million}", True, "a factor in words"),
    (r"10^6\pi", r"1,000,000\pi", True, "thousands in a product"),
    (r"\frac{1000}{3}", r"\frac{1,000}{3}", True, "thousands in a fraction"),
    ("1,001,001", r"1001\cdot 1000+1", True, ""),
    (r"2^3\cdot 5^6", "125 thousand", True, "a factor in words"),
    ("10^6", "1, 000, 000", False, ""),
    ("1, 000", "0, 1", True, ""),
    ("5,000", "5,000, 5,000", False, "twice"),
    ("2,1,1", "1,2,2", False, "twice"),
    (r"\frac{3}{2}, \frac{11}{2}", "1 1/2, 11/2", True, "a mixed number in a list"),
    ("1.5, 5", "1 1/2, 5", True, "a mixed number in a list"),
    ("(-3/2, 5)", "(-1 1/2, 5)", True, "a mixed number in a point"),
    ("11/2, 5", "1 1/2, 5", False, ""),
    ("11/2, 11/2", "1 1/2, 11/2", False, ""),
    (r"\{1,200\}", r"\{200,1\}", True, ""),
    ("(1,200)", "(1, 200)", True, ""),
    ("(1,200)", "1200+x-x", False, ""),
    ("(1,234)", "1234", False, ""),
    ("(0,100)", "[0,100]", False, ""),
    ("(0,100)", "100", False, ""),
    ("(0,100)", "(0, 100)", True, ""),
    (r"(0,180^\circ)", "180", False, ""),
    ("0,100", "100", False, ""),
    ("100,0", "0,100", True, ""),
]


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), PAIRS)
def test_mathematics_decides_the_pairs_that_other_graders_get_wrong(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    pytest.importorskip("math_verify")

    grade = MATH.grade(answer, key)

    assert grade.correct is equal, grade
    assert grade.method in ("number", "text", "math-verify")


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), PAIRS)
def test_a_vote_joins_what_the_grader_calls_equal(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    pytest.importorskip("math_verify")
    share = (key, answer) == (r"50\%", "0.5")  # in a vote a percentage is its number

    assert MATH.equal(answer, key, 60) is (equal and not share)


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), PAIRS)
def test_the_exact_grader_accepts_no_pair_that_mathematics_refuses(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    assert equal or not ExactGrader().grade(answer, key).correct


@pytest.mark.parametrize(
    ("text", "key", "correct"),
    [
        (r"first \boxed{1} then \boxed{2}", "2", True),
        (r"first \boxed{1} then \boxed{2}", "1", False),
        (r"\boxed{12} or \boxed{13", "12", True),
        (r"$11,\! 111,\! 100$", "11111100", True),
    ],
)
def test_the_last_box_is_the_answer(text: str, key: str, correct: bool) -> None:
    assert MATH.grade(text, key).correct is correct


@pytest.mark.parametrize("answer", [None, "", "  ", r"\boxed{}", "x" * 500])
@pytest.mark.parametrize(
    "grader", [ExactGrader(), MATH, NumberGrader(), IntegerGrader(), LetterGrader()]
)
def test_a_text_without_an_answer_is_invalid(grader: Grader, answer: str | None) -> None:
    grade = grader.grade(answer, "7")

    assert (grade.correct, grade.extracted, grade.method) == (False, None, "none")


def test_mathematics_without_the_library_names_the_extra(monkeypatch: Any) -> None:
    monkeypatch.setattr(mathematics.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UsageError, match=r"arbor-search\[math\].*grader=exact") as caught:
        MATH.grade("3+2y", "2y+3")
    assert caught.value.code == "extra-missing"
    with pytest.raises(UsageError, match="extra-missing"):
        MATH.check()
    assert MATH.grade("7.0", "7").correct  # two numbers need no library


# GSM8K


@pytest.mark.parametrize(
    ("text", "key", "correct"),
    [
        ("72", "72", True),
        ("72.", "72", True),
        ("$29.00", "29", True),
        ("29.00.", "29", True),
        (r"\boxed{\$70{,}000}", "70,000", True),
        ("$70,000", "70000", True),
        ("72 clips", "72", True),
        ("72.00 dollars", "72", True),
        ("-10", "-10", True),
        ("3/4", "0.75", True),
        ("25", "125", False),
        ("10000", "10001", False),
        ("5 million", "5", False),
        ("#### ½", "0.5", True),
        ("1.000,50", "50", False),
        ("1.000,50", "1", False),
        ("5kg", "5", True),
        ("25m2", "25", True),
        ("the 3rd", "3", True),
        ("at 12pm", "12", True),
        ("It is 5.Then we stop", "5", True),
        ("It is 5e3 g", "5000", True),
        ("5E3", "5000", True),
        ("It is 1.5/2.5 here", "0.6", True),
    ],
)
def test_numbers_are_compared_as_numbers(text: str, key: str, correct: bool) -> None:
    assert NumberGrader().grade(text, key).correct is correct


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("1.000.000", "1"),
        ("12.345.678", "12.345"),
        ("1e1000", "1"),
        ("0x10", "0"),
        ("0xff", "0"),
        ("5.0.1", "5"),
        ("1..5", "1"),
        ("1.000,50", "50"),
        ("4x4", "4"),
        ("2h30", "2"),
    ],
)
@pytest.mark.parametrize("said", ["{}", "{} eggs", "So it is {} eggs."])
def test_a_piece_of_a_malformed_number_is_no_answer(said: str, text: str, piece: str) -> None:
    text = said.format(text)
    assert NumberGrader().grade(text, piece).extracted is None
    guess = GSM8K().guess(Problem("0", "gsm8k", "?", piece), text)
    assert NumberGrader().grade(guess, piece).extracted is None


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("So the balance is -$5.", "-5"),
        ("It is -€5", "-5"),
        (r"It is -\$5", "-5"),
        ("It is –5", "-5"),
        ("It is negative 5.", "-5"),
        ("It is minus $5.", "-5"),
        ("It is 10 minus 5", "5"),
        ("It is 3-5", "5"),
        ("It is 3–5", "5"),
        ("It is 3 –5", "5"),
        ("It is 3€–5€", "5"),
        ("It is $3-$5 a day", "5"),
        ("It is 40%-50% a day", "50"),
        ("2 1/2 cups", "2 1/2"),
        ("3 5/2 cups", "5/2"),
        ("In 2020 1/2 of them", "1/2"),
        (r"2\frac{1}{4} cups", r"2\frac{1}{4}"),
        (r"\frac34 cups", r"\frac34"),
        ("2 coins, so it is .5", ".5"),
        ("It is -.5", "-.5"),
        (r"4.25\text{ cm}^2 in all", "4.25"),
        ("It is 25 cm^2", "25"),
    ],
)
def test_the_last_number_of_a_text_is_read_whole(text: str, last: str) -> None:
    assert GSM8K().guess(Problem("0", "gsm8k", "?", last), text) == last


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("48/2=24\n#### 72", "72"),
        ("#### 72\n\nQuestion: next\nAnswer: 8\n#### 9", "72"),
        ("#### 72 clips", "72 clips"),
        ("#### $1,000", "$1,000"),
        ("#### 18 eggs and 3 hens", "18"),
        ("#### 18, 3", "18"),
        ("#### 18 - 3", "18 - 3"),
        ("#### 18 + 0 eggs", "18 + 0 eggs"),
        (r"#### 18 \times 3", r"18 \times 3"),
        ("#### $18-$3", "$18-$3"),
        ("#### 18 - the answer", "18"),
        ("#### 12:30", "12"),
        ("#### -$18 and $3", "-$18"),
        ("#### 18 000 eggs and 3 hens", "18000"),
        ("#### 2 dozen eggs and 3 hens", "2 dozen"),
        ("#### 18个苹果和3只鸡", "18"),
        ("#### 1.000,50", "1.000,50"),
        ("#### ½", "½"),
        ("#### ¾ cups", "¾ cups"),
        (r"#### \frac{3}{4}", r"\frac{3}{4}"),
        ("#### 2x + 3", None),
        ("#### (18, 3)", None),
        ("#### x = 18 + 3", None),
        ("#### Step 1: read", None),
        ("#### 1. Read it", None),
        ("####", None),
        ("72", None),
    ],
)
def test_the_first_number_after_hashes_is_the_answer(text: str, found: str | None) -> None:
    assert hashed(text) == found


# AIME


# ARC

OPTIONS = ("a magnet", "a mirror", "gravity", "light", "the Moon")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("The answer is (C)", "C"),
        ("So the answer is **D**.", "D"),
        (r"\boxed{E}", "E"),
        (r"\boxed{\text{(A)}}", "A"),
        ("The answer is B. a mirror", "B"),
        ("The answer is B because a mirror reflects.", "B"),
        ("The answer is gravity.", "C"),
        ("The answer is a magnet.", "A"),
        (r"\boxed{F}", None),
        ("The answer is unknown.", None),
        ("A magnet attracts iron.", None),
    ],
)
def test_the_letter_that_a_text_states(text: str, letter: str | None) -> None:
    assert stated_letter(text, OPTIONS) == letter


# Agreement

# Where grades go


class Odd(Reasoning):
    """A task of a plug-in whose grade is not data."""

    def __init__(self, grade: Any) -> None:
        object.__setattr__(self, "_grade", grade)

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        found: Grade = self._grade  # type: ignore[attr-defined]
        return found


@pytest.mark.parametrize(
    "grade",
    [
        None,
        True,
        Grade(1, "7", "It is."),  # type: ignore[arg-type]
        Grade(True, 7, "It is."),  # type: ignore[arg-type]
        Grade(True, "7", None),  # type: ignore[arg-type]
        Grade(True, "7", "It is.", 3),  # type: ignore[arg-type]
        Grade(True, "7", "It is.", "text", {"letter": "all"}),  # type: ignore[dict-item]
    ],
)
def test_a_grade_of_a_plug_in_is_checked(grade: Any) -> None:
    task = checked_task(Odd(grade))

    with pytest.raises(UsageError, match="task-answer"):
        task.grade(Problem("1", "odd", "?", "7"), "7")


# Any text


@settings(max_examples=200)
@given(st.text(max_size=40), st.text("0123456789,.$%/\\{}()=-_exπ boxed", max_size=30))
def test_no_text_breaks_a_grader_and_an_answer_equals_itself(one: str, two: str) -> None:
    for grader in (ExactGrader(), NumberGrader(), IntegerGrader(), LetterGrader()):
        for text in (one, two):
            grade = grader.grade(text, two or "1")
            assert grade.reason and grade.method
            if grade.extracted is not None and not isinstance(grader, IntegerGrader):
                assert grader.grade(text, text).correct
    never_equal(one, two)
    never_equal(two, two)
