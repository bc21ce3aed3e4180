r"""Answers as models write them: each form that people read as an answer, and no other.

The data sets are found by ``ARBOR_TEST_DATA``, or next to the checkout; their tests skip without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import answer_forms as forms
from support.real_data import VARIABLE, data_folder
from support.slow_cases import every

from arbor.tasks.base import Problem
from arbor.tasks.grading.number_words import in_digits
from arbor.tasks.reasoning import AIME, GSM8K, Math, Reasoning

TASKS: dict[str, Any] = {
    "gsm8k": GSM8K(),
    "reasoning": Reasoning(),
    "math": Math(),
    "aime": AIME(),
}


def judged(task: Any, text: str, key: str) -> tuple[bool, bool]:
    """Whether a text is right as one thought, and as a path of lines that may end early."""
    problem = Problem("0", task.name, "?", key)
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if task.is_terminal(problem, lines):
            break
    whole, path = (
        task.grade(problem, task.answer(problem, thoughts)).correct for thoughts in ([text], lines)
    )
    return whole, path


WORDED = "gsm8k reasoning math aime"  # tasks of problems in words

KINDS: list[tuple[str, str, str, bool]] = [
    # Markdown
    (WORDED, "42", "**Final answer:** __42__", True),
    (WORDED, "42", "Therefore, **the answer is 42!**", True),
    (WORDED, "42", "### Final Answer\n\n`42`", True),
    (WORDED, "42", "> - **Answer: $42$**", True),
    (WORDED, "42", "So she has\n\n__42__", True),
    # display mathematics
    ("math", r"\frac{14}{3}", "Thus we get\n\\[\nx = \\frac{14}{3}.\n\\]", True),
    (WORDED, "42", "The final answer is\n\n$$\n42.\n$$", True),
    (WORDED, "42", "Answer:\n\\[\n\\mathbf{42}\n\\]\nas asked.", True),
    # text behind the answer
    (WORDED, "42", "The answer is 42, which is 6 times 7.", True),
    (WORDED, "42", "The answer is 42 (6 * 7 = 42) and we are done.", True),
    (WORDED, "42", "The answer is 42. Indeed the answer is right.", True),
    (WORDED, "42", "The answer is 42. The answer is a whole number.", True),
    (WORDED, "42", "The answer is 41. No, the answer is 42.", True),
    (WORDED, "41", "The answer is 41. No, the answer is 42.", False),
    ("math", r"\text{Evelyn}", "The answer is **Evelyn**, who ran 5 km.", True),
    ("math", "1,-2", "The answer is $1$ and $-2$, since 1 - 2 = -1.", True),
    (WORDED, "108", "So the house cost 108. The answer is within \\boxed{}.", True),
    (WORDED, "108", "So the house cost 108.\n\nThe final answer is in the box: \\boxed{ }", True),
    (WORDED, "18", "The answer, in whole dollars, is 18. It took 3 steps.", True),
    (WORDED, "18", "**18** is the answer. Check: 9 * 2.", True),
    (WORDED, "18", "So $18 dollars is the final answer, as 9 * 2 shows.", True),
    (WORDED, "18", "So 18 is not the answer, as 9 * 3 shows.", False),
    (WORDED, "18", "**Answer:**\n\n- 18 eggs\n\nThis took 3 steps.", True),
    (WORDED, "18", "**Answer:**\n* 18 eggs\n\nThis took 3 steps.", True),
    ("math reasoning gsm8k", "-18", "Answer: -18", True),
    (WORDED, "18", "Final Answer:\n```\n18\n```\nIt took 3 steps.", True),
    (WORDED, "18", "The answer is 18 dollars (2 * 9).", True),
    (WORDED, "20", "The answer is not 18 but 20.", True),
    (WORDED, "18", "The answer is a total of eighteen dollars.", True),
    # several numbers, where one is asked for
    ("gsm8k aime", "18", "The answer is between 17 and 18.", False),
    ("gsm8k aime", "18", "The answer is 17-18.", False),
    ("gsm8k aime", "40", "The answer is 2 hours and 40 minutes.", False),
    ("gsm8k aime", "18", "The answer is 18 or 20.", False),
    # hashes and headings
    ("gsm8k reasoning math", "18", "#### 18 km/h\n\nQ: 3 + 4?\n#### 7", True),
    ("gsm8k reasoning math", "18", "#### **€18** a day\n#### 7", True),
    ("gsm8k reasoning math", "18", "#### 9 * 2 = 18", True),
    ("gsm8k", "5", "#### 5 - 3", False),
    ("gsm8k", "3", "#### 5 - 3", False),
    ("gsm8k", "5", "#### 5 × 3 eggs", False),
    ("math", "2", "#### 5 - 3", True),
    ("gsm8k", "18", "#### 1. Add 3 eggs\n\n#### 2. Sell them\nThat makes 18.", True),
    ("gsm8k", "3", "#### Step 3\nThat makes 18.", False),
    ("gsm8k", "18", "##### 1\nThat makes 18.", True),
    ("gsm8k", "18", "#### 1030 dollars", False),
    # problems that a base model invents
    ("gsm8k reasoning", "18", "So she has 18 eggs.\n\nProblem: 3 + 4?\nAnswer: 7", True),
    ("gsm8k reasoning math", "18", "\\boxed{18}\n\n## Question 2\nThree?\n\n\\boxed{3}", True),
    ("gsm8k reasoning math", "18", "Answer: 18<|im_end|>\n<|im_start|>user\nAnswer: 3", True),
    ("gsm8k reasoning", "18", "So she has 18 eggs.\n\n1.", True),
    ("gsm8k", "3", "Question 1: how many eggs of 9?\nAnswer: 3", True),  # it repeats the problem
    # units, currencies, factors
    ("gsm8k reasoning math", "72", r"\boxed{72\,\frac{\text{km}}{\text{h}}}", True),
    ("gsm8k reasoning math", "72", r"\boxed{72\ \mathrm{kg}\,\mathrm{m}^{-3}}", True),
    ("gsm8k reasoning math", "72", r"\boxed{\text{Rs. }72}", True),
    ("gsm8k reasoning math", "72", r"\boxed{72 square feet}", True),
    ("gsm8k reasoning math", "72", r"\boxed{72 more eggs}", True),
    ("gsm8k reasoning math", "72", r"\boxed{72 squared}", False),
    ("gsm8k reasoning math", "72", r"\boxed{72x}", False),
    ("gsm8k reasoning math", "5", "The answer is 5 twelfths.", False),
    ("gsm8k reasoning math", "5", "The answer is 5 thirds.", False),
    ("gsm8k reasoning math", "5", "The answer is 5 quadrillion.", False),
    ("gsm8k reasoning math", "5", "The answer is 5 bn.", False),
    ("gsm8k reasoning math", "5", "The answer is 5 lakh.", False),
    ("gsm8k reasoning math", "500000", "The answer is Rs 5 lakh.", True),
    ("gsm8k reasoning math", "5", r"\boxed{5 \text{ millionths}}", False),
    ("gsm8k reasoning math", "5", "The answer is five twentieths.", False),
    ("gsm8k reasoning math", "30", "The answer is 2.5 dozen eggs.", True),
    ("gsm8k reasoning math", "2.5", "The answer is 2.5 dozen eggs.", False),
    ("gsm8k reasoning math", "18000", r"\boxed{\$18\text{ thousand dollars}}", True),
    ("gsm8k reasoning math", "18", "The answer is **18** thousand.", False),
    ("gsm8k reasoning math", "18000", "The answer is $18k.", True),
    ("gsm8k reasoning math", "18000", r"\boxed{18k}", True),
    ("gsm8k reasoning math", "18000", "#### 18K", True),
    ("gsm8k reasoning math", "18", "#### 18k", False),
    ("math reasoning", "2k", r"\boxed{2k}", True),
    ("math reasoning", "2k", r"\boxed{$2k$}", True),
    ("math reasoning", "2k", r"\boxed{2 k}", True),
    ("math", "2k", r"\boxed{2\cdot k}", True),
    ("math", "2k", r"\boxed{k+k}", True),
    ("math reasoning", "2k", r"\boxed{2000}", False),
    ("math reasoning", "2k", r"\boxed{2K}", False),
    ("gsm8k reasoning math", "18", "The answer is 18 percent.", True),
    # LaTeX spacing and characters
    ("gsm8k reasoning math", "12345", r"\boxed{12\;345}", True),
    ("gsm8k reasoning math", "12345", r"\boxed{12,\!345}", True),
    ("math", "12", r"\boxed{12\;345}", False),
    ("gsm8k reasoning math", "12345678", r"The answer is 12,\! 345,\! 678.", True),
    ("gsm8k reasoning math", "12345678", r"\boxed{\left.12,\! 345,\! 678\right.}", True),
    ("math", r"(-\infty,2]", r"\boxed{(−∞, 2]}", True),
    ("math", r"2\sqrt{6}", r"\boxed{2√6}", True),
    ("math", r"\frac{\pi}{4}", r"\boxed{π/4}", True),
    ("math", "x^2+1", r"\boxed{x² + 1}", True),
    ("math", r"\sqrt{13}", r"\boxed{\sqrt13}", True),
    # bases, mixed numbers, recurring decimals, lists
    ("math", "52_8", r"\boxed{(52)_{\text{8}}}", True),
    ("math", "52_8", r"\boxed{52 \text{ base eight}}", True),
    ("math", "52_8", r"\boxed{52}", False),
    ("math", "9/4", r"\boxed{2\,\tfrac14 \text{ cups}}", True),
    ("math", "9/4", r"\boxed{2¼}", True),
    ("math", "21/4", r"\boxed{2 1/4}", False),
    ("math", "5/3", r"\boxed{2-1/3}", True),  # a difference
    ("math", "5/3", r"\boxed{2 - 1/3}", True),
    ("math reasoning gsm8k", "7/3", r"\boxed{2-1/3}", False),
    ("math reasoning gsm8k", "7/3", "The answer is 2-1/3 cups of flour.", True),
    ("math reasoning gsm8k", "7/3", "#### 2-1/3 cups", True),
    ("math reasoning gsm8k", "28", r"\boxed{2-1/3\text{ dozen eggs}}", True),
    ("math reasoning gsm8k", "2", "#### 2-1/3", False),
    ("math", r"\frac{1}{6}", r"\boxed{0.1\overline{6}}", True),
    ("math", r"\frac{1}{6}", r"\boxed{0.1666}", False),
    ("math", "7", r"\boxed{7,7}", False),
    ("math", "2,7", r"\boxed{7,2}", True),
    ("math", "1,1,2", r"\boxed{1,2,2}", False),
    ("reasoning", "1 1/2, 3", r"\boxed{11/2, 3}", False),
    ("reasoning", "1 1/2, 3", r"\boxed{1 1/2,3}", True),
    ("reasoning", "12, 3", r"\boxed{1 2, 3}", False),
    # letters: symbols, units, words
    ("math reasoning", "ab", r"\boxed{AB}", False),
    ("math reasoning", r"\text{No}", "The answer is no.", True),
    ("math reasoning", r"\text{east}", r"\boxed{\text{East}}", True),
    # intervals
    ("math", r"(3,5]", r"\boxed{3 < x \le 5}", True),
    ("math", r"(3,5]", r"\boxed{5 \ge t > 3}", True),
    ("math", r"(3,5]", r"\boxed{x > 3 \text{ and } x \le 5}", True),
    ("math", r"(3,5]", r"\boxed{3 \le x \le 5}", False),
    ("math", r"(-\infty,1)\cup[4,\infty)", r"\boxed{x < 1 \text{ or } x \ge 4}", True),
    ("math", r"x\ge 4", r"\boxed{[4,\infty)}", True),
    ("math", r"(0,9)\cup(9,36)", r"**Answer:** (0,9) \cup (9,36)", True),
    # intervals as they are written in French
    ("math reasoning", r"(2,\infty)", r"The answer is $]2, +\infty[$.", True),
    ("math reasoning", r"(2,\infty)", r"\boxed{x \in \left]2;\infty\right[}", True),
    ("math reasoning", r"[2,5)", r"**Answer:** [2, 5[", True),
    ("math reasoning", r"(-1,3]", r"\boxed{]-1,3]}", True),
    ("math reasoning", r"[2,3]", r"\boxed{[2;3]}", True),
    ("math reasoning", r"(0.5,3)", r"\boxed{]0,5;3[}", True),
    ("math", r"(\frac{1}{2},3]", r"\boxed{]0,5;3]}", True),
    ("math", r"(-\infty,1)\cup[4,\infty)", r"\boxed{]-∞,1[ ∪ [4,+∞[}", True),
    ("math", r"1 < x \le 2", r"\boxed{]1,2]}", True),
    ("math", r"[1.2,3.4]", r"\boxed{[1,2;3,4]}", False),  # a matrix
    ("math reasoning", r"x \in [2,3]", r"\boxed{x \in [2;3]}", True),
    ("math reasoning", r"x \in [2,3]", r"\boxed{y \in [2,3]}", False),
    ("math reasoning", r"x \in [2,3]", r"\boxed{X \in [2,3]}", False),
    ("math reasoning", r"[2,3]", r"\boxed{]2,3[}", False),
    ("math reasoning", r"[2,3]", r"\boxed{[2,3[}", False),
    ("math reasoning", r"[2,5)", r"\boxed{]2,5[}", False),
    ("math reasoning", r"(2,\infty)", r"\boxed{]3,\infty[}", False),
    ("math", r"\{2,3\}", r"\boxed{]2,3[}", False),
    # numbers in words
    (WORDED, "12", "The answer is twelve.", True),
    (WORDED, "24", "The answer is twenty-four dollars.", True),
    (WORDED, "42", "**Answer: Forty two**", True),
    (WORDED, "42", "The answer is forty-two, since 6 * 7 = 42 and 4 + 3 = 7.", True),
    (WORDED, "42", "The answer is forty‑two (6 * 7 = 42).", True),
    (WORDED, "105", "#### one hundred and five", True),
    (WORDED, "24", "#### Twenty-four dollars\n\nQ: 3 + 4?\n#### 7", True),
    (WORDED, "105", r"\boxed{\text{one hundred and five eggs}}", True),
    ("gsm8k reasoning math", "1500", "Answer: One thousand, five hundred dollars", True),
    ("gsm8k reasoning math", "105000", "The answer is a hundred and five thousand.", True),
    ("gsm8k reasoning math", "1200", "The answer is **twelve hundred** metres.", True),
    ("gsm8k reasoning math", "2.5", "The answer is two and a half hours.", True),
    ("gsm8k reasoning math", "-5", "The answer is negative five.", True),
    ("gsm8k reasoning math", "-5", "The answer is negative 5.", True),
    ("gsm8k reasoning math", "-5", "The answer is minus $5 a day.", True),
    ("gsm8k reasoning math", "-5", r"\boxed{\text{negative } 5}", True),
    ("gsm8k reasoning math", "-0.5", "#### minus .5", True),
    ("gsm8k", "5", "The answer is negative 5.", False),
    ("gsm8k", "5", "The answer is ten minus 5.", False),
    ("gsm8k reasoning math", "36", "The answer is three dozen eggs.", True),
    ("math", r"\text{six}", r"\boxed{6}", True),
    (WORDED, "12", "Forty-two", False),
    (WORDED, "42", "Forty-two", True),
    (WORDED, "18", "So Janet makes eighteen dollars.", True),
    (WORDED, "9", "She has sixteen eggs and eats seven, so nine are left.", True),
    (WORDED, "1", "So it is the other one.", False),
    ("gsm8k reasoning math", "6", "So she buys half a dozen eggs.", True),
    (WORDED, "7", "Of the balls twelve of them are red, so 7", True),
    (WORDED, "7", "#### twelve of them are red, so 7", True),
    (WORDED, "24", "The answer is twenty.", False),
    (WORDED, "20", "The answer is twenty-four.", False),
    (WORDED, "20", "The answer is twenty twelve.", False),
    (WORDED, "5", "The answer is five six.", False),
    (WORDED, "1", "The answer is one of the friends.", False),
    (WORDED, "1", "The answer is one that we know.", False),
    (WORDED, "1", "The answer: no one.", False),
    (WORDED, "1", "First, we count.", False),
    (WORDED, "1", "The answer is the first.", False),
    ("gsm8k reasoning", "1000000.5", "The answer is a million and a half.", False),
    (WORDED, "100", "The answer is hundreds.", False),
    (WORDED, "100", "The answer is hundred.", False),
    (WORDED, "3", "#### Three steps\nThat makes 18.", False),
    (WORDED, "18", "#### Three steps\nThat makes 18.", True),
    ("math", "5", r"\boxed{five sixths}", False),
    # numbers directly behind words of scripts without spaces
    (WORDED, "18", "答案是18。", True),
    (WORDED, "18", "所以一共是18个苹果。", True),
    (WORDED, "18", "答えは18です。", True),
    (WORDED, "18", "그래서 합계는18개입니다.", True),
    ("gsm8k reasoning math", "-18", "答案是-18。", True),
    (WORDED, "8", "答案是18。", False),
    (WORDED, "18", "The total is18.", False),
    (WORDED, "18", "Итого18", False),
    (WORDED, "18", "So it is α18.", False),
    (WORDED, "18", "So we get eggs_18.", False),
    # a stated number, and what it was counted from
    ("gsm8k reasoning math", "64", "The answer is $64 for 16 glasses.", True),
    ("gsm8k", "16", "The answer is $64 for 16 glasses.", False),
    ("gsm8k", "60", "The answer is 60 miles in 2 hours.", True),
    ("gsm8k reasoning math", "9", "The answer is 9 eggs after 7 days, I think.", True),
    ("gsm8k", "3", "The answer is 3 to 4.", False),
    ("gsm8k", "7/3", "The answer is 2 and 1/3 cups.", True),
    (WORDED, "2", "The answer is two, three.", False),
    (WORDED, "12", r"\boxed{\text{Twelve}}", True),
    (WORDED, "12", r"\boxed{\text{twelve} \text{ eggs}}", True),
    (WORDED, "12", "The answer is **twelve** eggs.", True),
    (WORDED, "12", "The answer is twelve (12).", True),
    (WORDED, "12", "Answer: 12 (twelve) eggs", True),
    (WORDED, "50", "The answer is fifty percent.", True),
    (WORDED, "12", "#### Twelve", True),
    ("gsm8k reasoning math", "1.5", "#### 1.5 hours\n\nQ: 3 + 4?\n#### 7", True),
    ("gsm8k reasoning math", "6", "The answer is half a dozen eggs.", True),
    ("gsm8k reasoning math", "500000", "The answer is half a million.", True),
    ("gsm8k", "2", "The answer is two out of three.", False),
    ("gsm8k", "31", "#### Thirty-one days in January\nThat makes 7.", False),
    ("gsm8k reasoning math", "10", "The answer is $10 more than the $5 he had.", True),
    ("gsm8k reasoning math", "40", "The answer is 40% of the 200 students.", True),
    ("gsm8k reasoning math", "8", "The answer is 8 hours to fill 2 tanks.", True),
    ("gsm8k reasoning math", "12", "The answer is 12 apples each for 3 kids.", True),
    ("gsm8k", "3", "The answer is 3 of 4.", False),
    ("gsm8k reasoning math", "7", "#### 7 eggs left\n\n#### Check\n3 + 4 = 7, 12 - 5", True),
    # headings of a list
    (WORDED, "18", "#### 1.\nAdd. That makes 18.", True),
    (WORDED, "1", "#### 1.\nAdd. That makes 18.", False),
    (WORDED, "18", "#### 1. Calculate the parts.\nThat makes 18.", True),
    (WORDED, "18", "#### **1.** Calculate\nThat makes 18.", True),
    (WORDED, "18", "#### 2)\nThat makes 18.", True),
    (WORDED, "18", "#### 1. 16 eggs are laid.\n#### 2. 2 are added.\nThat makes 18.", True),
    (WORDED, "18", "#### 1.Add\n#### 2.\nThat makes 18.", True),
    (WORDED, "18", "#### 1.1 Count the eggs\nThat makes 18.", True),
    (
        WORDED,
        "18",
        "#### 1. Add\n3 + 4 = 7\n#### 2. Sum\nIn all\n#### 18.\nQ: 3 + 4?\n#### 7",
        True,
    ),
    (WORDED, "18", "#### 18.\n\nQ: 3 + 4?\n#### 7", True),
    (WORDED, "18", "#### Rs 18\n\nQ: 3 + 4?\n#### 7", True),
]


@pytest.mark.parametrize(("tasks", "key", "text", "right"), KINDS)
def test_an_answer_is_read_as_people_read_it(tasks: str, key: str, text: str, right: bool) -> None:
    if "math" in tasks:
        pytest.importorskip("math_verify")
    for name in tasks.split():
        assert judged(TASKS[name], text, key) == (right, right), name


@pytest.mark.parametrize("joint", [" and ", " ", ", "])
def test_every_number_in_words_is_that_number(joint: str) -> None:
    for value in (*range(1200), *range(1999, 10**6, 9973), *range(10**6, 10**9, 99_999_973)):
        words = forms.in_words(value, joint)
        assert in_digits(words) == str(value), words
        assert in_digits(f"{words.title()} eggs") == f"{value} eggs", words


@pytest.mark.parametrize(
    "character", every(5, ["*", "#", "{", "(", "1 ", "- ", "answer is ", "\\boxed{", " \t"])
)
def test_a_text_of_one_thing_repeated_is_read_to_its_end(character: str) -> None:
    """Patterns that go back and forth would not finish within the limit of a test."""
    text = character * (100_000 // len(character)) + "."
    for task in TASKS.values():
        problem = Problem("0", task.name, "?", "7")
        task.is_terminal(problem, [text])
        task.grade(problem, task.answer(problem, [text]))


# The keys of whole data sets ----------------------------------------------------------------------

Case = tuple[Any, str, str, bool]  # task, key, text, whether it is right


def gsm8k_cases(keys: list[str]) -> Iterator[Case]:
    """Each key in each form, and numbers near it in some."""
    every = (*forms.SAID, *forms.NUMBERED, *forms.HASHED)
    some = ("The answer is «A».", "\\boxed{«A»}", "#### «A»", "So it is $«A»$.")
    for place, key in enumerate(keys):
        plain, *grouped = forms.number_texts(key)
        near = forms.wrong_numbers(key)
        for task in (TASKS["gsm8k"], TASKS["reasoning"]):
            for at, form in enumerate(every):
                yield task, key, forms.fill(form, plain), True
                wrong = near[(place + at) % len(near)]
                stated = f"#### {key}" in form  # the form's own number is the key
                if not stated and not ("%" in form and "/" in wrong):
                    yield task, key, forms.fill(form, wrong), False
            for form in some:
                yield from ((task, key, forms.fill(form, text), True) for text in grouped)
                yield from ((task, key, forms.fill(form, text), False) for text in near)
            for form in forms.WORD_FORMS:
                for number in (int(plain), *map(int, filter(str.isdigit, near))):
                    words = forms.in_words(number, " and " if len(plain) % 2 else " ")
                    yield task, key, forms.fill(form, words), number == int(plain)
            for form in forms.FACTOR_FORMS:
                for share, word in forms.factored(key):
                    yield task, key, forms.fill(form, share, word), True
                for word in forms.FACTORS if key != "0" else ():
                    yield task, key, forms.fill(form, key, word), False


def math_cases(keys: list[str]) -> Iterator[Case]:
    """Each key in each form and notation."""
    task = TASKS["math"]
    for key in keys:
        numbered = (*forms.NUMBERED, *forms.HASHED) if key.lstrip("-").isdigit() else ()
        for form in (*forms.SAID, *numbered):
            yield task, key, forms.fill(form, key), True
        for text in forms.math_texts(key):
            yield task, key, forms.fill("\\boxed{«A»}", text), True
            yield task, key, forms.fill("The answer is $«A»$.", text), True


def math_near_cases(keys: list[str]) -> Iterator[Case]:
    """Expressions near each key."""
    for key in keys:
        for text in forms.math_near(key):
            yield TASKS["math"], key, f"\\boxed{{{text}}}", False


def mistaken(cases: Iterator[Case]) -> list[tuple[str, str, str]]:
    """Task, key and text of the cases that are judged otherwise than people would."""
    return [
        (task.name, key, text)
        for task, key, text, right in cases
        if judged(task, text, key) != (right, right)
    ]


@pytest.fixture(scope="module")
def data() -> Path:
    folder = data_folder()
    if folder is None:
        pytest.skip(f"no data sets: {VARIABLE} is not set, and there is no ../shared/data")
    return folder


Cases = Callable[[list[str]], Iterator[Case]]
SETS: dict[str, tuple[Callable[[Path], list[str]], Cases, int, int]] = {
    # keys, cases, every so many in the default run, parts of the whole
    "gsm8k": (forms.gsm8k_keys, gsm8k_cases, 150, 4),
    "math": (forms.math_keys, math_cases, 50, 2),
    "math near": (forms.math_keys, math_near_cases, 50, 1),
}
# A bracket at infinity, and the unit of an area or a volume: no grader of these tasks reads them.
NEAR_THAT_COUNT = {
    (r"(2,\infty)", r"\boxed{(2,\infty]}"),
    (r"(5,\infty)", r"\boxed{(5,\infty]}"),
    (r"(-\infty, 0]", r"\boxed{[-\infty, 0]}"),
    (r"864 \mbox{ inches}^2", r"\boxed{864 \mbox{ inches}^3}"),
    (r"864 \mbox{ inches}^2", r"\boxed{864 \mbox{ inches}^7}"),
    (r"15\mbox{ cm}^2", r"\boxed{15\mbox{ cm}^3}"),
    (r"15\mbox{ cm}^2", r"\boxed{15\mbox{ cm}^7}"),
    ("-2,1", r"\boxed{-2,1_8}"),
}


def check(name: str, data: Path, take: slice) -> None:
    if name != "gsm8k":
        pytest.importorskip("math_verify")
    keys, cases, _, _ = SETS[name]
    wrong = mistaken(cases(keys(data)[take]))

    assert [each for each in wrong if each[1:] not in NEAR_THAT_COUNT] == []


@pytest.mark.parametrize("name", every(3, SETS))
def test_a_sample_of_real_keys_is_right_in_every_form_and_near_ones_are_wrong(
    name: str, data: Path
) -> None:
    check(name, data, slice(7, None, SETS[name][2]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "part"), [(n, p) for n in SETS for p in range(SETS[n][3])])
def test_every_real_key_is_right_in_every_form_and_near_ones_are_wrong(
    name: str, part: int, data: Path
) -> None:
    check(name, data, slice(part, None, SETS[name][3]))
