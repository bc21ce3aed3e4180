"""Whether the record of a command's options has what click parses, with its types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any

import click


def types_of(record: type[Any]) -> dict[str, Any]:
    """Option -> type, of a record and the records in it."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(record).items():
        found |= types_of(hint) if dataclasses.is_dataclass(hint) else {name: hint}
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, as an annotation names it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(each, arguments[0]) for each in value)
    return isinstance(value, float | int if hint is float else hint)


def check_fields(
    command: click.Command, record: type[Any], own: Collection[str] = frozenset()
) -> None:
    """A record has every option of its command, and besides these only its `own` fields."""
    options = {each.name for each in command.params if each.expose_value}

    fields = set(types_of(record))
    assert options - fields == set()
    assert fields - options == set(own)


def check_types(
    command: click.Command,
    record: type[Any],
    arguments: Sequence[str],
    several: Collection[str] = frozenset(),
) -> None:
    """What click parses, and what it offers as choices, has the types of the record; `several`
    options are read further before they are put into it."""
    hints = types_of(record)
    for option, value in command.make_context("arbor", list(arguments)).params.items():
        assert option in several or fits(value, hints[option]), (option, value)
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice) and parameter.expose_value:
            assert all(fits(each, hints[parameter.name or ""]) for each in parameter.type.choices)
