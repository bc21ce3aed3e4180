"""JSON Schema of the trace, derived from the event classes."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Annotated, Any, Literal

from arbor.events import EVENTS, Integers
from arbor.trace.records import LEAST_INTEGER, MOST_INTEGER
from arbor.trace.write import PRIVATE, SCHEMA

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SIMPLE: dict[Any, dict[str, Any]] = {
    Any: {},
    int: {"type": "integer", "minimum": LEAST_INTEGER, "maximum": MOST_INTEGER},
    float: {"type": ["number", "null"]},  # infinite and undefined numbers are written as null
    str: {"type": "string"},
    bool: {"type": "boolean"},
    dict: {"type": "object"},
    types.NoneType: {"type": "null"},
}


def trace_schema() -> dict[str, Any]:
    """Schema of each line of a trace, as JSON Schema 2020-12.

    Like the readers, it accepts unknown types and fields.
    """
    return {
        "$schema": DIALECT,
        "$id": f"urn:{SCHEMA.replace('/', ':')}",
        "title": SCHEMA,
        "description": "One line of a trace; the first is 'header', the last 'end'.",
        "type": "object",
        "required": ["e", "i", "t"],
        "properties": {
            "e": {"type": "string", "description": "type of the event"},
            "i": {
                "type": "integer",
                "minimum": 0,
                "maximum": MOST_INTEGER - 1,
                "description": "number; a gap is a lost line",
            },
            "t": {"type": "number", "minimum": 0, "description": "seconds since the first event"},
        },
        "allOf": [
            {
                "if": {"properties": {"e": {"const": kind.name}}, "required": ["e"]},
                "then": {"$ref": f"#/$defs/{kind.name}"},
            }
            for kind in EVENTS
        ],
        "$defs": {kind.name: _object(kind) for kind in EVENTS},
    }


def _object(kind: type[Any]) -> dict[str, Any]:
    """A dataclass as a JSON object; fields that privacy may leave out are optional."""
    hints = typing.get_type_hints(kind, include_extras=True)
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in PRIVATE
    ]
    return {
        "type": "object",
        "description": " ".join((inspect.getdoc(kind) or "").split()),
        "properties": {f.name: _value(hints[f.name]) for f in dataclasses.fields(kind)},
        "required": required,
    }


def _value(hint: Any) -> dict[str, Any]:
    """A field's type as a schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (entries,) = (each for each in hint.__metadata__ if isinstance(each, Integers))
        return {"type": "object", "properties": dict.fromkeys(entries.names, _SIMPLE[int])}
    if origin is dict and arguments[1] is not Any:
        return {"type": "object", "additionalProperties": _value(arguments[1])}
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint))
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_value(argument) for argument in arguments]}
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return {"type": "array", "items": _value(arguments[0])}
        items = [_value(argument) for argument in arguments]
        return {
            "type": "array",
            "prefixItems": items,
            "minItems": len(items),
            "maxItems": len(items),
        }
    return _SIMPLE[origin or hint]
