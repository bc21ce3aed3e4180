"""Texts that break careless programs: markup, terminal control sequences, halves of characters."""

from __future__ import annotations

import random
import re

ZWJ = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
MARKUP = (
    "</script><script>window.hit=1</script>",
    "<img src=x onerror='window.hit=2'>",
    '"><svg onload=window.hit=3>',
    "' onmouseover='window.hit=4",
    "]]>",
    "<!--",
    "-->",
    "${window.hit=5}",
    "`${window.hit=6}`",
    "</textarea></title></style><script>window.hit=7</script>",
    "javascript:window.hit=8",
    "&lt;script&gt;&amp;&#60;",
    "{{7*7}}{0}{title}%s%(a)s",
)
TERMINAL = (
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b[31mred",
    "\x9b31mred",
    "over\rwritten",
    "back\b\b\bspace",
    "two\nlines",
    "vertical\x0btab\x0cfeed",
    "[red]markup[/red] :warning: [link=https://x.example]",
)
CHARACTERS = (
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\ufeffmark",
    "\u202eoverride\u2066isolate",
    "\u2028\u2029\x85",
    "e\u0301" * 40,
    "\u0301" * 300,
    ZWJ,
    "\U000e0041\U000e007f",
    "\ufffd\ufffe\uffff",
)
LONG = ("x" * 100_000, "word " * 20_000, "\U0001f600" * 30_000)

# What a terminal obeys: a control character other than tab and newline, and what reorders text
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def hostile(draw: random.Random, most: int = 3) -> str:
    """A few hostile pieces between harmless ones."""
    pieces = [*MARKUP, *TERMINAL, *CHARACTERS, "4 5 6 10", "so 10 - 4 = 6", "\n", " ", ""]
    chosen = draw.choices(pieces, k=draw.randint(1, most))
    if draw.random() < 0.03:
        chosen.append(draw.choice(LONG))
    return "".join(chosen)


def encodable(text: str) -> str:
    """A text without halves of characters, which UTF-8 cannot hold."""
    return re.sub("[\ud800-\udfff]", "?", text)
