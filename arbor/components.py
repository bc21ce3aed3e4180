"""Components from their names and settings, and back: what the command line writes, a trace header holds."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from arbor import registry
from arbor.errors import UsageError, unknown_setting


def build(kind: str, spec: Any, /, **fields: Any) -> Any:
    """A component from its name and settings.

    Args:
        kind: one of `registry.KINDS`.
        spec: a name, perhaps with settings (`split_spec`), what `spec_of` returned, a class, or a ready component.
        fields: settings that replace the defaults, or those of a ready component. Strings are read by the field's type:
            numbers, ``true``/``false``, ``none``, one of a fixed set of words, and ``1,2`` or JSON ``["a", "b"]`` for tuples.
            A setting of a part goes by its own name: a policy's ``eta`` is its allocator's.

    Raises:
        UnknownName: no such name.
        UsageError: a setting that does not exist, cannot be read, or that the component refuses.
    """
    if isinstance(spec, Mapping):
        settings = dict(spec)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise UsageError(
                f"{kind}-unnamed",
                f"a {kind} as a table needs a 'name'.",
                "",
                known=registry.names(kind),
            )
        return build(kind, name, **{**settings, **fields})
    if isinstance(spec, str):
        name, own = split_spec(spec)
        return _construct(registry.resolve(kind, name), name, {**fields, **own})
    registry.builtin(kind)
    if isinstance(spec, type):
        return _construct(spec, spec.__name__, fields)
    if not fields:
        return spec
    label = str(spec_of(spec)["name"])
    fields = _with_parts(type(spec), fields, functools.partial(getattr, spec))
    return dataclasses.replace(spec, **_convert_all(type(spec), label, fields))


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """``arborkv,scorer=recency,tail=16`` as a name and its settings; a part without ``=`` belongs to the value before it.

    Raises:
        UsageError: what follows the name is not KEY=VALUE, or names a setting twice.
    """
    name, *rest = (part.strip() for part in text.split(","))
    settings: dict[str, str] = {}
    for part in rest:
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals and settings:
            last = next(reversed(settings))
            settings[last] += f",{part}"
        elif not equals or not key or key in settings:
            wrong = "names a setting twice" if key in settings else f"'{part}' is not KEY=VALUE"
            raise UsageError("setting", f"{text}: {wrong}.", f"As in {name},tail=16.", setting=part)
        else:
            settings[key] = value
    return name, settings


def settings_of(cls: type[Any]) -> tuple[str, ...]:
    """Every setting a class can be built with: its own fields, then those of its parts (fields that are dataclasses)."""
    own = _fields(cls)
    return (*own, *(name for part in _parts(cls).values() for name in _fields(part)))


def spec_of(component: Any) -> dict[str, Any]:
    """Name and all settings of a component, JSON-able: ``build(kind, spec_of(c)) == c``.

    A class that no name stands for is named ``package.module:Class``; a component that is no dataclass has only its name.
    """
    cls = type(component)
    spec: dict[str, Any] = {"name": registry.name_of(cls)}
    if dataclasses.is_dataclass(component):
        for field in dataclasses.fields(component):
            if field.init:
                value = getattr(component, field.name)
                other = _is_kind(field.name, value) and type(value) is not _default_type(field)
                spec[field.name] = spec_of(value) if other else _jsonable(value)
    return spec


def _is_kind(name: str, value: Any) -> bool:
    """Whether a field holds a component that has a name of its own, as a policy's `scorer` does."""
    return name in registry.KINDS and dataclasses.is_dataclass(value)


def _default_type(field: dataclasses.Field[Any]) -> type[Any]:
    """The class of a field's default."""
    if field.default_factory is not dataclasses.MISSING:
        return type(field.default_factory())
    return type(field.default)


def _fields(cls: type[Any]) -> list[str]:
    """Names of the fields a dataclass is built with; none for another class."""
    if not dataclasses.is_dataclass(cls):
        return []
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _parts(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields of a dataclass that are dataclasses themselves; one whose type is a protocol with the class of its default."""
    if not _fields(cls):
        return {}
    hints = typing.get_type_hints(cls)
    return _protocols(cls) | {
        name: typing.cast("type[Any]", hints[name])
        for name in _fields(cls)
        if isinstance(hints[name], type) and dataclasses.is_dataclass(hints[name])
    }


def _with_parts(
    cls: type[Any], fields: Mapping[str, Any], part_of: Callable[[str], Any]
) -> dict[str, Any]:
    """``eta=1`` for a component whose part `allocator` has that setting becomes ``allocator=`` the part with eta 1.

    Args:
        part_of: the part as it is without these settings, by name.
    """
    own = _fields(cls)
    if all(key in own for key in fields):
        return dict(fields)
    result: dict[str, Any] = {
        key: build(key, value) if _names_a_component(key, value) else value
        for key, value in fields.items()
        if key in own
    }

    def ready(part: str) -> Any:
        if part not in result:
            return part_of(part)
        if not dataclasses.is_dataclass(result[part]):  # a table, or one as text
            result.update(_convert_all(cls, cls.__name__, {part: result[part]}))
        return result[part]

    for key, value in fields.items():
        if key in own:
            continue
        owners = [name for name in _parts(cls) if key in _fields(type(ready(name)))]
        if len(owners) == 1:
            part = ready(owners[0])
            values = _convert_all(type(part), owners[0], {key: value})
            result[owners[0]] = dataclasses.replace(part, **values)
        else:
            result[key] = value  # unknown, which the caller says
    return result


def _default(cls: type[Any], name: str) -> Any:
    """A field's default; the class built with its defaults where there is none."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _parts(cls)[name]()


def _construct(cls: type[Any], name: str, fields: Mapping[str, Any]) -> Any:
    fields = _with_parts(cls, fields, functools.partial(_default, cls))
    values = _convert_all(cls, name, fields)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            has_default = (
                field.default is not dataclasses.MISSING
                or field.default_factory is not dataclasses.MISSING
            )
            if field.init and not has_default and field.name not in values:
                raise UsageError(
                    "setting-missing",
                    f"'{name}' needs a value for '{field.name}'.",
                    "",
                    name=name,
                    setting=field.name,
                )
    return cls(**values)


def _convert_all(cls: type[Any], name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    known = _fields(cls)
    if "name" in known:
        raise UsageError(
            "setting-reserved",
            f"'{name}' has a setting called 'name', which names the component.",
            "",
        )
    for key in fields:
        if key not in known:
            known = list(settings_of(cls))
            known = [each for each in known if each != key]  # of a part that was replaced
            raise unknown_setting(f"'{name}' has", key, known, name=name)
    if not fields:
        return {}
    hints = typing.get_type_hints(cls) | _protocols(cls)
    return {
        key: build(key, value)
        if _names_a_component(key, value)
        else _convert(value, hints[key], f"{name}.{key}")
        for key, value in fields.items()
    }


def _names_a_component(key: str, value: Any) -> bool:
    """``scorer=recency``, or a table with its name."""
    if key not in registry.KINDS:
        return False
    named = isinstance(value, str) and not value.lstrip().startswith("{")
    return named or (isinstance(value, Mapping) and "name" in value)


def _protocols(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields whose type is a protocol, with the class of their default: what a table of settings builds."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is dataclasses.MISSING:
            part = field.default
        else:
            part = field.default_factory()
        hint = typing.get_type_hints(cls).get(field.name)
        if getattr(hint, "_is_protocol", False) and dataclasses.is_dataclass(part):
            found[field.name] = type(part)
    return found


def _convert(value: Any, hint: Any, where: str) -> Any:
    """A string, or a value as JSON gives it back, as the type a field asks for.

    Raises:
        UsageError: it cannot be read as that type; `where` is the setting's name.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(value, options[0], where)
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(value, options, hint, where)
    if origin is typing.Literal:
        for option in options:
            if value == option or (isinstance(value, str) and value == str(option)):
                return option
        raise _unreadable(value, f"one of {', '.join(map(str, options))}", where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and not isinstance(value, hint):
        for member in hint:
            if value in (member.value, member.name) or str(value) == str(member.value):
                return member
        raise _unreadable(value, f"one of {', '.join(str(member.value) for member in hint)}", where)
    if hint is types.NoneType:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        raise _unreadable(value, "none", where)
    if hint is bool:
        word = value.lower() if isinstance(value, str) else value
        if word in (True, "true", "yes", "on", "1"):
            return True
        if word in (False, "false", "no", "off", "0"):
            return False
        raise _unreadable(value, "true or false", where)
    if hint is int:
        try:
            if isinstance(value, str | int) and not isinstance(value, bool):
                return int(value)
            if isinstance(value, float) and value.is_integer():
                return int(value)
        except ValueError:
            pass
        raise _unreadable(value, "a whole number", where)
    if hint is float:
        try:
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                return float(value)
        except ValueError:
            pass
        raise _unreadable(value, "a number", where)
    if hint is str:
        if isinstance(value, str):
            return value
        raise _unreadable(value, "text", where)
    if (origin or hint) in (tuple, list):
        return _convert_sequence(value, origin or hint, options, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping | str):
        table = _table(value, where) if isinstance(value, str) else value
        return _construct(typing.cast("type[Any]", hint), where, table)
    return value


def _table(text: str, where: str) -> Mapping[str, Any]:
    """The settings of a part, written as a JSON object."""
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, Mapping):
        raise _unreadable(text, 'a table, as in {"width": 4}', where)
    return table


def _convert_sequence(value: Any, kind: Any, options: tuple[Any, ...], where: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except ValueError as error:
            raise _unreadable(value, "a JSON list", where) from error
        if value == [""]:
            value = []
    if not isinstance(value, tuple | list):
        raise _unreadable(value, "a list", where)
    if not options:
        return kind(value)
    if kind is list or (len(options) == 2 and options[1] is Ellipsis):
        return kind(_convert(item, options[0], where) for item in value)
    if len(options) != len(value):
        raise _unreadable(value, f"{len(options)} values", where)
    return tuple(_convert(item, hint, where) for item, hint in zip(value, options, strict=True))


def _first_that_fits(value: Any, options: tuple[Any, ...], hint: Any, where: str) -> Any:
    """None first, text last, so that ``none`` and ``3`` mean what they look like."""
    order = sorted(options, key=lambda option: (option is not types.NoneType, option is str))
    for option in order:
        try:
            return _convert(value, option, where)
        except UsageError:
            continue
    readable = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise _unreadable(value, readable.replace("NoneType", "none"), where)


def _unreadable(value: Any, wanted: str, where: str) -> UsageError:
    return UsageError(
        "setting-type",
        f"{where}={value}: it must be {wanted}.",
        "",
        setting=where,
        value=str(value),
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value
