r"""Extraction: the answer that a text marks, states, or only ends with.

A text is read up to a problem that the model invents after its answer (`first_problem`). An answer
is marked by ``\boxed{}`` or by ``####`` before a number; it is stated behind "the answer is",
"Answer:" or a heading "Final Answer". What is read there ends where the sentence goes on with
something else (`phrase`), so that "**42** eggs, since 6 * 7 = 42" gives "42".
"""

from __future__ import annotations

import re

from arbor.tasks.grading.notation import LONGEST, grouped, in_thousands, normalise, number
from arbor.tasks.grading.number_words import FACTORS, in_digits, numbers_in_words

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"-?\d[\d.,/]*(?<![.,/])")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_HEADING = re.compile(
    r"[*_ ]*(?:\(?\d{1,3}[.):]\s*[*_]*\s*[^\s*_\d]|\(?\d{1,3}[):][*_ ]*$|\d{1,2}(?:\.\d{1,2})+\.?\s+[A-Z][a-z]{2}"
    r"|(?!(?i:answer|total|result|Rs|USD|EUR|GBP)\b)[A-Za-z]+\s+\d+\b)"
)
_NUMBERING = re.compile(r"[*_ ]*\(?(\d{1,3})[.):]")
_LISTED = re.compile(rf"{_NUMBERING.pattern}[*_]*(?=\s|$)")
_COUNTED_HEADING = re.compile(r"1?\d\s+[A-Za-z]|\d+(?:\s+[A-Za-z]+){2}")  # Two cases
_LABEL = re.compile(r"[*_ ]*(?:the )?(?:final |correct )?(?:answer|total|result)\b", re.IGNORECASE)

_DETOUR = (
    r"(?:,\s+[^.,:;=!?\n\d]{1,40},|\s+(?:to|for|of|in)\s+[^.,:;=!?\n]{1,60}?)?(?:\s*\([^()\n]{1,40}\))?"
    r"(?:\s+(?:therefore|thus|hence|then|would|should|must|will|could|indeed|also|now))*"
)
_MARKS = r"(?:\*\*\*|\*\*|__|\*|_|`)?"
_SAYS_ANSWER = re.compile(
    rf"(?<![A-Za-z])answer\b{_DETOUR}\s*{_MARKS}\s*(?:\bis\b|\bare\b|\bbe\b|\bequals\b|:|=)",
    re.IGNORECASE,
)
_IS_ANSWER = re.compile(
    r"(?<![\w.,])((?:\*\*|__|[$£€]|\\[($]){0,4}-?\d\S{0,20}(?:[ ][A-Za-z]{3,20}){0,2}[*_]*)\s+is\s+"
    r"(?:the|our|my)\s+(?:(?:final|correct|required|right)\s+)?answer\b",
    re.IGNORECASE,
)
_ANSWER_HEADING = re.compile(
    r"^[ \t>]{0,8}(?:#{1,6} *[*_]*|[*_]{2,3})(?:the )?(?:final |correct )?answer[*_:. ]{0,8}$",
    re.IGNORECASE | re.MULTILINE,
)
_FILLER = re.compile(
    r"(?:\s|[>:=]|\#+(?=\s)|(?<=\n)[-*\u2022]\s+(?=\S)|`{3}[a-z]*\n|-\s(?=\s*[*$\\A-Za-z])|(?:simply|indeed|therefore|thus|hence|then|also|just|exactly"
    r"|a\ total\ of|approximately|about|roughly|equal\ to|given\ by|as\ follows|clearly|actually)\b:?|"
    r"(?:the\s+)?(?:final\s+|correct\s+)?answer\s+is\b)+",
    re.IGNORECASE | re.VERBOSE,
)
_CLOSED_BEFORE = re.compile(r"^(?:\*{1,3}|_{1,3}|`)(?=\s|:)")  # as in **Answer:** 42
_NOT_BUT = re.compile(r"not\s[^.\n]{1,40}?\sbut\s(?:rather\s)?", re.IGNORECASE)
_FIRST_ENTRY = re.compile(r"^1[.)]\s+(?=[*$\\]*-?[\d\\$])")
_VERDICT = re.compile(
    r"(?:(?:not|also|indeed|now|very|thus|therefore|in fact|most|quite|already|both)\s+)*"
    r"(?:correct|incorrect|right|wrong|reasonable|consistent|verified|clear|unclear|valid|invalid|"
    r"confirmed|accurate|obvious|plausible|complete|final|as expected|within|supported|checked|"
    r"found|obtained|derived|given|shown|expected|based|sensible|realistic|exact|unique)\b",
    re.IGNORECASE,
)
_DESCRIBES = re.compile(r"(?:in|an?|the|that|what|our|from|for)\s", re.IGNORECASE)

# Where an answer ends
_DELIMITED = (
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("***", "***"),
    ("**", "**"),
    ("__", "__"),
    ("`", "`"),
    ("*", "*"),
    ("$", "$"),
)
_JOINED = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*(?=\$|\\\(|\*\*)")
_FACTOR_BEHIND = re.compile(rf"\s*(?:{'|'.join(FACTORS)}|percent)s?\b|\s*\\?%", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!\bRs)(?<!\bapprox)(?<!\\)[.!?](?=[\s*_`]|$)|\n|<\|")
_WHY = re.compile(
    r",?\s+(?:because|since|which|where|who|whose|that|as|so|given|meaning|i\.e|but|after|"
    r"[-\u2013\u2014]+(?=\s*[A-Za-z]{2})|\u2014)(?!\w)|\s*\u2014|;"
)
_ASIDE = re.compile(
    r"(?<=[\w$%}*])\s+\((?=[^()]*(?:=|(?<![\\A-Za-z])[A-Za-z]{3}))"
    r"|(?<=[a-z]{3})(?<!sin|cos|tan|log|exp|qrt)\s+\((?=[\d\s.$]+[*×·/+-][\d\s.$*×·/+-]+\))"
)
_GOES_ON = re.compile(
    r"\s+and\s+(?=[A-Za-z]{2})|,\s+(?!(?:and|or)\s+[-$\\\d])(?=[^,]*?(?<![\\A-Za-z])[A-Za-z]{2,})"
    r"|\s+(?:for|from|than|each|after|before|during|with|when|while|(?:of|to)(?=\s+[A-Za-z]{2})|(?<=[a-z]{3}\s)(?:in|on|over|at|within))\s+(?=.*\d)"
)
_COUNTED = re.compile(r"([£€$]?-?\d[\d,.]*\s+[A-Za-z]{2,}[^,]*),\s")
_BEFORE_NUMBER = r"[-+(]?\s*(?:[£€$¥₹]|\\[$(]|Rs\.?|USD)?\s*[-+]?"
_LEADS_WITH_NUMBER = re.compile(rf"{_BEFORE_NUMBER}\.?\d")
_WORDS = re.compile(r"[A-Za-z]{2,}")

# Numbers of a text
_CJK = "\u3005\u3006\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
_IN_WORD = rf"[^\W{_CJK}]"  # a letter, a digit or _; scripts without spaces put numbers anywhere
_ENDS_WITH = re.compile(
    r"(?:\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)|\$\$([^$]+)\$\$|(?<!\$)\$([^$\n]+)\$)[\s.,;:!*_]*\Z",
    re.DOTALL,
)
_SQUARE_OR_CUBE = rf"(?:[kcmd]?m|ft|in|yd|mi)[23](?!{_IN_WORD})"
_MALFORMED = (  # what follows a number in 1.000.000, 0x10, 0xff and 4x4, but not in 5kg or 5m2
    rf"(?:[.,]+\d|(?!{_SQUARE_OR_CUBE})(?:(?!\d){_IN_WORD})+\d|(?<=\b0)x[\da-f])(?:[.,]*{_IN_WORD})*"
)
_LATEX_FRACTION = r"\\[dtc]?frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)"
_MIXED = r"\d{1,3}[ ]+\d{1,2}/\d{1,2}(?![\d/]|\.\d)"
_NUMBERS = re.compile(
    rf"(?P<sign>(?<![)\]}}.%°])(?<!{_IN_WORD})(?<!\d[€£])(?:[-−]|(?<!\d )–)(?:(?<!\$.)(?:\\?\$|[£€¥₹])\s?)?)?"
    rf"(?:(?:(?<!\.)(?<!{_IN_WORD})|(?<=__))"
    rf"(?P<value>(?:\d+\s*)?{_LATEX_FRACTION}|{_MIXED}|\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?(?:/\d+)?"
    rf"(?:{_MALFORMED})?)|(?<![^\s(\[{{$£€¥₹*=:+−–-])(?P<part>\.\d+(?:{_MALFORMED})?))"
    rf"(?P<factor>\s+(?:{'|'.join(FACTORS)})s?\b)?",
    re.IGNORECASE,
)
_UNIT_POWER = re.compile(  # the 2 of cm^2
    r"(\\(?:text|mathrm)\s*\{[^{}\d]*\}|(?<![A-Za-z])(?:[kcmd]?m|ft|in|yd|mi))\s*"
    r"\^\s*(?:\{\s*-?\d\s*\}|\d)"
)
_SIGN_IN_WORDS = re.compile(
    r"(?:\bnegative|(?<=\bis )minus|(?<=\bwas )minus|(?<=[:=] )minus)\s+(?=\\?[$£€¥₹]?\s?\.?\d)",
    re.IGNORECASE,
)
_FIRST_NUMBER = re.compile(  # with all digits, points and commas that belong to it
    rf"(?!\()({_BEFORE_NUMBER})(\.?\d[\d.,/]*(?<![.,/])(?:-\d+/\d+)?)(?!{_IN_WORD}|[\\^!({{]|[.,/]\d)"
    rf"((?:\s+(?:{'|'.join(FACTORS)})s?\b)?)",
    re.IGNORECASE,
)
_EXPRESSION = re.compile(
    rf"{_BEFORE_NUMBER}\.?\d[\d.,/]*\s*(?:[-+*/×÷·−–]|\\(?:times|cdot|div)(?![A-Za-z]))\s*[$£€]?\.?\d"
)
_LIST_MARKER = re.compile(
    r"^[-*>#_\u2022 \t]{0,16}(?:(?:step|part)[ ]*)?\(?\d{1,3}[.):](?=[\s*]|$)",
    re.IGNORECASE | re.MULTILINE,
)

# A problem that a model invents after its answer
_NEXT_PROBLEM = re.compile(
    r"""^(?:
        [>#*_ \t]{0,12}(?:question|problem|exercise|q)[ ]?(?P<number>\d*)[*_ ]{0,4}[:.][*_]*(?=\s|$)
      | [> ]{0,4}[#]+[ *_]{0,4}(?:question|problem|exercise|instruction|input)[ ]?(?P<heading>\d*)[*_: ]{0,6}$
      | [>#*_ \t]{0,12}(?:human|user|instruction)[*_ ]{0,4}:
    )|<\|(?:im_start|im_end|endoftext|eot_id|end_of_text|start_header_id|user)\|>
    |<(?:end_of_turn|start_of_turn)>|</s>""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)


def first_problem(text: str) -> str:
    """A text up to the first problem that follows an answer or a number; most texts have none."""
    for match in _NEXT_PROBLEM.finditer(text):
        before = text[: match.start()]
        first = (match["number"] or match["heading"]) == "1"  # a part of the problem itself
        if not first and (stated(before) is not None or numbers_in(before)):
            return before
    return text


def boxes(text: str) -> list[str]:
    r"""Contents of every complete, non-empty \boxed{...} or \fbox{...}, and of ``\boxed 7``.

    Braces are counted. An escaped brace (``\{``) is text. A box that is never closed does not
    count.
    """
    closing = _closing_braces(text) if "\\" in text else {}
    found = []
    for match in _BOX.finditer(text):
        if text.startswith("{", match.end()):
            end = closing.get(match.end())
            inside = None if end is None else text[match.end() + 1 : end]
        else:
            bare = _BARE.match(text, match.end())
            inside = bare[0] if bare else None
        if inside is not None and inside.strip():
            found.append(inside.strip())
    return found


def _closing_braces(text: str) -> dict[int, int]:
    """For each brace that is closed the place of the one that closes it."""
    found, opened = {}, []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            found[opened.pop()] = match.start()
    return found


def marked(text: str) -> str | None:
    r"""The marked answer of a text: its last complete \boxed{}, or first number after ``####``.

    None without such a mark.
    """
    boxed = boxes(text)
    return boxed[-1] if boxed else hashed(text)


def hashed(text: str) -> str | None:
    """The first number after ``####``, with what belongs to it: ``#### 18 thousand dollars``.

    It stands alone where more follows: 18 of "#### 18 eggs and 3 hens". An equation is its last
    side, 9 * 2 = 18. An expression of numbers, 18 - 3, is the answer itself; 2x + 3, or a point,
    has no number.

    Headings of Markdown do not count: "#### 1. Add the parts", "#### Step 2", "#### Two cases".
    A number with a full stop is one where it is the next of a list: "#### 1.", not "#### 18."
    """
    numbers = 0  # of the last heading of a list
    for match in _HASHES.finditer(text):
        line = match[1].strip()
        numbering = _NUMBERING.match(line)
        place = int(numbering[1]) if numbering else numbers
        listed = place == numbers + 1 and _LISTED.match(line)
        if listed or _HEADING.match(line):
            numbers = place
            continue
        boxed = boxes(line)
        if boxed:
            return boxed[-1]
        label = _LABEL.match(line)
        found = phrase(line[label.end() :] if label else line)
        if not any(map(str.isdigit, line)) and _COUNTED_HEADING.match(in_digits(found)):
            continue
        value = single_number(found)
        if value is not None:
            return value if "=" in found else found
        if _EXPRESSION.match(grouped(found)):
            return found
        first = _FIRST_NUMBER.match(grouped(found))
        if first and "=" not in found and first[2] in grouped(line):  # not one in words
            return "".join(first.groups())
    return None


def stated(text: str) -> str | None:
    """The answer that a text states: marked, else what it says is the answer, last.

    What is only said about an answer does not count ("the answer is correct").
    """
    answer = marked(text)
    if answer is not None:
        return answer
    behind = (*_SAYS_ANSWER.finditer(text), *_ANSWER_HEADING.finditer(text))
    places = {match.end(): text[match.end() : match.end() + 4 * LONGEST] for match in behind}
    before = (match for match in _IS_ANSWER.finditer(text) if single_number(match[1]) is not None)
    places |= {match.end(): match[1] for match in before}
    described = None
    for _, place in sorted(places.items(), reverse=True):
        said = phrase(place)
        if normalise(said) and not _is_remark(said):
            if not _DESCRIBES.match(said):
                return said
            described = described or said
    return described


def _is_remark(said: str) -> bool:
    r"""Whether what follows "the answer is" says something about it: a verdict, or a sentence.

    So does one that only names the box: "within \boxed{}".
    """
    if EMPTY_BOX.search(said):
        return True
    if _LEADS_WITH_NUMBER.match(normalise(said)) or "\\" in said:
        return False
    if _VERDICT.match(said):
        return True
    return len(_WORDS.findall(said)) > 3 and len(numbers_in(said)) > 1


def phrase(text: str) -> str:
    """The answer that a text begins with, without what the sentence goes on with."""
    text = _CLOSED_BEFORE.sub("", text)
    filler = _FILLER.match(text)
    text = text[filler.end() :] if filler else text
    if not_but := _NOT_BUT.match(text):
        text = text[not_but.end() :]
    if filler and "\n" in filler[0]:
        text = _FIRST_ENTRY.sub("", text, count=1)
    parts: list[str] = []
    while (inside := _delimited(text)) is not None:
        parts.append(inside[0])
        text = inside[1]
        joined = _JOINED.match(text)
        if not joined:
            factor = _FACTOR_BEHIND.match(text)
            return ", ".join(parts) + (f" {factor[0].strip()}" if factor else "")
        text = text[joined.end() :]
    if parts:
        return ", ".join(parts)
    text = in_digits(text)
    end = _SENTENCE_END.search(text)
    sentence = text = text[: end.start()] if end else text
    for pattern in (_WHY, _ASIDE):
        text = pattern.split(text, maxsplit=1)[0]
    if in_digits(text) != text:
        return sentence  # "one that we know" counts nothing
    counted = _COUNTED.match(text)
    if counted:
        text = counted[1]
    if _LEADS_WITH_NUMBER.match(text):
        text = _GOES_ON.split(text, maxsplit=1)[0]
    return text.strip(" \t,:")


def _delimited(text: str) -> tuple[str, str] | None:
    """What the marks at the start of a text enclose, and the rest; None without such marks."""
    for opening, closing in _DELIMITED:
        if not text.startswith(opening):
            continue
        end = text.find(closing, len(opening))
        inside = text[len(opening) : end].strip() if end > 0 else ""
        across = "\n" in inside and opening not in ("$$", "\\[")
        priced = opening == "$" and (_is_price(inside) or text[end + 1 : end + 2].isdigit())
        if inside and not across and not priced:
            ends = ".,;" if opening[0] in "$\\" else ".,;!?"
            return inside.rstrip(ends), text[end + len(closing) :]
    return None


def _is_price(inside: str) -> bool:
    """Whether what stands between two dollar signs is a price with words: $18 a week, or $3."""
    return "\\" not in inside and re.match(r"[\d.,]+\s+[A-Za-z]+", inside) is not None


def last_value(text: str) -> str | None:
    """The last number of a text; the mathematics that it ends with, if there is no number after."""
    ended = _ENDS_WITH.search(text[-4 * LONGEST :])
    if ended:
        value: str = next(filter(None, ended.groups())).rpartition("=")[2].strip(" .,;")
        if value:
            return value
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def single_number(text: str) -> str | None:
    r"""The number of a text that is one, as written: the last side of an equation, 9 * 2 = 18."""
    for side in reversed(normalise(text).split("=")):
        value = in_thousands(side.strip())
        if number(value) is not None:
            return value
    return None


def numbers_in(text: str) -> list[str]:
    """Every number of a text, with its sign and a factor in words; no marker of a list is one.

    A malformed one is one, whole, though it has no value: 1.000.000 or 0x10. Numbers in words count
    in a text without digits.
    """
    text = _SIGN_IN_WORDS.sub("-", _UNIT_POWER.sub(r"\1", grouped(text)))
    return _in_figures(_LIST_MARKER.sub("", text)) or _in_figures(text) or numbers_in_words(text)


def _in_figures(text: str) -> list[str]:
    """The numbers of a text that are written in digits."""
    found = []
    for match in _NUMBERS.finditer(text):
        value = ("-" if match["sign"] else "") + (match["value"] or match["part"])
        two = value.split() if "/" in value and number(value) is None else [value]  # 3 5/2
        found += [*two[:-1], two[-1] + (match["factor"] or "")]
    return found
