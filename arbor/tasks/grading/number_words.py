"""Words of a number: currencies and units around it, and numbers in words, in English.

Some words change the value instead, as a million or a third does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FACTORS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
    "lakh": 10**5,
    "crore": 10**7,
    "dozen": 12,
}
FACTOR = re.compile(rf"(?i)\b(?:{'|'.join(FACTORS)}|score|half|pi|percent)s?\b")

# Words behind a number that are something else than a unit: parts, powers, functions, symbols
PARTS = (
    r"(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|"
    r"(?:thir|four|fif|six|seven|eigh|nine)teenth|twentieth|(?:hundred|thousand|[mb]illion)th)s?"
)
_NO_UNIT = re.compile(
    rf"{PARTS}|squared|cubed|factorial|hal(?:f|ves)|(?:quarter|root)s?|plus|minus|over|choose|mod|"
    r"modulo|and|but|not|nor|than|"
    r"with|base|undefined|infinity|inf|infty|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|"
    r"exp|sqrt|gcd|lcm|max|min|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|cdot|frac|"
    r"text",
    re.IGNORECASE,
)
_NO_STYLED_UNIT = re.compile(rf"\b(?:base|(?i:{PARTS}))\b")
_ABBREVIATION = re.compile(
    r"[km]g|lbs?|oz|[kcmn]?m|mi|ft|in|yd|h|hrs?|s|ms|g|[mcd]?[lL]|V|k?W|k?J|Hz|Pa|N|C|F|sq|cu"
)
_SMALL_WORD = re.compile(r"of|on|at|to|by|a|an|am|pm")
_CURRENCY = r"US\$|A\$|C\$|[£€¥₹₽₩]|\\(?:pounds|euro|texteuro)\b\s*"
_BEFORE = re.compile(
    rf"^([+-]?)\s*(?:{_CURRENCY}|(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?|INR)\s*)\s*(?=[+-]?\s*[.\d\\])"
)
_CURRENCY_BEHIND = re.compile(rf"(?<=\d)\s*(?:{_CURRENCY})")
_ABOUT = re.compile(
    r"^\\approx(?![A-Za-z])\s*|^(?:approximately|about|roughly|exactly|around|only|just)\s+(?=\S*\d)",
    re.I,
)

_STYLED = (
    r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|hbox|operatorname)"
    r"\s*\{(?!\s*[ei]\s*\})[^{}\d]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
)
_PART = rf"(?:{_STYLED}|\\[dt]?frac\s*\{{\s*{_STYLED}\s*\}}\s*\{{\s*{_STYLED}\s*\}})"
_VALUE_BEFORE = r"(?:(?<=[\d})%])|(?<=\\pi)|(?<=\\pi ))"
_IN_LATEX = re.compile(
    rf"{_VALUE_BEFORE}\s*/?\s*{_PART}(?:\s*(?:/|\\cdot|\\times|\*)?\s*{_PART})*\s*$"
)
_IN_WORDS = re.compile(
    rf"{_VALUE_BEFORE}(\s*|/)((?:[A-Za-zµ]+(?:\^\{{?-?\d\}}?)?['.]?(?:\s*[/\s-]\s*|$))+)$"
)
_HYPHENATED = re.compile(r"([+-]?\s*\d+)-((\d+)\s*/\s*(\d+))")  # of 1-1/2 cups


def without_unit(text: str) -> str:
    r"""An answer without the currency before it and the unit behind it.

    A unit is what stands in \text{} behind a number, an abbreviation that is known, or words of
    three letters or more. Words such as million, squared or thirds are something else, and so are
    the letters of a product. Before either, ``1-1/2`` is a mixed number, written ``1 1/2``; without
    them it is a difference.
    """
    text = _BEFORE.sub(r"\1", _ABOUT.sub("", text.strip()))
    text = _CURRENCY_BEHIND.sub("", text)
    styled = _IN_LATEX.search(text)
    if styled and not FACTOR.search(styled[0]) and not _NO_STYLED_UNIT.search(styled[0]):
        return _value_before(text, styled.start())
    words = _IN_WORDS.search(text)
    if words and _are_unit(words[2], apart=bool(words[1])):
        return _value_before(text, words.start())
    if words and words[1] and (factor := FACTOR.match(words[2])) and factor[0] != "pi":
        rest = words[2][factor.end() :].strip()  # 5 million dollars
        if not rest or _are_unit(rest, apart=True):
            return f"{_value_before(text, words.start())}{words[1]}{factor[0]}"
    return text


def _value_before(text: str, end: int) -> str:
    """What stands before a unit or a factor that begins at `end`."""
    value = text[:end].rstrip()
    parts = _HYPHENATED.fullmatch(value)
    return f"{parts[1]} {parts[2]}" if parts and int(parts[3]) < int(parts[4]) else value


def _are_unit(text: str, *, apart: bool) -> bool:
    """Whether words are a unit.

    Args:
        apart: from their number, by a space.
    """
    words = [re.sub(r"\^\{?-?\d\}?|['.]", "", word) for word in re.split(r"[/\s-]+", text)]
    words = [word for word in words if word]
    if not words:
        return False
    if not apart and not (_ABBREVIATION.fullmatch(words[0]) and len(words[0]) + len(words) > 2):
        return False  # 5x is a product, and so may be 5m
    return all(
        _ABBREVIATION.fullmatch(word)
        or _SMALL_WORD.fullmatch(word)
        or (len(word) > 2 and not _NO_UNIT.fullmatch(word) and not FACTOR.fullmatch(word))
        for word in words
    )


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
_SIGN_IN_WORDS = re.compile(
    rf"^(?:minus|negative)\s+(?=\\?\$?(?:{_CURRENCY})?\s*\.?\d)", re.IGNORECASE
)
_FACTOR = re.compile(rf"\s+(?:{'|'.join(_SCALES)})\b", re.IGNORECASE)  # half a dozen
_TOKEN = re.compile(r"[a-z]+|,")
# What follows a word that counts nothing by itself: "one of them", "five sixths", "one that"
_COUNTS_NOT = re.compile(
    rf"\s*[{_HYPHENS}]\s*\w|\s+(?:of|out|that|who|which|whose|where|we|you|can|could|may|might|must|"
    r"should|would|will|has|have|had|does|do|to|or|and|if|by|point|possible|way|"
    rf"hal(?:f|ves)|quarters?|{PARTS})\b",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """A text whose number in words at its beginning is in digits; others stay as they are.

    So is a sign in words: minus 5.
    """
    text = _SIGN_IN_WORDS.sub("-", text)
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
