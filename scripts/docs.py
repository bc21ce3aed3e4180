"""Writes the generated parts of docs/events.md, events and metrics, from their classes.

``--check`` writes nothing and fails if a part is out of date.

    python scripts/docs.py
    python scripts/docs.py --check
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal

from arbor.events import EVENTS, KV
from arbor.metrics import Metrics
from arbor.trace.write import PRIVATE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "events.md"

# What a field that several events have means; it is described once.
COMMON = {
    "node": "a block's number, in the order of creation; the root is 0",
    "nodes": "block numbers; with numbers of tokens where tokens moved",
    "kv": "slots held after the event: [`kv`](#kv)",
    "text": "as the model wrote it",
    "ids": "token ids",
    "answer": "what the path answers",
    "verifier": "its name",
    "elapsed_s": "seconds it took",
}

# Meanings of fields that the docstring of their class does not describe.
MEANINGS = {
    "schema": "`arbor.trace/1`",
    "run": "unique name of the run",
    "created": "UTC, ISO 8601",
    "arbor": "version that wrote it",
    "problem": "as typed",
    "seed": "seed of every random stream",
    "expected": "the answer key",
    "model": "id, architecture, dtype, layers, bytes of KV per token",
    "device": "device name, torch version, attention backend",
    "config": "every setting but the machine's; `arbor trace config` prints it",
    "parent": "null for the root",
    "index": "which child it is",
    "depth": "thoughts above it",
    "tokens": "of the prompt; 0 for every other block",
    "logprob": "sum over its tokens",
    "confidence": "1 - H / ln V at its end, in [0, 1]",
    "top1": "mean probability of the likeliest token",
    "leaves": "leaves with their widths",
    "needed": "slots",
    "free": "slots",
    "limit": "the budget, in slots",
    "cause": "the event that asked for room",
    "asked": "candidates that the model judged",
    "path": "block numbers, root first",
    "status": "how the run ended",
    "metrics": "counters, see below",
}


def events_part() -> str:
    """The common fields, and a section per event: its docstring and its other fields."""
    rows = [f"| `{name}` | {text} |" for name, text in COMMON.items()]
    parts = ["\n".join(["| field of several events | |", "|---|---|", *rows])]
    for kind in (*EVENTS, KV):
        name = getattr(kind, "name", "kv")
        title = f"### `{name}`" + (f" ({kind.__name__})" if kind.__name__.lower() != name else "")
        parts.append("\n".join([title, about(kind), "", *fields_table(kind)]))
    return "\n\n".join(parts)


def metrics_part() -> str:
    """Every counter of a run; counters with one description share a row."""
    names: dict[str, list[str]] = {}
    for name, text in attributes(Metrics).items():
        names.setdefault(text, []).append(f"`{name}`")
    rows = [f"| {', '.join(shared)} | {text} |" for text, shared in names.items()]
    return "\n".join(["| counter | what it counts |", "|---|---|", *rows])


PARTS = {"events": events_part, "metrics": metrics_part}


def about(kind: type[Any]) -> str:
    """The docstring up to its list of attributes, a sentence a line."""
    text = " ".join((inspect.getdoc(kind) or "").partition("Attributes:")[0].split())
    return re.sub(r"(?<=[.!?]) (?=[A-Z`])", "\n", text)


def attributes(kind: type[Any]) -> dict[str, str]:
    """The docstring's line about each attribute; several may share a line."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(kind) or "").partition("Attributes:")[2].splitlines():
        match = re.match(r"    ([a-z_][\w, ]*): (.*)", line)
        if match:
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2].strip())
        elif names and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: text.rstrip(".") for name, text in found.items()}


def fields_table(kind: type[Any]) -> list[str]:
    """A row for each field, and one for those that several events have."""
    said, hints = attributes(kind), typing.get_type_hints(kind)
    common, rows = [], []
    for field in dataclasses.fields(kind):
        words, rare = field.name in PRIVATE, field.metadata.get("only_if_set")
        name = f"`{field.name}`" + "\\*" * words + "?" * bool(rare)
        text = said.get(field.name, MEANINGS.get(field.name, ""))
        text = re.sub(r"[;.] [Ww]ritten only where .*", "", text)
        choices = chosen(hints[field.name])
        if field.name in COMMON and not said.get(field.name):
            common.append(name)
        else:
            rows.append(f"| {name} | {choices + ': ' if choices else ''}{text} |")
    first = [f"| {', '.join(common)} | |"] if common else []
    return (
        ["| field | |", "|---|---|", *first, *rows] if rows else [f"Fields: {', '.join(common)}."]
    )


def chosen(hint: Any) -> str:
    """The words that a field may have; nothing where it is free."""
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in typing.get_args(hint))
    return next(filter(None, map(chosen, typing.get_args(hint))), "")


def filled(text: str) -> str:
    """The page with its generated parts written anew."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, _, rest = text.partition(f"{begin}\n")
        text = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """Write the page, or say whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    if filled(text) == text:
        return 0
    if not check:
        PAGE.write_text(filled(text), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: " + ("run python scripts/docs.py" if check else "written"))
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
