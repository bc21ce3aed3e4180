"""Components from names and settings, and back: texts of the command line, JSON of traces.

Settings are the fields of a frozen dataclass; their types say how texts are read. The conversion is
our own: msgspec's and pydantic's lax modes each read 19 of the 27 settings of
`tests/test_registry.py`, and build nothing for a field typed by a protocol.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arbor import registry
from arbor.errors import UsageError, unknown_setting
from arbor.support.annotations import is_unknown, types_of

NO_SETTING = {"setting": False}  # metadata of a field that neither texts nor specs hold
# metadata of a field that traces and specs hold only where it differs from its default
ONLY_IF_SET = {"only_if_set": True}
ARE_COMPONENTS = {"components": True}  # metadata of a field that is a tuple of components

PARTS = ("controller", "verifier", "aggregate", "task", "policy")  # kinds that a solver has one of


def build(kind: str, spec: Any, /, **fields: Any) -> Any:
    """A component from its name and settings.

    Args:
        kind: one of `registry.KINDS`.
        spec: a name, also with settings (`split_spec`), a result of `spec_of`, a class, or a ready
            component.
        fields: settings that replace the defaults, or those of a ready component. Texts are read by
            the field's type: numbers, ``true``/``false``, ``none``, one of a fixed set of words,
            and ``1,2`` or JSON ``["a", "b"]`` for tuples. A setting of a part goes by its own name:
            a policy's ``eta`` is its allocator's.

    Raises:
        UnknownName: unknown name.
        UsageError: an unknown or unreadable setting, or one that the component refuses.
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
        return _changed(registry.resolve(kind, name), name, {**fields, **own})
    registry.builtin(kind)
    label = spec.__name__ if isinstance(spec, type) else registry.name_of(spec)
    if not isinstance(spec, type):
        _check_numbers(spec, label)
    return _changed(spec, label, fields)


def _check_numbers(component: Any, label: str) -> None:
    """Refuse settings of a ready component, and of its parts, that are not numbers as their fields
    are typed; nothing has read them."""
    for name, hint in _hints(component).items():
        value = getattr(component, name)
        several = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = set(typing.get_args(hint)) if several else {hint}
        if kinds & {int, float} and kinds <= {int, float, types.NoneType}:
            kind = float if float in kinds else int
            wrong = not (_is_number(value, kind) or (value is None and types.NoneType in kinds))
        else:
            kind, wrong = float, _is_nan(value)
        if wrong:
            raise _unreadable(value, _READERS[kind][1], f"{label}.{name}")
        if dataclasses.is_dataclass(hint) and dataclasses.is_dataclass(value):
            _check_numbers(value, label)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    """Whether a value is a whole number, or any."""
    if isinstance(value, bool | str):
        return False
    try:
        number = operator.index(value) if kind is int else float(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return not _is_nan(number)


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """``arborkv,scorer=recency,tail=16`` as a name and its settings.

    A part without ``=`` belongs to the value before it, as in ``pair=1,2``.

    Raises:
        UsageError: a part that is not KEY=VALUE, or a setting named twice.
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


def settings_of(component: Any) -> tuple[str, ...]:
    """Settings of a class or a ready component: its own fields, then those of its parts.

    Parts are fields that are dataclasses.
    """
    parts = _parts(component).values()
    return (*_fields(component), *(name for part in parts for name in _fields(part)))


def defaults_of(component: Any) -> dict[str, Any]:
    """A value for each own setting of a class or a ready component; '?' for a required one."""
    found = {name: _default(component, name) for name in _fields(component)}
    return {name: "?" if each is dataclasses.MISSING else each for name, each in found.items()}


def flat_defaults_of(component: Any) -> dict[str, Any]:
    """`defaults_of` as JSON-able values, with the settings of parts that ``--set`` takes.

    A part that is a component is its name; its settings follow, under their own names.
    """
    own = defaults_of(component)
    parts = _parts(component)
    found: dict[str, Any] = {}
    for name, value in own.items():
        part = parts.get(name) if value is None else value
        is_part = dataclasses.is_dataclass(part)
        if name in registry.KINDS and value is not None and not isinstance(value, str):
            found[name] = registry.name_of(value)
        elif not is_part:
            found[name] = jsonable(value)
        for inner, each in defaults_of(part).items() if is_part else ():
            if inner not in own:
                found[inner] = jsonable(each)
    return found


def setting_text(value: Any) -> str:
    """A JSON-able setting as ``--set`` takes it: ``none``, ``true``, ``10,99``, ``["a","b"]``."""
    if isinstance(value, str):
        return value
    if value is None:
        return "none"
    numbers = isinstance(value, list) and all(type(each) in (int, float) for each in value)
    if numbers and value:
        return ",".join(map(str, value))
    return json.dumps(value, separators=(",", ":"))


def summary_of(component: Any) -> str:
    """A sentence on a class or a ready component: its `summary`, or its docstring's beginning."""
    documented = " ".join((component.__doc__ or "").partition("\n\n")[0].split())
    return documented if isinstance(component, type) else getattr(component, "summary", documented)


def spec_of(component: Any) -> dict[str, Any]:
    """Name and settings of a component, JSON-able: ``build(kind, spec_of(c)) == c``.

    A field with the metadata ``only_if_set`` is left out where it has its default, so that a new
    setting leaves the specs of earlier searches as they were. A class without a name goes by
    ``package.module:Class``. A part has a name of its own where it is not of the class it has by
    default; a component that is not a dataclass has nothing but its name.
    """
    spec: dict[str, Any] = {"name": registry.name_of(component)}
    named = getattr(component, "registered_as", "")
    usually = registry.resolve(component.kind, named) if named else type(component)
    for name, field in _fields(component).items():
        value = getattr(component, name)
        if field.metadata.get("only_if_set", False) and value == _default(usually, name):
            continue
        if field.metadata.get("components", False):
            spec[name] = [spec_of(each) for each in value]
            continue
        usual = dataclasses.is_dataclass(value) and type(value) is type(_default(usually, name))
        is_part = name in registry.KINDS and type(value).__module__ != "builtins" and not usual
        spec[name] = spec_of(value) if is_part else jsonable(value)
    return spec


def _fields(component: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass, or of its class, that are settings; none of another class."""
    if not dataclasses.is_dataclass(component):
        return {}
    return {
        field.name: field
        for field in dataclasses.fields(component)
        if field.init and field.metadata.get("setting", True)
    }


def _default(component: Any, name: str) -> Any:
    """A setting of a ready component, or its default in a class; MISSING without one."""
    if not isinstance(component, type):
        return getattr(component, name)
    field = _fields(component)[name]
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _hints(component: Any) -> dict[str, Any]:
    """The type of each setting; a part typed by a protocol, or by a type that is not known when the
    program runs, has the class it has by default."""
    fields = _fields(component)
    hints = (
        types_of(component if isinstance(component, type) else type(component)) if fields else {}
    )
    found = {}
    for name in fields:
        default = _default(component, name)
        says_less = getattr(hints[name], "_is_protocol", False) or is_unknown(hints[name])
        is_part = says_less and dataclasses.is_dataclass(default)
        found[name] = type(default) if is_part else hints[name]
    return found


def _parts(component: Any) -> dict[str, type[Any]]:
    """The classes of the settings that are dataclasses themselves, or None."""
    hints = {name: _without_none(hint) for name, hint in _hints(component).items()}
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


def _without_none(hint: Any) -> Any:
    """The other type of one that is a type or None; any other as it is."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    options = [each for each in typing.get_args(hint) if each is not types.NoneType]
    return options[0] if len(options) == 1 else hint


def _changed(component: Any, label: str, fields: Mapping[str, Any]) -> Any:
    """A class built with some settings, or a ready component with some of them replaced."""
    if not fields and not isinstance(component, type):
        return component
    values = _converted(component, label, _with_parts(component, label, fields))
    if not isinstance(component, type):
        return dataclasses.replace(component, **values)
    for name in _fields(component):
        if name not in values and _default(component, name) is dataclasses.MISSING:
            raise UsageError(
                "setting-missing",
                f"'{label}' needs a value for '{name}'.",
                "",
                name=label,
                setting=name,
            )
    try:
        return component(**values)
    except UsageError:
        raise
    except Exception as error:  # any class may be named by its path
        raise UsageError(
            "component-incomplete",
            f"'{label}' cannot be built: {type(error).__name__}: {error}.",
            "",
            name=label,
        ) from error


def _with_parts(component: Any, label: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Own settings for those of parts: ``eta=1`` becomes ``allocator=`` the allocator with eta 1.

    An unknown setting stays as it is.
    """
    own = _fields(component)
    result: dict[str, Any] = {key: value for key, value in fields.items() if key in own}
    others = {key: value for key, value in fields.items() if key not in own}
    if not others:
        return result
    ready: dict[str, Any] = {}
    for name, cls in _parts(component).items():
        default = _default(component, name)
        ready[name] = cls() if default in (dataclasses.MISSING, None) else default
    ready |= _converted(component, label, result)
    for key, value in others.items():
        owners = [name for name, part in ready.items() if key in _fields(part)]
        if len(owners) == 1:
            part = ready[owners[0]]
            values = _converted(part, owners[0], {key: value})
            ready[owners[0]] = result[owners[0]] = dataclasses.replace(part, **values)
        else:
            result[key] = value
    return result


def _converted(component: Any, label: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a class or a ready component, each as its field's type.

    Raises:
        UsageError: an unknown or unreadable setting, or a component with a setting called 'name'.
    """
    own = _fields(component)
    if "name" in own:
        raise UsageError(
            "setting-reserved",
            f"'{label}' has a setting called 'name', which names the component.",
            "",
        )
    for key in fields:
        if key not in own:
            # its own name is known where the part that has it was replaced by another
            known = [name for name in settings_of(component) if name != key]
            raise unknown_setting(f"'{label}' has", key, known, name=label)
    hints = _hints(component)
    return {
        key: convert(value, hints[key], f"{label}.{key}")
        if (spec := _spec_in(key, value)) is None
        else build(key, spec)
        for key, value in fields.items()
    }


def _spec_in(key: str, value: Any) -> Any:
    """The component that a part is given as: ``scorer=recency``, or a table with a name, also as
    JSON; None where it is not given as one."""
    if key not in registry.KINDS:
        return None
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return value
        value = _table(value, key)
    return value if isinstance(value, Mapping) and "name" in value else None


def convert(value: Any, hint: Any, where: str) -> Any:
    """A text, or a value read from JSON, as the type of a field.

    Raises:
        UsageError: unreadable as that type; `where` is the setting's name.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if dataclasses.is_dataclass(part := _without_none(hint)) and str(value).lower() != "none":
            return convert(value, part, where)
        return _first_that_fits(value, options, where)
    if origin is typing.Literal:
        return _one_of({option: (option,) for option in options}, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of({each: (each.value, each.name, each) for each in hint}, value, where)
    if isinstance(hint, type) and hint in _READERS:
        read, wanted = _READERS[hint]
        try:
            return read(value)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise _unreadable(value, wanted, where) from error
    if (origin or hint) is Sequence:
        return _convert_sequence(value, tuple, (*options, ...) if options else (), where)
    if (origin or hint) in (tuple, list):
        return _convert_sequence(value, origin or hint, options, where)
    if (origin or hint) in (dict, Mapping):
        keys, values = options or (Any, Any)
        return {
            convert(key, keys, where): convert(each, values, where)
            for key, each in _table(value, where).items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping | str):
        return _changed(hint, where, _table(value, where))
    if is_unknown(hint) and isinstance(value, str):
        raise _unreadable(
            value,
            f"of the type {hint.__name__}, which is imported for type checkers alone",
            where,
            "Import it outside of 'if TYPE_CHECKING:' too.",
        )
    return value


def _none(value: Any) -> None:
    if value is not None and str(value).lower() != "none":
        raise ValueError(value)


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or math.isnan(number):
        raise ValueError(value)
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


_SWITCH = {"true": True, "yes": True, "on": True, "1": True, True: True}
_SWITCH |= {"false": False, "no": False, "off": False, "0": False, False: False}
# how each plain type is read, and its name in errors
_READERS: Mapping[type[Any], tuple[Callable[[Any], Any], str]] = {
    types.NoneType: (_none, "none"),
    bool: (
        lambda value: _SWITCH[value.lower() if isinstance(value, str) else value],
        "true or false",
    ),
    int: (_whole_number, "a whole number"),
    float: (_number, "a number"),
    str: (_text, "text"),
}


def _one_of(choices: Mapping[Any, tuple[Any, ...]], value: Any, where: str) -> Any:
    """The choice that a value is one of the names of."""
    for choice, names in choices.items():
        if value in names or (isinstance(value, str) and value == str(names[0])):
            return choice
    known = ", ".join(str(names[0]) for names in choices.values())
    raise _unreadable(value, f"one of {known}", where)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    """A table, also from the text of a JSON object."""
    table = value
    if isinstance(value, str):
        try:
            table = json.loads(value)
        except ValueError:
            table = None
    if not isinstance(table, Mapping):
        raise _unreadable(value, 'a table, as in {"width": 4}', where)
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
        return kind(convert(item, options[0], where) for item in value)
    if len(options) != len(value):
        raise _unreadable(value, f"{len(options)} values", where)
    return tuple(convert(item, hint, where) for item, hint in zip(value, options, strict=True))


def _first_that_fits(value: Any, options: tuple[Any, ...], where: str) -> Any:
    """None first, text last: ``none`` and ``3`` are what they look like."""
    order = sorted(options, key=lambda option: (option is not types.NoneType, option is str))
    for option in order:
        try:
            return convert(value, option, where)
        except UsageError:
            continue
    for option in filter(is_unknown, options):
        convert(value, option, where)
    readable = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise _unreadable(value, readable.replace("NoneType", "none"), where)


def _unreadable(value: Any, wanted: str, where: str, hint: str = "") -> UsageError:
    return UsageError(
        "setting-type",
        f"{where}={value}: it must be {wanted}.",
        hint,
        setting=where,
        value=str(value),
    )


def jsonable(value: Any) -> Any:
    """A value as JSON has it; of a dataclass its settings, of an infinite number its text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: jsonable(getattr(value, name))
            for name, field in _fields(value).items()
            if not field.metadata.get("only_if_set")
            or getattr(value, name) != _default(type(value), name)
        }
    return value
