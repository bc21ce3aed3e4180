"""Writes the generated parts of ARCHITECTURE.md and docs/ from the code.

Events and metrics come from their classes; the house, its floors and the modules that may import
torch from what tests/test_architecture.py enforces. ``--check`` writes nothing and fails if a part
is out of date.

    python scripts/docs.py
    python scripts/docs.py --check
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from arbor.events import EVENTS, KV
from arbor.feature import GROUPS
from arbor.metrics import Metrics
from arbor.trace.write import PRIVATE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from test_architecture import FLOORS, ROOT, TORCH  # the lists that the tests enforce

# Descriptions of folders without an `__init__.py`, whose docstring would describe them.
FOLDERS = {
    "controllers": "Searches: which leaves grow next; pure Python.",
    "kernels": "Attention backends and linear layers: tensors in, tensors out; no tree.",
    "sapling": "The built-in model: weights, tokenizer, model card.",
    "verifiers": "Values of thoughts, without the answer key.",
}

# Meanings of fields that the docstring of their class does not describe.
MEANINGS = {
    "schema": "`arbor.trace/1`",
    "run": "unique name of the run",
    "created": "UTC, ISO 8601",
    "arbor": "the version that wrote it",
    "problem": "as it was typed",
    "seed": "seed of every random stream",
    "expected": "the answer key",
    "model": "id, architecture, dtype, layers, bytes of KV per token",
    "device": "device name, torch version, attention backend",
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
    "confidence": (
        "1 - H / ln V at its end, in [0, 1]; "
        "H of the likeliest tokens if the block values have a `top`"
    ),
    "top1": "mean probability of the likeliest token",
    "leaves": "the leaves; in `select` with their widths",
    "previous": "the leaves before",
    "distance": "edges between them",
    "needed": "slots",
    "free": "slots",
    "limit": "the budget, in slots",
    "cause": "the event that asked for room",
    "nodes": "the blocks; with numbers of tokens where tokens moved",
    "mode": "recomputed, or fetched from a lower tier",
    "kv": "slots held after the event",
    "peak": "most device slots of the run so far",
    "elapsed_s": "seconds it took",
    "verifier": "its name",
    "values": "in [0, 1], in the order of `nodes`",
    "asked": "candidates that the model judged",
    "answer": "what the path answers",
    "path": "block numbers, root first",
    "score": "value of the answer's last block",
    "correct": "by the task's grader, where it can tell",
    "status": "how the run ended",
    "metrics": "the run's own counters, see below",
}

DOCUMENTS = (ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md")))


def house_part() -> str:
    """One line per module and folder of ``arbor/``, and per folder of a group, from its
    docstring."""
    rooms = sorted(
        (unit for floor in FLOORS for unit in floor), key=lambda unit: (is_folder(unit), unit)
    )
    names = {room: f"{room}/" if is_folder(room) else f"{room}.py" for room in rooms}
    lines = ["```", "arbor/"]
    for room in rooms:
        family = (ROOT / "arbor" / room / "base.py").exists()
        lines.append(f"  {names[room]:<16} {purpose(room)}{' (family)' if family else ''}")
        if room in GROUPS:
            folders = sorted(
                path.parent.name for path in (ROOT / "arbor" / room).glob("*/__init__.py")
            )
            lines += [f"    {name + '/':<14} {purpose(f'{room}/{name}')}" for name in folders]
    return "\n".join([*lines, "```"])


def floors_part() -> str:
    """The floors with their units, top floor first."""
    lines = [f"{number:>2}  {'  '.join(units)}" for number, units in enumerate(FLOORS)]
    return "\n".join(["```", *reversed(lines), "```"])


def torch_part() -> str:
    """The modules and folders that may import torch."""
    return ", ".join(f"`{name}`" for name in sorted(TORCH)) + "."


def is_folder(unit: str) -> bool:
    return (ROOT / "arbor" / unit).is_dir()


def purpose(unit: str) -> str:
    """The first paragraph of a unit's docstring, on one line."""
    path = ROOT / "arbor" / (f"{unit}/__init__.py" if is_folder(unit) else f"{unit}.py")
    if not path.exists():
        return FOLDERS[unit]
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def events_part() -> str:
    """A section per event: its docstring and its fields."""
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


PARTS = {
    "house": house_part,
    "floors": floors_part,
    "torch": torch_part,
    "events": events_part,
    "metrics": metrics_part,
}


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


def marks(name: str) -> tuple[str, str]:
    """The lines around a generated part."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def filled(text: str) -> str:
    """A document with its generated parts written anew."""
    for name, make in PARTS.items():
        begin, end = marks(name)
        if begin in text:
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """Write the documents, or list those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    for name in PARTS:
        for mark in marks(name):
            if sum(text.count(mark) for text in texts.values()) != 1:
                print(f"one document must hold one line {mark}")
                return 1
    stale = [path for path, text in texts.items() if filled(text) != text]
    for path in stale:
        if not check:
            path.write_text(filled(texts[path]), encoding="utf-8")
        state = "out of date: run python scripts/docs.py" if check else "written"
        print(f"{path.relative_to(ROOT)}: {state}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
