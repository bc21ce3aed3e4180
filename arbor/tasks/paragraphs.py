r"""Paragraphs as thoughts: where one ends in texts with displays, lists and code.

What models write decides the rule (docs/experiments/thoughts.md). An empty line ends a step; a
heading or an announcement ("We find:") belongs to what it announces. A list without empty lines is
divided between its lines. Nothing ends inside of a display, an environment or code.
"""

from __future__ import annotations

LEAST = 16  # tokens of a paragraph that stands alone; a shorter one goes on with the next
LONG = 64  # tokens from which a line's end is enough
_PAIRS = (("\\[", "\\]"), ("\\begin{", "\\end{"))
_FENCES = ("$$", "```")


def ends_paragraph(text: str, tokens: int) -> bool:
    """Whether a thought that has come to the end of a line ends there.

    Args:
        text: of the thought so far, with the line break.
        tokens: of it.
    """
    if tokens < LEAST or is_open(text):
        return False
    written = text.rstrip()
    if written.rstrip("*_ ").endswith(":"):
        return False
    return tokens >= LONG or text.count("\n", len(written)) > 1


def is_open(text: str) -> bool:
    """Whether a text ends inside of a display, an environment or code."""
    return any(text.count(begin) > text.count(end) for begin, end in _PAIRS) or any(
        text.count(fence) % 2 for fence in _FENCES
    )
