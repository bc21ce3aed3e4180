r"""Notation: answers without their markup, numbers read exactly, equality of texts."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 400  # characters of an answer; a longer text does not count as one
_SPACING = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|displaystyle\b|left\b|right\b)|~")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}])\s*\\(?:text|textrm|mathrm|mbox)\s*\{\s*([^{}\d]*)\}\s*(?:\^\{?[23]\}?)?$"
)
FACTOR = re.compile(
    r"(?i)\b(?:hundred|thousand|million|billion|trillion|dozen|score|half|pi|percent)s?\b"
)
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°")
_VARIABLE = re.compile(r"([A-Za-z])\s*=\s*(?=\S)")
_CHOICE = re.compile(r"\(([A-Z])\)")
_BRACED = re.compile(r"([_^])\{(\w)\}")  # x^{2} is x^2
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)\s*\$?\s*({_DIGITS})\s*%?")
_POWER = re.compile(
    rf"([+-]?)({_DIGITS})(?:e([+-]?\d{{1,3}})|\s*(?:\\times|\\cdot|\*)\s*10\^\{{?([+-]?\d{{1,3}})\}}?)"
)
_SLASH = re.compile(rf"([+-]?)\s*({_DIGITS})\s*/\s*({_DIGITS})")
_FRACTION = re.compile(
    r"([+-]?)\s*\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
)


def normalise(answer: str) -> str:
    """An answer without notation: dollar signs, bold marks, spacing commands, units, full stop."""
    text = answer.translate(_SIGNS).strip()
    for opening, closing in (
        ("\\(", "\\)"),
        ("\\[", "\\]"),
        ("**", "**"),
        ("$$", "$$"),
        ("$", "$"),
    ):
        if len(text) >= len(opening) + len(closing) and text.startswith(opening):
            inner = text.rstrip(".")
            if inner.endswith(closing) and inner != opening:
                text = inner[len(opening) : -len(closing)].strip()
    text = text.replace("\\$", "").replace("\\%", "%").replace("{,}", ",")
    text = re.sub(r"\\!\s*", "", text)
    text = _SPACING.sub(" ", text)
    text = _DEGREES.sub("", text).rstrip(" .,;")
    unit = _UNIT.search(text)
    if unit and not FACTOR.search(unit[1]):
        text = text[: unit.start()]
    text = _WRAPPED.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\s+", " ", text).rstrip(" .,;").strip()
    return text.removeprefix("$").strip()


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number; None for anything else.

    Such as 1,234.50, $5, 50%, 3/4, \frac{3}{4}, 2.5\times10^3, 1e-3.
    Commas must group by threes. A percent sign is a unit and changes no value.
    """
    text = text.strip()
    if len(text) > LONGEST:
        return None
    if match := _NUMBER.fullmatch(text):
        return _signed(match[1], Fraction(_plain(match[2])))
    if match := _POWER.fullmatch(text):
        return _signed(
            match[1], Fraction(_plain(match[2])) * Fraction(10) ** int(match[3] or match[4])
        )
    if match := _SLASH.fullmatch(text):
        above, below = Fraction(_plain(match[2])), Fraction(_plain(match[3]))
    elif match := _FRACTION.fullmatch(text):
        above, below = Fraction(match[2] or match[3]), Fraction(match[4] or match[5])
    else:
        return None
    return _signed(match[1], above / below) if below else None


def _plain(digits: str) -> str:
    return digits.replace(",", "").rstrip(".")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def same(answer: str, expected: str) -> bool:
    """Whether two normalised answers are equal: as numbers, or as text.

    Text is compared without spaces; plain words also without case; a single capital letter also in
    parentheses. ``x = 5`` is 5, but not ``y = 5``.
    """
    mine, theirs = _VARIABLE.match(answer), _VARIABLE.match(expected)
    if mine is None or theirs is None or mine[1] == theirs[1]:
        answer = answer[mine.end() :] if mine else answer
        expected = expected[theirs.end() :] if theirs else expected
    left, right = number(answer), number(expected)
    if left is not None or right is not None:
        return left == right
    left_text, right_text = _bare(answer), _bare(expected)
    if left_text.isalpha() and len(left_text) > 1:
        return left_text.casefold() == right_text.casefold()
    return left_text == right_text


def _bare(text: str) -> str:
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else _BRACED.sub(r"\1\2", re.sub(r"\s", "", text))
