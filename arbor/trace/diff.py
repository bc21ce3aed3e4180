"""Differences between two traces: settings, trees, events and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arbor.events import Boundary, Opened
from arbor.metrics import Metrics
from arbor.trace.fold import Replay, canonical
from arbor.trace.read import Trace
from arbor.trace.write import PRIVATE, config_without_words

Key = tuple[int, ...]  # child indices from the root


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: a name and its value in each trace."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Parting:
    """The first event that differs.

    Attributes:
        at: number of equal events before it.
        first, second: the events as records; None where a trace has ended.
        fields: names of the fields that differ, if both are of one type.
    """

    at: int
    first: dict[str, Any] | None
    second: dict[str, Any] | None
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The differences between two traces.

    Attributes:
        settings: settings that differ in the headers, by dotted name.
        same_tree: whether every block has the same tokens, and the prompt the same text and length.
        blocks: blocks in one tree only or with other tokens, by their child indices.
        parting: the first event that differs, times and machine aside; None if none does.
        metrics: counters and seconds that differ.
        words: whether each trace has texts and token ids (`Trace.words`). Unless both have,
            blocks, events and settings are compared without them: blocks by their lengths.
    """

    settings: tuple[Difference, ...]
    same_tree: bool
    blocks: tuple[Key, ...]
    parting: Parting | None
    metrics: tuple[Difference, ...]
    words: tuple[bool, bool] = (True, True)


def diff_traces(first: Trace, second: Trace) -> TraceDiff:
    """Compares two traces; either may be incomplete."""
    words = first.words and second.words
    trees = _thoughts(first, words), _thoughts(second, words)
    keys = sorted({*trees[0], *trees[1]}, key=lambda key: (len(key), key))
    blocks = tuple(key for key in keys if trees[0].get(key) != trees[1].get(key))
    costs = tuple(Replay.of(trace).metrics() for trace in (first, second))
    return TraceDiff(
        settings=tuple(_unequal(_settings(first, words), _settings(second, words))),
        same_tree=not blocks,
        blocks=blocks,
        parting=_parting(first, second, words),
        metrics=tuple(_costs(*costs)),
        words=(first.words, second.words),
    )


def _thoughts(trace: Trace, words: bool) -> dict[Key, tuple[int | str, ...]]:
    """The tokens of every closed block, of the prompt its text and length; without `words`, their
    number."""
    keys: dict[int, Key] = {}
    thoughts: dict[Key, tuple[int | str, ...]] = {}
    for event in trace.events:
        if isinstance(event, Opened):
            if event.parent is None:
                keys[event.node] = ()
                thoughts[()] = (event.tokens, event.text) if words else (event.tokens,)
            else:
                keys[event.node] = (*keys.get(event.parent, ()), event.index)
        elif isinstance(event, Boundary) and event.node in keys:
            thoughts[keys[event.node]] = event.ids if words else (len(event.ids),)
    return thoughts


def _settings(trace: Trace, words: bool) -> dict[str, Any]:
    """The settings in a header, machine excluded, flat; without `words`, none that holds any."""
    header = trace.header
    if header is None:
        return {}
    names = ("task", "problem", "seed", "expected")
    fields = {name: getattr(header, name) for name in names if words or name not in PRIVATE}
    config = header.config if words else config_without_words(header.config)
    tables = {"model": header.model, **config, "kv": header.kv}
    return dict(_flat(fields | tables))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _flat(item, f"{name}.{key}" if name else str(key))


def _unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            yield Difference(name, first.get(name), second.get(name))


def _parting(first: Trace, second: Trace, words: bool) -> Parting | None:
    """The first event that differs; headers are compared as settings."""
    lines = [
        [line for line in canonical(trace, words) if not line.startswith('{"e":"header"')]
        for trace in (first, second)
    ]
    for at in range(max(map(len, lines))):
        left, right = (side[at] if at < len(side) else None for side in lines)
        if left != right:
            one, other = (None if line is None else json.loads(line) for line in (left, right))
            fields = ()
            if one and other and one["e"] == other["e"]:
                fields = tuple(
                    name
                    for name in {**one, **other}
                    if name not in one or name not in other or one[name] != other[name]
                )
            return Parting(at, one, other, fields)
    return None


def _costs(first: Metrics, second: Metrics) -> Iterator[Difference]:
    for name in {**first.to_dict(), **second.to_dict()}:  # each leaves out some that are 0
        left, right = getattr(first, name), getattr(second, name)
        if left != right and not (math.isnan(left) and math.isnan(right)):
            yield Difference(name, left, right)
