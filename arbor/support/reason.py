"""The reason that an error of another library gives, for a message of one line."""

from __future__ import annotations

LONGEST = 300  # characters


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, with those below where it ends in a colon; its type where
    there is no text. What is not printable becomes a space, and a long reason is cut."""
    lines = [each.strip() for each in str(error).strip().splitlines()]
    text = " ".join(lines if lines and lines[0].endswith(":") else lines[:1])
    text = "".join(each if each.isprintable() else " " for each in text)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}…"
    return text or type(error).__name__
