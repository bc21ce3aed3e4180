"""Units: currencies and units around an answer, and the words that change its value instead."""

from __future__ import annotations

import re

FACTORS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
FACTOR = re.compile(rf"(?i)\b(?:{'|'.join(FACTORS)}|score|half|pi|percent)s?\b")

# Words behind a number that are something else than a unit: parts, powers, functions, symbols
_NO_UNIT = re.compile(
    r"squared|cubed|factorial|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|"
    r"tenth|hundredth|thousandth|root)s?|plus|minus|over|choose|mod|modulo|and|but|not|nor|than|"
    r"with|base|undefined|infinity|inf|infty|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|"
    r"exp|sqrt|gcd|lcm|max|min|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|cdot|frac|"
    r"text",
    re.IGNORECASE,
)
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


def without_unit(text: str) -> str:
    r"""An answer without the currency before it and the unit behind it.

    A unit is what stands in \text{} behind a number, an abbreviation that is known, or words of
    three letters or more. Words such as million, squared or thirds are something else, and so are
    the letters of a product.
    """
    text = _BEFORE.sub(r"\1", _ABOUT.sub("", text.strip()))
    text = _CURRENCY_BEHIND.sub("", text)
    styled = _IN_LATEX.search(text)
    if styled and not FACTOR.search(styled[0]) and not re.search(r"\bbase\b", styled[0]):
        return text[: styled.start()].rstrip()
    words = _IN_WORDS.search(text)
    if words and _are_unit(words[2], apart=bool(words[1])):
        return text[: words.start()].rstrip()
    if words and words[1] and (factor := FACTOR.match(words[2])) and factor[0] != "pi":
        rest = words[2][factor.end() :].strip()  # 5 million dollars
        if rest and _are_unit(rest, apart=True):
            return text[: words.start(2)] + factor[0]
    return text


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
