r"""Forms in which models write an answer, and answers that are nearly the key but are not it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

NEXT = "Bob has 3 cats and buys 4 more. How many cats does Bob have?"

# «A» is the answer; every form fits a number as well as an expression.
SAID = (
    "Final Answer: **«A»**",
    "So the answer is **«A»**.",
    "The answer is __«A»__.",
    "The answer is *«A»*.",
    "The answer is `«A»`.",
    "The answer is ***«A»***!",
    "**Answer:** «A»",
    "**Answer: «A»**",
    "**Answer**: «A»",
    "*Answer:* «A».",
    "__Answer:__ «A»",
    "### Answer: «A»",
    "### Answer\n«A»",
    "## Final Answer\n\n**«A»**",
    "### **Final Answer:** «A»",
    "**Final Answer**\n\n«A»",
    "**The final answer is «A».**",
    "The final answer is **$«A»$**.",
    "> **Answer:** «A»",
    "- **Answer:** «A»",
    "The answer is «A»!",
    "The answer is: «A»",
    "The answer is:\n\n«A»",
    "Answer: «A»",
    "ANSWER: «A»",
    "Answer = «A»",
    "The correct answer is «A».",
    "The answer is therefore «A».",
    "Thus, the final answer to the problem is «A».",
    "The answer would be «A».",
    "Final answer:\n\\[\n«A»\n\\]",
    "Final answer:\n\\[ «A» \\]\n",
    "Final answer:\n$$\n«A»\n$$",
    "The answer is\n$$«A».$$",
    "The final answer is:\n\n\\[\n\\boxed{«A»}\n\\]",
    "The answer is \\(«A»\\).",
    "The answer is $«A»$.",
    "The answer is $«A»$, since $2 + 2 = 4$.",
    "The answer is $«A»$ because 9 * 2 = 18.",
    "The answer is **«A»**, as 9 * 2 = 18 shows.",
    "The answer is «A». I checked it again: the answer is correct.",
    "The answer is «A». Since 9 * 2 = 18, the answer is reasonable.",
    "The answer is «A». To verify, 4 + 3 = 7, so the answer is right!",
    "The final answer is «A». I hope it is correct.",
    "\\boxed{«A»}",
    "\\[\\boxed{\\mathbf{«A»}}\\]",
    "\\boxed{**«A»**}",
    "\\boxed{ \\;«A»\\, }",
    "\\boxed{{«A»}}",
    "\\boxed{\\left.«A»\\right.}",
    "\\boxed{\\displaystyle «A»}",
    "\\boxed{$«A»$}",
    "The answer is «A».\n\nNote: 1. Add. 2. Check.",
    "1. Add the parts.\n2. Check.\n\nThe answer is «A».\n\n1.",
    "#### Step 1: Add\n3 + 4 = 7\n\n#### Step 2: The answer\n\nThe answer is «A».",
    "#### 1. Add the parts\n3 + 4 = 7\n\n#### 2. Answer\n\nFinal answer: «A»",
    # a base model goes on with a problem of its own
    f"\\boxed{{«A»}}\n\nProblem: {NEXT}\n\nSolution:\nIt has \\boxed{{7}}.",
    f"The answer is «A».\n\nQuestion: {NEXT}\nAnswer:\nThe answer is 7.\n",
    f"The answer is «A».\n\nQ: {NEXT}\nA: The answer is 7.\n",
    f"The answer is «A».\n\n### Problem 2\n{NEXT}\n\nThe answer is 7.\n",
    f"The answer is «A».\n\n**Question:** {NEXT}\n**Answer:** 7\n",
    f"The answer is «A».\nHuman: {NEXT}\nAssistant: The answer is 7.\n",
    f"Answer: «A»\n\nUser: {NEXT}\n\nAssistant: 7",
)

# Only for numbers: of plain text, with units, currencies and hashes.
NUMBERED = (
    "The answer is «A», since 9 * 2 = 18 and 4 + 3 = 7.",
    "The answer is «A», which is 2 more than 7.",
    "The answer is «A» because 9 * 2 = 18.",
    "The answer is «A» (9 * 2 = 18).",
    "The answer is «A» - see 9 * 2 = 18 above.",
    "The answer is «A» eggs.",
    "The answer is «A» eggs, 9 of them white.",
    "The answer is **«A» eggs** per day.",
    "The answer is **«A»** eggs.",
    "The answer is $«A»$ eggs.",
    "The answer is «A»kg.",
    "The answer is «A» km/h.",
    "The answer is $«A».",
    "The answer is $«A» per week.",
    "The answer is \\$«A».",
    "The answer is £«A».",
    "The answer is «A» €.",
    "The answer is USD «A».",
    "The answer is approximately «A».",
    "The answer is «A».00.",
    "The answer is x = «A».",
    "So she makes «A» dollars.\n\nQuestion: Bob has 3 cats.\nAnswer:\nHe has 3 cats.\n",
    "So she makes «A» dollars a day.\n1.",
    "So she has «A» eggs.\n\n- \n2. ",
    "\\boxed{«A» eggs}",
    "\\boxed{\\text{«A» dollars}}",
    "\\boxed{\\text{«A»}}",
    "\\boxed{«A» \\text{ eggs}}",
    "\\boxed{«A» \\text{ eggs}/\\text{day}}",
    "\\boxed{«A»\\ \\text{km/h}}",
    "\\boxed{«A»\\,\\mathrm{kg}}",
    "\\boxed{«A»\\,\\mathrm{km}\\,\\mathrm{h}^{-1}}",
    "\\boxed{«A» \\text{ cm}^2}",
    "\\boxed{«A»\\, \\text{cm}^{3}}",
    "\\boxed{«A»\\,\\frac{\\text{m}}{\\text{s}}}",
    "\\boxed{«A»^\\circ}",
    "\\boxed{«A»^{\\circ}\\text{C}}",
    "\\boxed{«A» °C}",
    "\\boxed{\\$«A»}",
    "\\boxed{\\text{\\$«A»}}",
    "\\boxed{£«A»}",
    "\\boxed{\\pounds «A»}",
    "\\boxed{€«A»}",
    "\\boxed{«A» € }",
    "\\boxed{\\text{Total: } «A»}",
    "\\boxed{x = «A»}",
    "\\boxed{9 + 9 = «A»}",
)
HASHED = (
    "9 + 9 = 18\n#### «A»",
    f"#### «A»\n\nQuestion: {NEXT}\nAnswer: 7\n#### 7\n",
    f"#### «A» km/h\n\nQuestion: {NEXT}\nAnswer: 7\n#### 7\n",
    "#### «A»kg\n\nQuestion: Bob has 3 cats.\nAnswer: 3\n#### 3\n",
    "#### £«A»\n\nQuestion: Bob has 3 cats.\nAnswer: 3\n#### 3\n",
    "#### €«A»\n\nQuestion: Bob has 3 cats.\nAnswer: 3\n#### 3\n",
    "#### $«A» per week\n\nQ: Bob has 3 cats.\nA: 3\n#### 3\n",
    "#### \\$«A»",
    "#### «A» $",
    "#### «A» dollars, or 3 a day\n#### 3",
    "#### «A» (9 * 2 = 18)",
    "#### «A», since 9 * 2 = 18 and 4 + 3 = 7",
    "#### «A» because 9 * 2 = 18",
    "#### **«A»**",
    "#### **«A» eggs**",
    "#### «A»%",
    "#### «A» percent",
    "#### «A».",
    "####«A»",
    "#### $«A»$",
    "#### \\(«A»\\)",
    "#### \\boxed{«A»}",
    "#### Answer: «A»",
    "#### The answer is «A».",
    "#### x = «A»",
    "#### 9 * 2 = «A»",
    "#### «A».00",
    "#### 1. Add the parts\n3 + 4 = 7\n#### 2. Sum\nIn all\n#### «A»",
    "#### Step 1\n3 + 4 = 7\n#### Step 2\nIn all\n#### «A» eggs",
    "#### 1. Calculate the total\nThat is 3 * 6.\n\n#### 2. Sum\nSo there are «A».",
)
FACTORS = {"dozen": 12, "thousand": 1000, "million": 10**6, "hundred": 100, "billion": 10**9}
FACTOR_FORMS = (
    "The answer is «A» «F».",
    "The answer is **«A» «F»** eggs.",
    "The answer is **«A»** «F».",
    "The answer is $«A»$ «F».",
    "The answer is $«A» «F».",
    "#### «A» «F»",
    "#### $«A» «F» a year",
    "#### **«A» «F»**",
    "\\boxed{«A» \\text{ «F»}}",
    "\\boxed{«A»\\ \\mathrm{«F»}}",
    "\\boxed{\\text{«A» «F» eggs}}",
    "\\boxed{«A» «F»}",
)
WORD_FORMS = (
    "The answer is «A».",
    "**Answer: «A» dollars**, since 9 * 2 = 18",
    "\\boxed{\\text{«A»}}",
    "#### «A»",
)


def fill(form: str, answer: str, factor: str = "") -> str:
    """A form with an answer in it."""
    return form.replace("«A»", answer).replace("«F»", factor)


def number_texts(answer: str) -> Iterator[str]:
    """A whole number as models write it: with separators of thousands, and without."""
    plain = answer.replace(",", "")
    yield plain
    if len(plain.lstrip("-")) > 3:
        for separator in (",", "{,}", "\\,", ",\\!", " ", "\u202f", "\\ ", "~"):
            yield f"{int(plain):,}".replace(",", separator)


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def in_words(value: int, joint: str = " and ") -> str:
    """A whole number in English words.

    Args:
        joint: between hundreds and what is below; American English has none.
    """
    if value < 0:
        return f"minus {in_words(-value, joint)}"
    if value < 20:
        return _ONES.split()[value]
    if value < 100:
        tens = _TENS.split()[value // 10 - 2]
        return f"{tens}-{in_words(value % 10)}" if value % 10 else tens
    size, word = next(
        each
        for each in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
        if value >= each[0]
    )
    rest = value % size
    between = joint if rest < 100 else " "
    whole = f"{in_words(value // size, joint)} {word}"
    return f"{whole}{between}{in_words(rest, joint)}" if rest else whole


def factored(answer: str) -> Iterator[tuple[str, str]]:
    """A whole number as a smaller one and a factor in words; factors that it is not one of too."""
    value = int(answer.replace(",", ""))
    for word, factor in FACTORS.items():
        share = Fraction(value, factor)
        if value and (share * 100).denominator == 1:
            yield (str(share) if share.denominator == 1 else f"{float(share):g}"), word


def wrong_numbers(answer: str) -> list[str]:
    """Whole numbers that are not the answer but near it."""
    value = int(answer.replace(",", ""))
    near = {
        value + 1,
        value - 1,
        10 * value,
        100 * value,
        -value,
        1000 + value,
        int(f"1{abs(value)}"),
    }
    found = [str(each) for each in sorted(near - {value})]
    return [*found, f"{value}.5", f"{value}/7" if value else "1/7"]


def math_texts(answer: str) -> Iterator[str]:
    """An expression as models write it: other spacing, other commands, characters of Unicode."""
    yield answer
    yield re.sub(r",(?![\d\\])", ", ", answer).replace("  ", " ")
    yield answer.replace("\\frac", "\\dfrac")
    yield answer.replace("\\frac", "\\tfrac")
    yield answer.replace("\\left", "").replace("\\right", "")
    yield re.sub(
        r"(?<![\\A-Za-z])([(\[])",
        r"\\left\1",
        re.sub(
            r"(?<![\\A-Za-z])([)\]])",
            r"\\right\1",
            answer.replace("\\left", "").replace("\\right", ""),
        ),
    )
    yield re.sub(r"([+=])", r" \1 ", answer)
    yield re.sub(r"\s+(?![A-Za-z])", "", answer)
    yield re.sub(r"\\sqrt\{(\w+)\}", r"\\sqrt(\1)", answer)
    yield re.sub(r"\\sqrt\{(\w)\}", r"\\sqrt\1", answer)
    yield re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\1/\2", answer) if answer[0] == "\\" else answer
    yield re.sub(r"\\text\{([^{}]*)\}", r"\\mathrm{\1}", answer)
    yield re.sub(r"\\text\{([^{}]*)\}", r"\\textbf{\1}", answer)
    yield re.sub(r"_\{?(\d+)\}?", r"_{\1}", answer)
    yield answer.replace("\\pi", "π").replace("\\infty", "∞").replace("\\pm", "±")
    yield answer.replace("\\cup", "∪").replace("\\in ", "∈ ")
    yield answer.replace("^\\circ", "°")
    yield answer.replace("-", "−")
    yield (
        re.sub(r"\\sqrt\{(\w+)\}", r"√\1", answer)
        if re.search(r"\\sqrt\{\w\w?\}$", answer)
        else answer
    )
    yield re.sub(r"\\sqrt\{([^{}]+)\}", r"√(\1)", answer)
    yield re.sub(r"\^(?:\{2\}|2(?!\d))", "²", answer)
    yield re.sub(r"\^(?:\{3\}|3(?!\d))", "³", answer)


def math_near(answer: str) -> Iterator[str]:
    """Expressions that are near a key of MATH and differ from it for certain."""
    found: set[str] = set()
    for at, character in enumerate(answer):
        if character.isdigit():
            for digit in {(int(character) + 1) % 10, (int(character) + 5) % 10}:
                found.add(f"{answer[:at]}{digit}{answer[at + 1 :]}")
    for match in re.finditer(r"\d+", answer):
        start, end = match.span()
        if match[0] != "0" and answer[start - 1 : start] != ".":
            found |= {f"{answer[:end]}0{answer[end:]}", f"{answer[:end]}00{answer[end:]}"}
        found.add(f"{answer[:start]}1{answer[start:]}")
        if match[0] != "0" and "pm" not in answer:
            found.add(f"{answer[:start]}{match[0]}.1{answer[end:]}")
    for one, two in (("+", "-"), ("-", "+"), ("(", "["), ("[", "("), (")", "]"), ("]", ")")):
        once = answer.count(one) == 1 and not answer.startswith(f"\\left{one}")
        pair = one not in "()" or re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", answer)
        if once and pair and "pm" not in answer:
            found.add(answer.replace(one, two))
    for one, two in (
        ("\\pi", "\\pi^2"),
        ("\\sqrt", "3\\sqrt"),
        ("x", "y"),
        ("x", "X"),
        ("\\cup", "\\cap"),
        ("\\infty", "100"),
        ("i", "j"),
        ("\\frac", "2\\frac"),
    ):
        if re.search(rf"{re.escape(one)}(?![A-Za-z])", answer) and not (
            one == "i" and "\\" in answer
        ):
            found.add(re.sub(rf"{re.escape(one)}(?![A-Za-z])", lambda _, two=two: two, answer))
    plain = re.fullmatch(r"-?[\d,]+(\.\d+)?", answer) is not None
    if plain and answer not in ("0",):
        found |= {
            f"-{answer}" if answer[0] != "-" else answer[1:],
            f"{answer}\\pi",
            f"\\sqrt{{{answer}}}x",
        }
        found |= {f"{answer} \\text{{ {word}}}" for word in FACTORS}
        found |= {f"{answer}_8", f"{answer},{answer}", f"({answer},0)", f"{answer}+x", f"{answer}i"}
        found |= {f"\\{{{answer},0\\}}", f"x^{{{answer}}}"}
    base = re.fullmatch(r"(\d+)_\{?(\d)\}?", answer)
    if base:
        found |= {base[1], f"{base[1]}_{int(base[2]) + 1}", f"{base[1]}_{{1{base[2]}}}"}
    parts = re.fullmatch(r"\(([^()]*),([^()]*)\)", answer)
    if parts and parts[1].strip() != parts[2].strip():
        found |= {f"({parts[2].strip()},{parts[1].strip()})", f"\\{{{parts[1]},{parts[2]}\\}}"}
        found.add(f"({parts[1]})")
    yield from sorted(found - {answer})


def gsm8k_keys(folder: Path) -> list[str]:
    """The keys of GSM8K's test problems."""
    lines = (folder / "gsm8k-test.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]


def math_keys(folder: Path) -> list[str]:
    """The keys of MATH-500."""
    lines = (folder / "math500.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"].rpartition("The answer is: ")[2].strip() for line in lines]
