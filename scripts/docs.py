"""Writes the generated parts of docs/ from the code: events and metrics; ``--check`` only says whether they are current.

python scripts/docs.py
python scripts/docs.py --check
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from arbor.events import EVENTS, KV
from arbor.metrics import Metrics
from arbor.trace.write import PRIVATE

# what fields mean whose class says nothing of them
MEANINGS = {
    "schema": "`arbor.trace/1`",
    "run": "a name of the run, unlike any other",
    "created": "UTC, ISO 8601",
    "arbor": "the version that wrote it",
    "problem": "as it was typed",
    "seed": "of every random stream",
    "expected": "the answer key",
    "model": "id, architecture, dtype, layers, bytes of KV per token",
    "device": "where it ran, and with which backend",
    "config": "every setting, resolved; `arbor trace config` prints it",
    "node": "the block's number, in the order of creation",
    "parent": "null for the root",
    "index": "which child of its parent it is",
    "depth": "thoughts above it",
    "tokens": "of the prompt; 0 for every other block",
    "text": "as the model wrote it",
    "ids": "token ids",
    "stop": "why the block ended",
    "logprob": "sum over its tokens",
    "confidence": "1 - H / ln V at its end, in [0, 1]; H of the likeliest tokens if the block values have a `top`",
    "top1": "mean probability of the likeliest token",
    "leaves": "the leaves; with their widths where they are chosen",
    "previous": "the leaves before",
    "distance": "edges between them",
    "needed": "slots",
    "free": "slots",
    "limit": "the budget, in slots",
    "cause": "the event that asked for room",
    "nodes": "the blocks; with their tokens where tokens moved",
    "mode": "how they came back",
    "kv": "slots held after it",
    "peak": "most device slots of the run so far",
    "elapsed_s": "seconds it took",
    "verifier": "its name",
    "values": "in [0, 1], in the order of `nodes`",
    "asked": "how many the model was asked about",
    "answer": "what the path answers",
    "path": "block numbers, root first",
    "score": "value of the answer's last block",
    "correct": "by the task's grader, where it can tell",
    "status": "how the run ended",
    "metrics": "the run's own counters, see below",
}

DOCS = Path(__file__).resolve().parents[1] / "docs"


def events_part() -> str:
    """A section per event: what it says, and its fields."""
    parts = []
    for kind in (*EVENTS, KV):
        name = getattr(kind, "name", "kv")
        title = f"### `{name}`" + (f" ({kind.__name__})" if kind.__name__.lower() != name else "")
        parts.append("\n".join([title, "", about(kind), "", *fields_table(kind)]))
    return "\n\n".join(parts)


def metrics_part() -> str:
    """Every counter of a run."""
    rows = [f"| `{name}` | {text} |" for name, text in attributes(Metrics).items()]
    return "\n".join(["| counter | what it counts |", "|---|---|", *rows])


PARTS = {"events": events_part, "metrics": metrics_part}


def about(kind: type[Any]) -> str:
    """The docstring up to its list of attributes, a sentence a line."""
    text = " ".join((inspect.getdoc(kind) or "").partition("Attributes:")[0].split())
    return re.sub(r"(?<=[.!?]) (?=[A-Z`])", "\n", text)


def attributes(kind: type[Any]) -> dict[str, str]:
    """What the docstring says of each attribute; several may share a line."""
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
    """Names, types and meanings; what ``--trace-text none`` leaves out is marked."""
    said, hints = attributes(kind), typing.get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        words = "; left out by `--trace-text none`" if field.name in PRIVATE else ""
        meaning = said.get(field.name) or MEANINGS.get(field.name, "")
        text = f"{meaning}{words}".strip().replace("|", "\\|")
        rows.append(f"| `{field.name}` | {type_text(hints[field.name])} | {text} |")
    return ["| field | type | |", "|---|---|---|", *rows]


def type_text(hint: Any) -> str:
    """A type as a reader of JSON sees it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(each) for each in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(type_text(each) for each in arguments)}]"
    plain = {int: "integer", float: "number", str: "text", bool: "true or false"}
    plain |= {types.NoneType: "null", dict: "object", KV: "[`kv`](#kv)"}
    return plain.get(origin or hint, str(hint))


def filled(text: str) -> str:
    """A document with its generated parts made anew."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """Writes the documents, or says which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(path)
            if not check:
                path.write_text(filled(text), encoding="utf-8")
    for path in stale:
        print(f"{path.name}: {'out of date: run python scripts/docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
