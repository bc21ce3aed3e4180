"""Errors: code, message, hint and data, and an exit code for each kind."""

from __future__ import annotations

import inspect
import re

import pytest

from arbor import errors
from arbor.errors import ArborError, UnknownName

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ArborError)
]


@pytest.mark.parametrize(
    ("name", "guess"), [("tott", "Did you mean 'tot'? "), ("mcts", ""), ("", "")]
)
def test_an_unknown_name_says_the_nearest_and_all(name: str, guess: str) -> None:
    error = UnknownName("controller", name, ["tot", "beam", "chain"])

    assert error.code == "unknown-controller"
    assert error.hint == f"{guess}Known: beam, chain, tot."
    assert error.data == {"name": name, "known": ["beam", "chain", "tot"]}


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    """Every class stands in the drawing, with its exit code and its Python base."""
    drawn = errors.__doc__ or ""
    exits = dict(re.findall(r"(\w+)(?: \(\w+\))? .*exit (\d)", drawn))

    for kind in KINDS:
        assert kind.__name__ in drawn
        if kind.__name__ in exits:
            assert int(exits[kind.__name__]) == kind.exit_code


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_an_exit_code_of_its_kind(kind: type[ArborError]) -> None:
    assert 1 <= kind.exit_code <= 8
    assert kind.__doc__
