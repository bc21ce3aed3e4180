r"""Graders: which answers are equal, how that was decided, and which texts hold none."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbor import Solution, Solver
from arbor.errors import UsageError
from arbor.run.plugin_answers import checked_task
from arbor.tasks.base import Grade, Problem
from arbor.tasks.grading import mathematics
from arbor.tasks.grading.base import Grader
from arbor.tasks.grading.choice import LETTERS, Choice, last_letter, letter_of, stated_letter
from arbor.tasks.grading.exact import Exact
from arbor.tasks.grading.extraction import hashed
from arbor.tasks.grading.mathematics import Mathematics, never_equal
from arbor.tasks.grading.numeric import Integer, Numeric
from arbor.tasks.reasoning import Reasoning

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
]


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), PAIRS)
def test_mathematics_decides_the_pairs_that_other_graders_get_wrong(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    pytest.importorskip("math_verify")

    grade = MATH.grade(answer, key)

    assert grade.correct is equal, grade
    assert grade.method in ("number", "text", "math-verify")


def test_there_are_as_many_pairs_as_were_measured() -> None:
    assert len(PAIRS) == 46


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), PAIRS)
def test_the_exact_grader_accepts_no_pair_that_mathematics_refuses(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    assert equal or not Exact().grade(answer, key).correct


@pytest.mark.parametrize(("key", "answer", "equal", "differs"), [p for p in PAIRS if p[3]])
def test_the_library_by_itself_gets_these_wrong(
    key: str, answer: str, equal: bool, differs: str
) -> None:
    """A pair that a newer library decides rightly needs no rule of ours."""
    math_verify = pytest.importorskip("math_verify")
    gold, given = (math_verify.parse(f"${text}$", parsing_timeout=None) for text in (key, answer))

    assert math_verify.verify(gold, given, timeout_seconds=None) is not equal


def test_a_verdict_of_the_library_that_is_overruled_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("math_verify")
    caplog.set_level("INFO", logger="arbor.tasks.grading.mathematics")

    assert not MATH.grade("e^{-300}", "e^{-301}").correct
    assert "calls e^{-301} and e^{-300} equal" in caplog.text
    caplog.clear()
    assert not MATH.grade("x+1", "x+2").correct
    assert caplog.text == ""


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


@pytest.mark.parametrize(
    ("one", "two", "never"),
    [
        (r"\{1,2\}", "[1,2]", True),
        (r"\{x\mid x>3\}", r"(3,\infty)", False),
        (r"\{x: x>3\}", r"(3,\infty)", False),
        ("(x+1)^2", "x^2+2x+1", False),
        ("R^2", "r^2", True),
        (r"\Delta", r"\delta", True),
        ("Monday, Tuesday", "monday, tuesday", False),
        (r"2\pi", r"2\cdot 3.14", False),
        ("x dozen", "12x", True),
        ("10_2", "2", True),
        ("A3_16", "163", True),
        ("a_1", "a_2", False),
    ],
)
def test_only_what_differs_for_certain_is_not_asked(one: str, two: str, never: bool) -> None:
    assert never_equal(one, two) is never_equal(two, one) is never


@pytest.mark.parametrize("answer", [None, "", "  ", r"\boxed{}", "x" * 500])
@pytest.mark.parametrize("grader", [Exact(), MATH, Numeric(), Integer(), Choice()])
def test_a_text_without_an_answer_is_invalid(grader: Grader, answer: str | None) -> None:
    grade = grader.grade(answer, "7")

    assert (grade.correct, grade.extracted, grade.method) == (False, None, "none")


@pytest.mark.parametrize("grader", [Exact(), MATH, Numeric(), Integer(), Choice()])
def test_a_grader_names_its_rules(grader: Grader) -> None:
    name, _, number = grader.version.split(" ")[0].partition("/")

    assert name and int(number) >= 1
    assert grader.grade("B" if grader == Choice() else "7", None).correct is False


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
    ],
)
def test_numbers_are_compared_as_numbers(text: str, key: str, correct: bool) -> None:
    assert Numeric().grade(text, key).correct is correct


@pytest.mark.parametrize("text", [",", ".", "$", "none", "5 or 6", "1 2"])
def test_what_is_not_one_number_is_invalid(text: str) -> None:
    assert Numeric().grade(text, "5").extracted is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("48/2=24\n#### 72", "72"),
        ("#### 72\n\nQuestion: next\nAnswer: 8\n#### 9", "72"),
        ("#### 72 clips", "72 clips"),
        ("#### $1,000", "$1,000"),
        ("#### Step 1: read", None),
        ("#### 1. Read it", None),
        ("####", None),
        ("72", None),
    ],
)
def test_the_first_number_after_hashes_is_the_answer(text: str, found: str | None) -> None:
    assert hashed(text) == found


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_two_integers_are_equal_only_if_they_are(one: int, two: int) -> None:
    assert Numeric().grade(f"#### {one:,}", str(two)).correct is (one == two)


@given(st.fractions(-1000, 1000, max_denominator=64))
def test_a_decimal_is_equal_to_its_fraction(value: Fraction) -> None:
    scaled = value.limit_denominator(1) + Fraction(value.numerator % 1000, 1000)

    assert (
        Numeric().grade(f"{float(scaled):.3f}", f"{scaled.numerator}/{scaled.denominator}").correct
    )


# AIME


@pytest.mark.parametrize(
    ("text", "key", "correct", "extracted"),
    [
        ("033", "33", True, "33"),
        ("33", "033", True, "33"),
        ("25", "125", False, "25"),
        ("125", "25", False, "125"),
        ("0", "000", True, "0"),
        (r"\boxed{385}.", "385", True, "385"),
        ("1000", "1000", False, "1000"),
        ("-1", "1", False, "-1"),
        ("33.5", "33", False, "67/2"),
        ("33.0", "33", True, "33"),
        ("about n", "33", False, None),
    ],
)
def test_integers_of_a_range(text: str, key: str, correct: bool, extracted: str | None) -> None:
    grade = Integer().grade(text, key)

    assert (grade.correct, grade.extracted) == (correct, extracted)


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


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A magnet attracts iron.\nSo it must be B", "B"),
        ("A mirror is not one, so (C) it is", "C"),
        ("First A\nthen D\n", "D"),
        ("It is F", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_last_letter_of_the_last_line(text: str, letter: str | None) -> None:
    assert last_letter(text, OPTIONS) == letter


@given(
    st.sampled_from(LETTERS), st.sampled_from(("{}", "({})", "{}.", " {}) ", "{}: it", "**{}**"))
)
def test_a_letter_is_read_in_any_dress(letter: str, form: str) -> None:
    assert letter_of(form.format(letter)) == letter
    assert Choice().grade(form.format(letter.lower()), letter).correct


# Agreement

FORMS = ("{}/{}", "\\frac{{{}}}{{{}}}", "$\\dfrac{{{}}}{{{}}}$", "\\boxed{{{}/{}}}")


@given(
    st.fractions(-50, 50, max_denominator=12),
    st.fractions(-50, 50, max_denominator=12),
    st.sampled_from(FORMS),
    st.sampled_from(FORMS),
)
def test_the_graders_agree_on_plain_numbers(one: Fraction, two: Fraction, a: str, b: str) -> None:
    answer = a.format(one.numerator, one.denominator)
    key = b.format(two.numerator, two.denominator)

    for grader in (Exact(), Numeric(), MATH):
        assert grader.grade(answer, key).correct is (one == two)


@settings(max_examples=25, deadline=None)
@given(*(st.integers(-5, 5) for _ in range(4)))
def test_products_agree_with_their_expansion(a: int, b: int, c: int, more: int) -> None:
    pytest.importorskip("math_verify")
    product = f"(x+({a}))(x+({b}))(y+({c}))"
    expanded = f"x^2y+({a + b})xy+({a * b})y+({c})x^2+({(a + b) * c})x+({a * b * c})"

    assert MATH.grade(product, expanded).correct
    assert MATH.grade(f"{product}+({more})", expanded).correct is (more == 0)


# Where grades go


def test_a_solution_has_the_grade_and_keeps_it() -> None:
    with Solver(controller="chain") as solver:
        solution = solver.solve("4 5 6 10")
        copy = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))

    assert solution.grade is not None and solution.grade.correct is solution.correct
    assert copy.grade == solution.grade


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
    for grader in (Exact(), Numeric(), Integer(least=-(10**40), most=10**40), Choice()):
        for text in (one, two):
            grade = grader.grade(text, two or "1")
            assert grade.reason and grade.method
            if grade.extracted is not None and grader != Integer(-(10**40), 10**40):
                assert grader.grade(text, text).correct
    never_equal(one, two)
    never_equal(two, two)
