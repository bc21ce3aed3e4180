"""Numbers in words, in English: "twenty-four", "one hundred and five", "two and a half"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from arbor.tasks.grading.units import FACTORS

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {
    word: 10 * value for value, word in enumerate(_TENS, 2)
}
_SCALES = sorted(FACTORS, key=lambda word: (word == "dozen", FACTORS[word]), reverse=True)

_HYPHENS = "-\u2010\u2011\u2013"
_WORD = rf"(?:{'|'.join((*_VALUES, *_SCALES))})\b"
_JOINT = rf"(?:\s*,)?(?:\s+and)?(?:\s+|[{_HYPHENS}])"
_HALF = r"\s+and\s+(?:a|one)[\s-]half\b"
_NUMBER = re.compile(
    rf"(?<![{_HYPHENS}\w])((?:minus|negative)\s+)?(?:((?:an?\s+(?={'|'.join(_SCALES)}))?{_WORD}(?:{_JOINT}{_WORD})*)"
    rf"({_HALF})?|(\d+){_HALF}|half\s+an?(?=\s+(?:{'|'.join(_SCALES)})\b))",
    re.IGNORECASE,
)
_FACTOR = re.compile(rf"\s+(?:{'|'.join(_SCALES)})\b", re.IGNORECASE)  # half a dozen
_TOKEN = re.compile(r"[a-z]+|,")
# What follows a word that counts nothing by itself: "one of them", "five sixths", "one that"
_COUNTS_NOT = re.compile(
    rf"\s*[{_HYPHENS}]\s*\w|\s+(?:of|out|that|who|which|whose|where|we|you|can|could|may|might|must|"
    r"should|would|will|has|have|had|does|do|to|or|and|if|by|point|possible|way|"
    r"hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|"
    r"thousandth)s?)\b",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """A text whose number in words at its beginning is in digits; others stay as they are."""
    found = _NUMBER.match(text)
    value = _read(found) if found else None
    if found is None or value is None:
        return text
    return value + text[found.end() :].removeprefix(f" ({value})")  # twelve (12)


def numbers_in_words(text: str) -> list[str]:
    """The numbers in words of a text, in digits; "one" alone is mostly a pronoun and none."""
    values = []
    for found in _NUMBER.finditer(text):
        value, factor = _read(found), _FACTOR.match(text, found.end())
        if value and value != "1":
            values.append(value + (factor[0] if factor else ""))
    return values


def _read(found: re.Match[str]) -> str | None:
    """A number in words in digits; None where the words count nothing by themselves."""
    if _COUNTS_NOT.match(found.string, found.end()):
        return None
    words = _TOKEN.findall((found[2] or "").lower())
    value = _value(words, _SCALES) if words else int(found[4] or 0)
    if value is None or (found[3] and words[-1] in _SCALES):  # a million and a half
        return None
    half = ".5" if found[3] or not words else ""
    return f"{'-' if found[1] else ''}{value}{half}"


def _value(words: Sequence[str], scales: Sequence[str]) -> int | None:
    """The value of number words; None where they do not name a number: "twenty twelve".

    Args:
        words: in lower case, with the commas between them.
        scales: words that multiply and may occur, the largest first.
    """
    for place, scale in enumerate(scales):
        if scale not in words:
            continue
        at = words.index(scale)
        before, behind = words[:at], words[at + 1 :]
        for joint in (",", "and"):
            behind = behind[1:] if behind[:1] == [joint] else behind
        smaller = scales[place + 1 :]
        times = 1 if before in (["a"], ["an"]) else _value(before, smaller)
        rest = _value(behind, smaller) if behind else 0
        if times is None or rest is None or rest >= FACTORS[scale]:
            return None
        return times * FACTORS[scale] + rest
    if len(words) == 1:
        return _VALUES.get(words[0])
    if len(words) != 2 or words[0] not in _TENS:
        return None
    units = _VALUES.get(words[1], 0)
    return _VALUES[words[0]] + units if 0 < units < 10 else None
