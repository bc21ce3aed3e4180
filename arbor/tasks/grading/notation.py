r"""Notation: answers without their markup, numbers read exactly, equality of texts."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from arbor.tasks.grading.intervals import plain_intervals
from arbor.tasks.grading.number_words import FACTOR, FACTORS, in_digits, without_unit

LONGEST = 400  # characters of an answer; a longer text does not count as one

# Characters as LaTeX
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "÷": "/", "⁄": "/", "∕": "/", "。": ".", "’": "'", "…": "\\ldots "}
    | dict.fromkeys("\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u202f\u2009\u2002\u2003\u3000", " ")
    | {
        character: f"\\{command} "
        for characters, command in (
            ("×", "times"),
            ("·⋅∙", "cdot"),
            ("∞", "infty"),
            ("≤⩽", "le"),
            ("≥⩾", "ge"),
            ("≠", "ne"),
            ("≈", "approx"),
            ("±", "pm"),
            ("∪", "cup"),
            ("∩", "cap"),
            ("∈", "in"),
            ("∅", "emptyset"),
            *((letter, unicodedata.name(letter).split()[-1].lower()) for letter in "αβγδθλμπρστφω"),
        )
        for character in characters
    }
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_WIDE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]+")
_ONE_CHARACTER_FRACTION = re.compile("[¼½¾⅐-⅞]")
_ROOT = re.compile(
    r"(?:√|\\?(?<![A-Za-z])sqrt(?![A-Za-z]))\s*(?:\(([^()]*)\)|(\d+|[A-Za-z](?![A-Za-z])))"
)

# Markup
_PAIRS = (
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("***", "***"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("_", "_"),
    ("`", "`"),
    ('"', '"'),
    ("“", "”"),
)
_EMPHASIS = re.compile(r"(?<![\w)*])(\*\*|__|\*|`)(?=[^\s*])([^*`\n]+?)(?<=[^\s*])\1(?![\w(*])")
_LOOSE_ENDS = re.compile(r"^[*`]+(?=[^*`])|(?<!\^)(?:[*`]+|(?<=\w)__)$")
_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|displaystyle|textstyle|left|right|[bB]igg?[lr]?)(?![A-Za-z]))|~"
)
_NO_BRACKET = re.compile(r"\\(?:left|right)\s*\.")
_GROUPED = re.compile(
    r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;:! ]|,\\!\s*|\{,\}|~|[ \u00a0\u202f\u2009])\d{3})+)(?![\d/]|,\d)"
)
_STYLES = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|"
    "boldsymbol|bm|mbox|hbox|emph|underline|operatorname"
)
_WRAPPED = re.compile(rf"\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}")
_STYLE = re.compile(rf"\\(?:{_STYLES})\s*(?=\{{)")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°")
_LABEL = re.compile(r"(?:[A-Z][A-Za-z ]{2,30}:|(?:[Tt]he )?(?:final )?answer is:?)\s*(?=\S)")

# Bases
_BASE = re.compile(
    r"(-?)[({]?([\dA-F.]+)[)}]?(?:_\{?\(?(\w+)\)?\}?|\s*\(?(?:in )?base[ -](\w+)\)?)"
)
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8} | {
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}

_VARIABLE = re.compile(r"([A-Za-z])\s*(?:=|\\in\b)\s*(?=\S)")
_SUM = re.compile(r"(?:[^A-Za-z\\]|\\(?:times|cdot|div|frac|sqrt)\b)+=\s*(?=[^=]+$)")  # 9 + 9 = 18
_CHOICE = re.compile(r"\(([A-Z])\)")
_SPACES = re.compile(r"\s+(?!(?<=\d\s)\d)")  # but the one of 1 1/2
_BRACED = re.compile(r"([_^])\{(\w)\}")  # x^{2} is x^2

# Numbers
_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)\s*({_DIGITS})")
_SCIENTIFIC = re.compile(rf"([+-]?)({_DIGITS})[eE]([+-]?\d{{1,3}})")
_POWER = re.compile(
    rf"([+-]?)(?:({_DIGITS})\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*\{{?([+-]?\d{{1,3}})\}}?"
)
_SLASH = re.compile(rf"([+-]?)\s*({_DIGITS})\s*/\s*({_DIGITS})")
_TWO = r"(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
_FRACTION = re.compile(rf"([+-]?)\s*\\frac\s*{_TWO}")
_MIXED = re.compile(rf"([+-]?)\s*(\d+)(?:\s*\\frac\s*{_TWO}|(?:\s+|\s*[+]\s*)(\d+)\s*/\s*(\d+))")
_MIXED_INSIDE = re.compile(r"(?<![\w.^/}])(\d+) +(\d+)\s*/\s*(\d+)(?![\d.])")  # of a list
_RECURRING = re.compile(r"([+-]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?|\()(\d+)[})]?")
_GOING_ON = re.compile(r"([+-]?)(\d*)\.(\d*?)(\d{1,3}?)\4{2,}\s*\\(?:ldots|dots|cdots)")
_TIMES = re.compile(rf"(.*?)\s*\b({'|'.join(FACTORS)})s?", re.IGNORECASE)
_IN_K = re.compile(rf"([+-]?\s*(?:{_DIGITS}))[kK]")
_PRICE_IN_K = re.compile(  # $18k, but not the mathematics of $2k$
    rf"((?:\\?\$|[£€¥₹])\s*(?:{_DIGITS}))[kK](?![\w^_]|.*(?<!\\)\$)", re.DOTALL
)
_THREES = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")  # 1,234 in an expression
_OF_A_LIST = re.compile(r",(?=\d{3}(?!\d))")  # what is left of them
_OPENING = re.compile(r"[(\[]|\\\{")
_CLOSING = re.compile(r"[)\]]|\\\}")
_PERCENT = re.compile(r"\s*(?:\\?%|(?i:per ?cent)\b)")


def normalise(answer: str) -> str:
    """An answer without notation: markup, spacing, units and currencies, the full stop.

    Characters of Unicode become LaTeX, numbers in words digits, and the brackets of French
    intervals English ones. A text far too long for an answer stays as it is.
    """
    if len(answer) > 4 * LONGEST:
        return answer.strip()
    text = grouped(_NO_BRACKET.sub("", _in_latex(answer)))
    text = _PRICE_IN_K.sub(r"\1 thousand", text)
    text = _unwrapped(text.replace("\\$", "").replace("$", ""))
    text = text.replace("\\%", "%").replace("{,}", ",")
    text = _SPACING.sub(" ", re.sub(r"\\!\s*", "", text))
    text = _DEGREES.sub("", text).rstrip(" .,;")
    text = without_unit(in_digits(text))
    while (bare := _unwrapped(_WRAPPED.sub(r"\1", text))) != text:
        text = without_unit(in_digits(bare))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    text = re.sub(r"\s+", " ", text).rstrip(" .,;").strip()
    return _in_base(plain_intervals(text))


def _in_latex(text: str) -> str:
    """A text whose mathematical characters are commands."""
    text = _WIDE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _ONE_CHARACTER_FRACTION.sub(
        lambda match: " \\frac{{{}}}{{{}}}".format(
            *unicodedata.normalize("NFKC", match[0]).split("⁄")
        ),
        text,
    )
    text = _RAISED_RUN.sub(lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text)
    text = re.sub(r"\.{3,}", r"\\ldots ", text.translate(_SIGNS)).strip()
    return _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)


def grouped(text: str) -> str:
    """A text whose numbers have no spaces or LaTeX between their thousands."""
    return _GROUPED.sub(lambda match: match[1] + "".join(re.findall(r"\d{3}", match[2])), text)


def _unwrapped(text: str) -> str:
    """A text without the marks around all of it, and without those of Markdown."""
    before = None
    while text != before:
        before = text = _EMPHASIS.sub(r"\2", text).strip()
        bare = text.rstrip(" .,;:")
        for opening, closing in _PAIRS:
            inner = bare[len(opening) : -len(closing)]
            if (
                len(bare) > len(opening) + len(closing)
                and bare.startswith(opening)
                and bare.endswith(closing)
                and opening not in inner
            ):
                text = inner.strip()
                break
        else:
            style = _STYLE.match(text)
            start = style.end() if style else 0
            if text[start:].startswith("{") and _closes_at(text[start:]) == len(text) - start - 1:
                text = text[start + 1 : -1].strip()
            else:
                text = _LOOSE_ENDS.sub("", text).strip()
    return text


def _closes_at(text: str) -> int:
    """The place of the brace that closes the first one; -1 if none does."""
    depth = 0
    for at, character in enumerate(text):
        escaped = at > 0 and text[at - 1] == "\\"
        depth += 0 if escaped else (character == "{") - (character == "}")
        if depth == 0:
            return at
    return -1


def _in_base(text: str) -> str:
    """A number in another base as in 52_8; one in base ten is a number."""
    based = _BASE.fullmatch(text)
    if not based:
        return text
    digits, base = based[1] + based[2], (based[3] or based[4]).lower()
    base = str(_BASE_NAMES.get(base, base))
    return digits if base == "10" else f"{digits}_{base}"


def number(text: str) -> Fraction | None:
    r"""The exact value of a normalised answer that is a plain number; None for anything else.

    Such as 1,234.50, 50%, \frac{3}{4}, 11 5/6, 0.1\overline{6}, 10^6, 2.5\times10^3, 5 million.
    Commas must group by threes; in brackets they never do: (1,234) may be a point. A percent sign
    is a unit and changes no value.
    """
    text = _PERCENT.sub("", text.strip()) if len(text) <= LONGEST else ""
    if re.fullmatch(r"\([^(),]*\)|\[[^\[\],]*\]", text):
        text = text[1:-1].strip()
    factor = 1
    while match := _TIMES.fullmatch(text):
        factor *= FACTORS[match[2].lower()]
        text = match[1]
    value = _plain_number(text)
    return None if value is None else value * factor


def _plain_number(text: str) -> Fraction | None:
    if match := _NUMBER.fullmatch(text):
        return _signed(match[1], Fraction(_plain(match[2])))
    if match := _SCIENTIFIC.fullmatch(text) or _POWER.fullmatch(text):
        return _signed(match[1], Fraction(_plain(match[2] or "1")) * Fraction(10) ** int(match[3]))
    if match := _RECURRING.fullmatch(text) or _GOING_ON.fullmatch(text):
        start, repeated = match[3], match[4]
        whole = Fraction(int((match[2] or "0") + start), 10 ** len(start))
        period = Fraction(int(repeated), 10 ** len(start) * (10 ** len(repeated) - 1))
        return _signed(match[1], whole + period)
    if match := _MIXED.fullmatch(text):
        above, below = int(match[3] or match[4] or match[7]), int(match[5] or match[6] or match[8])
        proper = 0 < above < below
        return _signed(match[1], int(match[2]) + Fraction(above, below)) if proper else None
    if match := _SLASH.fullmatch(text):
        top, bottom = Fraction(_plain(match[2])), Fraction(_plain(match[3]))
    elif match := _FRACTION.fullmatch(text):
        top, bottom = Fraction(match[2] or match[3]), Fraction(match[4] or match[5])
    else:
        return None
    return _signed(match[1], top / bottom) if bottom else None


def _plain(digits: str) -> str:
    return digits.replace(",", "").rstrip(".")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def in_thousands(text: str) -> str:
    """A normalised answer where a number is asked for: 18k is 18 thousand, and else a product."""
    match = _IN_K.fullmatch(text)
    return f"{match[1]} thousand" if match else text


def in_digits_alone(text: str) -> str:
    r"""An answer whose numbers have no commas of thousands and no factor in words, and whose mixed
    numbers are LaTeX: 1 1/2, 5 is 1\frac{1}{2}, 5.

    Commas in brackets stay: ``(1,200)`` may be a point. ``1, 000`` and ``0,100`` are lists, with
    a space behind each comma that could else group by threes.
    """
    exact = None if text.startswith(("(", "[")) or is_percentage(text) else number(text)
    if exact is not None:
        return str(exact)
    plain = _THREES.sub(
        lambda match: match[0] if _is_open(text[: match.start()]) else match[0].replace(",", ""),
        text,
    )
    return _MIXED_INSIDE.sub(_mixed_in_latex, _OF_A_LIST.sub(", ", plain))


def _mixed_in_latex(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    proper = 0 < int(above) < int(below)
    return f"{whole}\\frac{{{above}}}{{{below}}}" if proper else match[0]


def _is_open(text: str) -> bool:
    r"""Whether a bracket is still open at the end of a text; braces count as ``\{``."""
    return len(_OPENING.findall(text)) > len(_CLOSING.findall(text))


def is_percentage(text: str) -> bool:
    """Whether a normalised answer is written as a percentage."""
    return _PERCENT.search(text) is not None


def has_factor(text: str) -> bool:
    """Whether a normalised answer has a factor in words, or half or pi."""
    return FACTOR.search(text) is not None


def same(answer: str, expected: str) -> bool:
    r"""Whether two normalised answers are equal: as numbers, or as text.

    Text is compared without spaces, but those between digits; plain words also without case, from
    three letters on; a single capital letter also in
    parentheses. ``x = 5`` is 5, but not ``y = 5``; so with ``\in``.
    """
    mine, theirs = _VARIABLE.match(answer), _VARIABLE.match(expected)
    if mine is None or theirs is None or mine[1] == theirs[1]:
        answer = answer[mine.end() :] if mine else answer
        expected = expected[theirs.end() :] if theirs else expected
    if ("=" in answer) != ("=" in expected):
        answer, expected = (_SUM.sub("", each) for each in (answer, expected))
    left, right = number(answer), number(expected)
    if left is not None or right is not None:
        return left == right
    left_text, right_text = _bare(answer), _bare(expected)
    if left_text.isalpha() and (len(left_text) > 2 or left_text.casefold() == "no"):
        return left_text.casefold() == right_text.casefold()
    return left_text == right_text


def _bare(text: str) -> str:
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else _BRACED.sub(r"\1\2", without_spaces(text))


def without_spaces(text: str) -> str:
    """A text without spaces, but those between digits: 1 1/2 is not 11/2."""
    return _SPACES.sub("", text)
