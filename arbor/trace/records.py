"""Events from JSON records: every field is checked against the type its event class declares."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NoReturn, cast

from arbor.events import EVENTS, MOST_INTEGER, Event, Integers
from arbor.trace.write import PRIVATE, SCHEMA

NO_TOKEN = -1  # in place of each token id that was left out
LEAST_INTEGER = -MOST_INTEGER - 1
MOST_DEPTH = 64  # of lists and objects in each other, where a type leaves open what is in it
MOST_TOKENS_LEFT_OUT = 1 << 22  # of one block
SHOWN_CHARACTERS = 40  # of a value in a reason

Check = Callable[[Any], Any]  # a JSON value -> a field's value
Builder = Callable[[dict[str, Any]], Any]  # a JSON object -> a dataclass, or a field it lacks

_MOST_FLOAT = int(sys.float_info.max)
_CONTAINERS = (list, dict)
_MISSING = object()


class Unreadable(ValueError):
    """A line that is not an event; its text is the reason."""


def parse(line: bytes) -> dict[str, Any]:
    """A line's JSON object; its type, number and time are checked.

    Raises:
        Unreadable: not JSON, not an object, or a number that is infinite, undefined or beyond a
            float.
    """
    try:
        record = _DECODER.decode(line.removeprefix(_BOM).decode())
    except Unreadable:
        raise
    except (ValueError, RecursionError):
        raise Unreadable("not JSON") from None
    if type(record) is not dict:
        raise Unreadable("not a JSON object")
    name = record.get("e", _MISSING)
    if type(name) is not str:
        raise Unreadable("no type 'e'" if name is _MISSING else f"e: {_not(name, 'a string')}")
    return cast("dict[str, Any]", record)


def number_of(record: Mapping[str, Any], due: int) -> int:
    """A record's number; `due` where it has none.

    Raises:
        Unreadable: not an integer from 0, or without a successor.
    """
    number = record.get("i", due)
    if type(number) is int and 0 <= number < MOST_INTEGER:
        return number
    raise Unreadable(f"i: {_not(number, 'an integer from 0')}")


def seconds_of(record: Mapping[str, Any]) -> float:
    """A record's time; NaN where it has none.

    Raises:
        Unreadable: not a number from 0.
    """
    seconds = record.get("t", math.nan)
    if type(seconds) is float and not seconds < 0:
        return seconds
    if type(seconds) is int and 0 <= seconds <= _MOST_FLOAT:
        return float(seconds)
    raise Unreadable(f"t: {_not(seconds, 'a number from 0')}")


def from_record(record: dict[str, Any]) -> Event | None:
    """A JSON object as an event; None for an unknown type.

    Unknown fields are ignored, null instead of a float is NaN, and a missing field takes its
    default. Fields left out for privacy are empty, each token id `NO_TOKEN`.

    Raises:
        Unreadable: a field is missing or not of its type.
    """
    build = _BUILDERS.get(record["e"])
    if build is not None:
        return cast("Event", build(record))
    _anything(record)
    return None


# Checks of values, one for each kind of type


def _integer(value: Any) -> int:
    if type(value) is int and LEAST_INTEGER <= value <= MOST_INTEGER:
        return value
    raise Unreadable(_not(value, "an integer of 64 bits"))


def _integers(value: Any) -> tuple[int, ...]:
    """A list of integers: token ids, most of a trace, so without a call for each of them."""
    if type(value) is not list:
        raise Unreadable(_not(value, "a list"))
    if value and (
        set(map(type, value)) != {int} or min(value) < LEAST_INTEGER or max(value) > MOST_INTEGER
    ):
        for item in value:
            _integer(item)
    return tuple(value)


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    if type(value) is int and -_MOST_FLOAT <= value <= _MOST_FLOAT:
        return float(value)
    raise Unreadable(_not(value, "a number"))


def _number(value: Any) -> float:
    """A number of a table, whose integers remain integers."""
    number = _float(value)
    return value if type(value) is int else number


def _of_type(kind: type[Any], name: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise Unreadable(_not(value, name))

    return check


def _anything(value: Any) -> Any:
    """A value of any type that is not nested too deep for those that walk through it."""
    level = _containers([value])
    for _ in range(MOST_DEPTH):
        if not level:
            return value
        level = [
            child
            for item in level
            for child in _containers(item.values() if type(item) is dict else item)
        ]
    raise Unreadable(f"nested deeper than {MOST_DEPTH} levels")


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) in _CONTAINERS]


def _table(entry: Check) -> Check:
    """An object whose values pass a check."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise Unreadable(_not(value, "an object"))
        return {name: _named(name, entry, item) for name, item in value.items()}

    return check


def _open_table(entries: Mapping[str, Check]) -> Check:
    """An object of which some entries pass checks, where it has them."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise Unreadable(_not(value, "an object"))
        _anything(value)
        for name, entry in entries.items():
            if name in value:
                _named(name, entry, value[name])
        return value

    return check


def _sequence(item: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is list:
            return tuple(map(item, value))
        raise Unreadable(_not(value, "a list"))

    return check


def _row(items: tuple[Check, ...]) -> Check:
    length = len(items)

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is list and len(value) == length:
            return tuple([item(part) for item, part in zip(items, value, strict=True)])
        raise Unreadable(_not(value, f"a list of {length}"))

    return check


def _choice(allowed: tuple[str, ...]) -> Check:
    known = dict.fromkeys(allowed)

    def check(value: Any) -> str:
        if type(value) is str and value in known:
            return value
        raise Unreadable(_not(value, f"one of {', '.join(allowed)}"))

    return check


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _check_of(hint: Any) -> Check:
    """The check of a type: compiled once for each field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (entries,) = (each for each in hint.__metadata__ if isinstance(each, Integers))
        return _open_table(dict.fromkeys(entries.names, _integer))
    if dataclasses.is_dataclass(hint):
        build = _builder(cast("type[Any]", hint))
        is_object = _of_type(dict, "an object")
        return lambda value: build(is_object(value))
    if origin is Literal:
        return _choice(arguments)
    if origin in (types.UnionType, typing.Union):  # of a Literal it is the latter
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return _optional(_check_of(kind))
    if origin is dict:
        return _open_table({}) if arguments[1] is Any else _table(_number)
    if origin is tuple and arguments[-1] is Ellipsis:
        return _integers if arguments[0] is int else _sequence(_check_of(arguments[0]))
    if origin is tuple:
        return _row(tuple(_check_of(each) for each in arguments))
    return _SIMPLE[hint]


_SIMPLE: dict[Any, Check] = {
    int: _integer,
    float: _float,
    str: _of_type(str, "a string"),
    bool: _of_type(bool, "true or false"),
}


# Objects


def _builder(kind: type[Any]) -> Builder:
    """What makes a dataclass of a JSON object with its fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [
        (field.name, _check_of(hints[field.name]), _absent(field, hints[field.name]))
        for field in dataclasses.fields(kind)
    ]

    def build(record: dict[str, Any]) -> Any:
        values = []
        known = ("e" in record) + ("i" in record) + ("t" in record)
        try:
            for name, check, absent in fields:
                value = record.get(name, _MISSING)
                if value is _MISSING:
                    values.append(absent(record))
                else:
                    values.append(check(value))
                    known += 1
        except Unreadable as reason:
            raise Unreadable(f"{name}: {reason}") from None
        if len(record) > known:
            _anything(record)
        return kind(*values)

    return build


def _absent(field: dataclasses.Field[Any], hint: Any) -> Builder:
    """The value of a field that a record lacks."""
    if field.name in PRIVATE and not field.metadata.get("only_if_set"):
        if types.NoneType in typing.get_args(hint):
            return lambda record: None
        return (lambda record: "") if hint is str else _ids_left_out
    if field.default_factory is not dataclasses.MISSING:
        factory = field.default_factory
        return lambda record: factory()
    if field.default is not dataclasses.MISSING:
        return lambda record: field.default
    return _refuse_absent


def _refuse_absent(record: dict[str, Any]) -> NoReturn:
    raise Unreadable("missing")


def _ids_left_out(record: dict[str, Any]) -> tuple[int, ...]:
    """As many ids as the record says were left out."""
    tokens = record.get("tokens")
    if type(tokens) is int and 0 <= tokens <= MOST_TOKENS_LEFT_OUT:
        return (NO_TOKEN,) * tokens
    raise Unreadable("missing" if tokens is None else f"tokens: {_not(tokens, 'their number')}")


def _named(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except Unreadable as reason:
        raise Unreadable(f"{name}: {reason}") from None


def _not(value: Any, what: str) -> str:
    """``"abc" is not a number``, in ASCII on one line."""
    if type(value) in _CONTAINERS:
        text = f"a list of {len(value)}" if type(value) is list else "an object"
    else:
        text = json.dumps(value[: SHOWN_CHARACTERS + 1] if type(value) is str else value)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}..."
    return f"{text} is not {what}"


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Unreadable(f"{text[:SHOWN_CHARACTERS]} is beyond a float")
    return number


def _refuse_constant(constant: str) -> NoReturn:
    raise Unreadable(f"{constant} is not JSON")


_BOM = b"\xef\xbb\xbf"
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_BUILDERS: dict[str, Builder] = {kind.name: _builder(kind) for kind in EVENTS}


DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SCHEMAS: dict[Any, dict[str, Any]] = {
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
        "$defs": {kind.name: _object_schema(kind) for kind in EVENTS},
    }


def _object_schema(kind: type[Any]) -> dict[str, Any]:
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
        "properties": {f.name: _schema_of(hints[f.name]) for f in dataclasses.fields(kind)},
        "required": required,
    }


def _schema_of(hint: Any) -> dict[str, Any]:
    """A field's type as a schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (entries,) = (each for each in hint.__metadata__ if isinstance(each, Integers))
        return {"type": "object", "properties": dict.fromkeys(entries.names, _SCHEMAS[int])}
    if origin is dict and arguments[1] is not Any:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    if dataclasses.is_dataclass(hint):
        return _object_schema(typing.cast("type[Any]", hint))
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(argument) for argument in arguments]}
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return {"type": "array", "items": _schema_of(arguments[0])}
        items = [_schema_of(argument) for argument in arguments]
        return {
            "type": "array",
            "prefixItems": items,
            "minItems": len(items),
            "maxItems": len(items),
        }
    return _SCHEMAS[origin or hint]
