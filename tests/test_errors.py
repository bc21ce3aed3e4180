"""Errors: code, message, hint and data, and an exit code for each kind."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from arbor import errors
from arbor.errors import ArborError, BudgetInfeasible, UnknownName, UsageError

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ArborError)
]


def test_an_error_reads_as_code_message_and_hint() -> None:
    error = UsageError("flag", "--max-depth is 0.", "It is 1 or more.", depth=0)

    assert str(error) == "[flag] --max-depth is 0. It is 1 or more."
    assert error.to_dict() == {
        "code": "flag",
        "message": "--max-depth is 0.",
        "hint": "It is 1 or more.",
        "data": {"depth": 0},
    }


def test_an_error_without_a_hint_ends_with_its_message() -> None:
    assert str(UsageError("flag", "--max-depth is 0.")) == "[flag] --max-depth is 0."


@pytest.mark.parametrize(
    ("name", "guess"), [("tott", "Did you mean 'tot'? "), ("mcts", ""), ("", "")]
)
def test_an_unknown_name_says_the_nearest_and_all(name: str, guess: str) -> None:
    error = UnknownName("controller", name, ["tot", "beam", "chain"])

    assert error.code == "unknown-controller"
    assert error.hint == f"{guess}Known: beam, chain, tot."
    assert error.data == {"name": name, "known": ["beam", "chain", "tot"]}


def test_an_unknown_name_may_say_what_bears_on_the_names() -> None:
    error = UnknownName("policy", "x", ["lru"], "plugins loaded: none")

    assert error.hint == "Known: lru (plugins loaded: none)."


def test_an_unknown_name_where_there_is_none() -> None:
    assert UnknownName("controller", "tot", []).hint == "Known: none."


def test_an_infeasible_budget_says_the_smallest_that_works() -> None:
    error = BudgetInfeasible(988, 744, "one path")

    assert str(error) == (
        "[budget-infeasible] the budget is 744 tokens, but one path needs 988. "
        "Smallest workable: 988tok."
    )
    assert (error.needed, error.budget) == (988, 744)
    json.dumps(error.to_dict())


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


def test_errors_are_also_what_python_would_raise() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.BudgetError, ValueError)
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.TraceError, ValueError)
    assert issubclass(errors.OutOfMemory, MemoryError)
    assert issubclass(errors.WorkerError, RuntimeError)
