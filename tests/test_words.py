"""The project's prose is plain: phrases of a private dialect do not occur."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("arbor", "kernels", "controllers", "verifiers", "tests", "scripts", "docs", ".ci")
SUFFIXES = {".py", ".md", ".js", ".html", ".css", ".toml", ""}

# Files that are checked later: those of a result's raw record, and this list of phrases.
UNCHECKED = ("CHANGELOG.md", "docs/experiments/", "tests/golden/", "tests/test_words.py")

# Each phrase with its plain form.
PHRASES = {
    r"cannot be meant": "invalid",
    r"that there (?:is|are) not\b(?! (?:an?|any|enough|room|space)\b)": "unknown, missing",
    r"(?<!there )\b(?:is|are|was|were) no\b(?! (?:longer|more|less|fewer|worse|better)\b)": (
        "is not a, has no, unknown"
    ),
    r"(?<!there )\b(?:is|are|was|were) (?-i:none)\b(?! of\b)": "is not one, is missing",
    r"\b_?told\b": "reported, emitted, given",
    r"\btell(?:s|ing)\b": "reports, emits, shows",
    r"\b_tell\b|\b_?tell_\w+": "emit, report (`tell` alone is the controller's)",
    r"(?<![a-z])beside(?![a-z])": "next to, besides, in addition to",
    r"\bwhoever\b": "the reader, the user, whichever",
    r"\bby lot\b": "at random",
    r"\breckon\w*": "expect, estimate",
    r"\bstands? among\b": "is one of",
    r"\bto and fro\b": "in alternating direction",
    r"\b(?:was|were|been) run before\b": "computed at least once",
    r"\b(?:says?|said|saying) of\b": "describes, reports about",
    # former words of the command line and the pages
    r"\bnames there (?:is|are)\b": "available names",
    r"\bthat can go on\b": "resumable",
    r"\bpolic(?:y|ies) believes?\b": "policy estimates",
    r"\bwhat (?:an? |the |each )?budgets? buys?\b": "memory at each budget",
    r"\bits price\b|\bat the price of\b": "cost, at the cost of",
    r"\bof one sample\b": "mean per sample",
    r"\bmissing \d+ of\b|\bmissing \d+$": "34 not run",
    r"\bonly what is not\b": "hide correct",
    r"\bright only here\b|\bonly there \d": "only this run, only the other",
    r"\basked about [\d{]": "model judged 52 of 110",
    r"\bif no block\b": "without prefix sharing",
    r"\bonce more stops\b": "press again to quit",
    r"\bno browser answers?\b": "could not open a browser",
    r"\bno path gave an? answer\b|\bnothing more to grow\b": "search exhausted, no answer",
    r"\bno contradictions?\b": "consistent",
    r"\bline\(s\) are\b": "line 120 is unreadable",
    r"\bended (?:True|False)\b": "already had an end",
    r"\bholds no events?\b": "file is empty",
    r"\broom \d+ for\b": "space left 34 for 9 blocks",
    r"\bscheduled never\b": "no planned read",
    r"\breentry [\d{]": "revisit probability 1",
    r"\bnot a valid \w+ range\b": "must be a number >= 0",
}


def files() -> list[Path]:
    """Text files of the project in a fixed order; links are not followed."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        for place, _, names in os.walk(ROOT / folder):
            found += [Path(place) / name for name in names]
    return sorted(
        path
        for path in found
        if path.suffix in SUFFIXES
        and "__pycache__" not in path.parts
        and path.name not in (".git", "LICENSE")
        and not label(path).startswith(UNCHECKED)
    )


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A file on one line, without the signs that begin comment lines, so that wrapped phrases
    match."""
    lines = [re.sub(r"^\s*(?:#+|//+|/?\*+|>)?\s*", "", line) for line in text.splitlines()]
    return " ".join(lines)


def found_in(text: str) -> list[str]:
    """The phrases in a text, each with its surroundings and its plain form."""
    line = prose(text)
    return [
        f"'{line[max(0, match.start() - 30) : match.end() + 30]}': better {plain}"
        for phrase, plain in PHRASES.items()
        for match in re.finditer(phrase, line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", files(), ids=label)
def test_the_prose_is_plain(path: Path) -> None:
    found = found_in(path.read_text(encoding="utf-8"))

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "A setting that cannot be meant.",
        "A setting that there is not.",
        "'x' is no known controller.",
        "Numbers that are none.",
        "# what it is told of\n# decoding",
        "self._tell(event)",
        "tell_steps()",
        "the KV beside\n    the paths",
        "    // whoever reads it",
        "tokens by lot",
        "tokens to reckon with",
        "ids stand among the roots",
        "goes to and fro",
        "blocks that were run before",
        "what a trace says of it",
        "list the names there are",
        "a folder that can go on",
        "what policies believe",
        "what budgets buy",
        "what it bought and its price",
        "tokens 1,272 generated, of one sample",
        "missing 34",
        "only what is not right",
        "right only here 0",
        "only there 2",
        "asked about 52 of 110 thoughts",
        "2,486 if no block were shared",
        "once more stops at once",
        "no browser answers",
        "no path gave an answer",
        "the controller has nothing more to grow",
        "12 events, no contradiction",
        "1 line(s) are no events",
        "120 lines kept, ended False",
        "holds no event of arbor.trace/1",
        "room 34 for 9 blocks",
        "scheduled never",
        "reentry 1",
        "is not a valid float range",
    ],
)
def test_a_planted_phrase_is_found(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "There is no room; there are none left.",
        "It is no longer than that.",
        "So that there is not enough room.",
        "controllers ask and tell: search.tell(children)",
        "Besides, it must be run before the weights load.",
        "if value is None and not other:",
        "It is none of your names.",
        "x.is_note and y.are_nodes",
    ],
)
def test_plain_prose_passes(text: str) -> None:
    assert not found_in(text)
