"""Every public name is typed: what it takes, what it gives, what it holds."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arbor

ROOT = Path(__file__).parents[1]
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


def test_no_folder_may_leave_a_function_untyped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    needed = {"disallow_untyped_defs", "disallow_incomplete_defs", "check_untyped_defs"}

    assert (
        settings["strict"]
        and settings["files"] == ["arbor", "scripts"]
        and "exclude" not in settings
    )
    for override in settings["overrides"]:
        assert not needed & set(override), override["module"]
        assert "ignore_errors" not in override, override["module"]
    assert (ROOT / "arbor/py.typed").is_file()


def test_what_is_untyped_is_found() -> None:
    class Sample:
        def typed(self, value: int) -> int:
            return value

        def wrong(self, value, *more, **rest: int):  # type: ignore[no-untyped-def]
            return value

        @property
        def size(self):  # type: ignore[no-untyped-def]
            return 0

    Sample.__module__ = "arbor.sample"
    for each in (Sample.typed, Sample.wrong, Sample.size.fget):  # type: ignore[attr-defined]
        each.__module__ = "arbor.sample"

    found = {where: untyped(function) for where, function in functions(Sample)}

    assert found == {
        "Sample.typed": [],
        "Sample.wrong": ["value", "more", "return"],
        "Sample.size": ["return"],
    }
