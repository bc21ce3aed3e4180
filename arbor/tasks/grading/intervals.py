r"""Intervals in one notation, as (2,7]: inequalities, ``2<x\le 7``, and the French ``]2,7]``."""

from __future__ import annotations

import re

_LETTER = r"(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu|phi))"
_LESS = r"\s*(<=|<|\\(?:leqslant|leq|le|lt)(?![A-Za-z]))\s*"
_MORE = r"\s*(>=|>|\\(?:geqslant|geq|ge|gt)(?![A-Za-z]))\s*"
_BOUND = r"([^<>=,]+?)"
_BETWEEN = re.compile(rf"{_BOUND}{_LESS}{_LETTER}{_LESS}{_BOUND}")
_BETWEEN_DOWN = re.compile(rf"{_BOUND}{_MORE}{_LETTER}{_MORE}{_BOUND}")
_BELOW = re.compile(rf"{_LETTER}{_LESS}{_BOUND}")
_ABOVE = re.compile(rf"{_LETTER}{_MORE}{_BOUND}")
_BELOW_TURNED = re.compile(rf"{_BOUND}{_MORE}{_LETTER}")
_ABOVE_TURNED = re.compile(rf"{_BOUND}{_LESS}{_LETTER}")
_STRICT = ("<", ">", "\\lt", "\\gt")
_OR = re.compile(r"\s*(?:,\s*(?:or\b)?|\bor\b|\\lor\b|\\cup\b)\s*")
_AND = re.compile(r"\s*(?:\band\b|\\land\b|\\wedge\b)\s*")
_REALS = r"(?:\s*\\in\s*(?:\\mathbb\s*\{?R\}?|\\R|R))?"
_SET_OF = re.compile(rf"\\?\{{\s*{_LETTER}{_REALS}\s*(?:\\mid\b|:|\|)\s*(.+?)\s*\\?\}}")
_INTERVAL = re.compile(r"[(\[].+,.+[)\]]")
_MEMBER = re.compile(rf"{_LETTER}\s*\\in\b\s*(?=[(\[\]])")
_END = r"(?:[^()\[\],;]|\([^()]*\))+"
_DECIMAL_END = _END.replace(",", "")  # 0,5 where a semicolon stands between the ends
_PART = re.compile(rf"([(\[\]])(?:({_END}),({_END})|({_DECIMAL_END});({_DECIMAL_END}))([)\[\]])")
_PARTS = re.compile(rf"{_PART.pattern}(?:\s*(?:\\cup|\\cap|,|\bor|\band)\s*{_PART.pattern})*")

Bound = tuple[str, str]  # a bracket and a value; without a value the line goes on


def is_interval(text: str) -> bool:
    """Whether a normalised answer is written as an interval, or several."""
    return _INTERVAL.fullmatch(_MEMBER.sub("", text, count=1)) is not None


def plain_intervals(text: str) -> str:
    r"""Intervals with the brackets of English: ``]2;+\infty[`` is ``(2,\infty)``.

    Args:
        text: a normalised answer; one that is not an interval, or several, stays as it is.
    """
    member = _MEMBER.match(text)
    start = member.end() if member else 0
    return _PART.sub(_in_english, text) if _PARTS.fullmatch(text, start) else text


def _in_english(match: re.Match[str]) -> str:
    if match[4] and "," in match[0] and match[1] != "]" and match[6] != "[":
        return match[0]  # perhaps a matrix, [1,2;3,4]
    ends = match.group(2, 3) if match[2] else (end.replace(",", ".") for end in match.group(4, 5))
    low, high = (end.strip().replace("+\\infty", "\\infty") for end in ends)
    return f"{match[1].replace(']', '(')}{low},{high}{match[6].replace('[', ')')}"


def as_interval(text: str) -> str | None:
    r"""Inequalities as intervals, joined by ``\cup``; None for anything else.

    Args:
        text: a normalised answer, perhaps as the condition of a set.
    """
    within = _SET_OF.fullmatch(text)
    parts = [_joint(part) for part in _OR.split(within[1] if within else text)]
    return None if None in parts else " \\cup ".join(filter(None, parts))


def _joint(text: str) -> str | None:
    """The interval of one inequality, or of two that hold together, one from each side."""
    found = [_bounds(part) for part in _AND.split(text)]
    low, high = (
        [bounds[side] for bounds in found if bounds and bounds[side][1]] for side in (0, 1)
    )
    if None in found or len(low) > 1 or len(high) > 1:
        return None
    opening, least = low[0] if low else ("(", "-\\infty")
    closing, most = high[0] if high else (")", "\\infty")
    return f"{opening}{least},{most}{closing}"


def _bounds(text: str) -> tuple[Bound, Bound] | None:
    """The lower and the upper bound of an inequality."""
    if match := _BETWEEN.fullmatch(text):
        return _low(match[2], match[1]), _high(match[3], match[4])
    if match := _BETWEEN_DOWN.fullmatch(text):
        return _low(match[3], match[4]), _high(match[2], match[1])
    if match := _BELOW.fullmatch(text):
        return _low("<", ""), _high(match[1], match[2])
    if match := _BELOW_TURNED.fullmatch(text):
        return _low("<", ""), _high(match[2], match[1])
    if match := _ABOVE.fullmatch(text):
        return _low(match[1], match[2]), _high("<", "")
    if match := _ABOVE_TURNED.fullmatch(text):
        return _low(match[2], match[1]), _high("<", "")
    return None


def _low(sign: str, value: str) -> Bound:
    return "(" if sign in _STRICT or "infty" in value else "[", value


def _high(sign: str, value: str) -> Bound:
    return ")" if sign in _STRICT or "infty" in value else "]", value
