"""The cases of a parametrized test that run by default; the others are slow ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
