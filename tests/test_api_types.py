"""Every public name is typed: what it takes, what it gives, what it holds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import arbor

PUBLIC = [name for name in arbor.__all__ if not name.startswith("__")]
NAMED_WITHOUT_A_TYPE = ("self", "cls")


def functions(thing: Any) -> Iterator[tuple[str, Any]]:
    """A function itself, or those of a class that arbor wrote: public methods, properties and what
    operators call."""
    if inspect.isfunction(thing):
        yield thing.__name__, thing
        return
    made = set(dir(dataclasses.make_dataclass("Made", [], order=True, slots=True)))
    generated = made if dataclasses.is_dataclass(thing) else set()
    for base in thing.__mro__:
        if not base.__module__.startswith("arbor"):
            continue
        for name, member in vars(base).items():
            private = name.startswith("_") and not name.endswith("__")
            function = inspect.unwrap(
                getattr(member, "fget", None) or getattr(member, "__func__", member)
            )
            written = inspect.isfunction(function) and function.__module__.startswith("arbor")
            if written and not private and name not in generated:
                yield f"{base.__name__}.{name}", function


def untyped(function: Any) -> list[str]:
    """The parameters without a type, and ``return`` if it is not said what comes back."""
    signature = inspect.signature(function)
    empty = inspect.Signature.empty
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is empty and name not in NAMED_WITHOUT_A_TYPE
    ]
    return missing + (["return"] if signature.return_annotation is empty else [])


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_typed(name: str) -> None:
    thing = getattr(arbor, name)
    kind = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)

    wrong = {
        where: missing for where, function in functions(kind) if (missing := untyped(function))
    }

    assert wrong == {}
    assert list(functions(kind)) or issubclass(kind, Exception) or dataclasses.is_dataclass(kind)
