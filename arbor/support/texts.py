"""Texts for people: of unknown origin, cut and made visible; numbers in words."""

from __future__ import annotations

import codecs
import re

from arbor.errors import InputError

LONGEST_SHOWN = 60  # characters of a text that an error quotes

# byte order marks; that of UTF-32 begins with that of UTF-16
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
# Controls except tab and newline, halves of characters, separators of lines and paragraphs, and
# what reorders the text around it: embeddings, overrides and isolates
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def surrogate_of(text: str) -> str:
    """The first half of a character in a text (a lone surrogate), escaped; empty without one."""
    found = _SURROGATE.search(text)
    return "" if found is None else visible(found[0])


def refuse_surrogates(text: str, name: str) -> None:
    """Refuses a text with half of a character, which neither a tokenizer nor UTF-8 can hold.

    Args:
        text: from a user, a file or a plug-in.
        name: beginning of the message, as in ``the problem``.

    Raises:
        InputError: names the first half and its place.
    """
    found = _SURROGATE.search(text)
    if found is not None:
        place = found.start() + 1
        raise InputError(
            "not-utf8",
            f"{name}: character {place:,} is {visible(found[0])}, half of a character.",
            "Write the text as UTF-8.",
            place=place,
        )


def likely_encoding(data: bytes) -> str:
    """The encoding of bytes that are not UTF-8, as far as their beginning says."""
    return next((name for mark, name in _MARKS.items() if data.startswith(mark)), "latin1")


def clipped(text: str, most: int = LONGEST_SHOWN) -> str:
    """The beginning of a text, with an ellipsis where characters are left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def visible(text: str) -> str:
    r"""A text that a terminal shows and does not obey; unsafe characters become ``\u001b``.

    Tabs and newlines stay. The escapes are those of JSON and TOML, so that a document of either
    keeps its meaning.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """`visible`, with each run of white space as one space."""
    return visible(" ".join(text.split()))


def human_bytes(count: float) -> str:
    """``1.2 MiB``: three significant digits at most, powers of 1024."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def counted(count: int, word: str) -> str:
    """A number and its word: ``1 block``, ``1,200 blocks``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration_text(seconds: float) -> str:
    """Seconds for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
