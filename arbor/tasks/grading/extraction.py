r"""Extraction: the answer that a text marks, states, or only ends with."""

from __future__ import annotations

import re

from arbor.tasks.grading.notation import FACTOR, normalise, number

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"-?\d[\d.,/]*(?<![.,/])")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_ANSWER_IS = re.compile(r"\banswer\s*(?:\*\*)?\s*(?:is|:)\s*(?:\*\*)?\s*:?", re.IGNORECASE)
COUNTED = re.compile(r"(-?\$?\d(?:[\d,]*\d)?(?:\.\d+)?)((?:\s+[A-Za-z]{2,})+)")  # 72 clips
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_LAST_NUMBER = re.compile(r"(?:(?<![\w)\]}.])[-−])?(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?(?:/\d+)?")


def boxes(text: str) -> list[str]:
    r"""Contents of every complete, non-empty \boxed{...} or \fbox{...}, and of ``\boxed 7``.

    Braces are counted. An escaped brace (``\{``) is text. A box that is never closed does not
    count.
    """
    found = []
    for match in _BOX.finditer(text):
        if text.startswith("{", match.end()):
            inside = _balanced(text, match.end())
        else:
            bare = _BARE.match(text, match.end())
            inside = bare[0] if bare else None
        if inside is not None and inside.strip():
            found.append(inside.strip())
    return found


def _balanced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it; None if none does."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 1 : at]
        at += 1
    return None


def marked(text: str) -> str | None:
    r"""The marked answer of a text: its last complete \boxed{}, or first number after ``####``.

    None without such a mark. Only numbers count after ``####``, which also begins Markdown
    headings.
    """
    boxed = boxes(text)
    if boxed:
        return boxed[-1]
    hashes = (match[1].strip() for match in _HASHES.finditer(text))
    return next((line for line in hashes if number(normalise(line)) is not None), None)


def extract(text: str) -> str | None:
    """The answer of a text: stated, else the last number."""
    answer = stated(text)
    if answer is not None:
        return answer
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def stated(text: str) -> str | None:
    """The answer that a text states: marked, else after the last "answer is"."""
    answer = marked(text)
    if answer is not None:
        return answer
    said = list(_ANSWER_IS.finditer(text))
    if said:
        answer = _SENTENCE_END.split(text[said[-1].end() :].lstrip(), maxsplit=1)[0].strip()
        counted = COUNTED.fullmatch(answer)
        if counted and not FACTOR.search(counted[2]):
            return str(counted[1])
        if normalise(answer):
            return str(answer)
    return None


def hashed(text: str) -> str | None:
    """The first number after ``####``, also with a unit in words: ``#### 72 clips``."""
    for match in _HASHES.finditer(text):
        line = match[1].strip()
        counted = COUNTED.fullmatch(line.rstrip(" ."))
        if counted and not FACTOR.search(counted[2]):
            return str(counted[1])
        if number(normalise(line)) is not None:
            return line
    return None


def numbers_in(text: str) -> list[str]:
    """Every number of a text, as written."""
    return [match[0] for match in _LAST_NUMBER.finditer(text)]
