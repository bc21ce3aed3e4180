"""The cases of a parametrized test: those that run by default, and combinations that are drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import Any

import pytest


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """The values, all but every `step`-th of them marked slow."""
    return [each if i % step == 0 else slow(each) for i, each in enumerate(values)]


def only(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values, all that are not among `kept` marked slow."""
    return [each if each in kept else slow(each) for each in values]


def slow(value: Any) -> Any:
    """A case that runs with ``-m slow``; a tuple holds the values of several names."""
    if hasattr(value, "marks"):  # made by `pytest.param`
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def drawn(*axes: Iterable[Any], count: int = 0) -> list[tuple[Any, ...]]:
    """Combinations drawn with a fixed seed: `count`, or as many as the longest axis has values.
    Each axis goes through all of its values before one occurs again."""
    values = [list(axis) for axis in axes]
    most, random = max(count, *map(len, values)), Random(0)
    columns = []
    for axis in values:
        rounds = range(-(-most // len(axis)))
        columns.append([each for _ in rounds for each in random.sample(axis, len(axis))][:most])
    return list(zip(*columns, strict=True))
