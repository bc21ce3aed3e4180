"""Names for the command line and the trace header, and the classes they stand for.

Every class is named by its dotted path and imported when it is first asked for. Other distributions add names through
entry points in the groups ``arbor.controllers``, ``arbor.verifiers``, ``arbor.tasks``, ``arbor.policies``,
``arbor.allocators``, ``arbor.scorers`` and ``arbor.backends``:

    [project.entry-points."arbor.controllers"]
    mine = "package.module:Mine"

In one's own program a decorator is enough:

    @register.controller("mine")
    class Mine: ...

A name that clashes with an earlier one (ours first, then by distribution name) is still reached as ``distribution/mine``.
A class without a name is reached as ``package.module:Mine``. ``ARBOR_PLUGINS=off`` hides all plugins, and
``ARBOR_PLUGINS=mine,other`` all but these.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import json
import math
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from arbor.errors import UnknownName, UsageError, unknown_setting

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "controller": {
        "beam": "arbor.controllers.beam:Beam",
        "chain": "arbor.controllers.chain:Chain",
        "tot": "arbor.controllers.tot:ToT",
    },
    "verifier": {
        "exact": "arbor.verifiers.exact:Exact",
        "self": "arbor.verifiers.self_eval:SelfEval",
    },
    "task": {
        "chains": "arbor.tasks.chains:Chains",
        "countdown": "arbor.tasks.countdown:Countdown",
        "game24": "arbor.tasks.game24:Game24",
        "reasoning": "arbor.tasks.reasoning:Reasoning",
        "recall": "arbor.tasks.recall:Recall",
    },
    "policy": {
        "arborkv": "arbor.retention.policy:ArborKV",
        "belady": "arbor.retention.policy:BeladyPolicy",
        "full": "arbor.retention.policy:FullRetention",
        "h2o": "arbor.retention.policy:H2O",
        "kkt": "arbor.retention.policy:KKTPolicy",
        "lru": "arbor.retention.policy:LRUPolicy",
        "random": "arbor.retention.policy:RandomTokens",
        "reentry": "arbor.retention.policy:ReentryPolicy",
        "streaming": "arbor.retention.policy:StreamingLLM",
        "tova": "arbor.retention.policy:TOVAPolicy",
        "uniform": "arbor.retention.policy:UniformPolicy",
    },
    "allocator": {
        "belady": "arbor.retention.allocators.belady:Belady",
        "full": "arbor.retention.allocators.full:Full",
        "kkt": "arbor.retention.allocators.kkt:KKT",
        "lru": "arbor.retention.allocators.lru:LRU",
        "pooled": "arbor.retention.allocators.pooled:Pooled",
        "ratio": "arbor.retention.allocators.ratio:Ratio",
        "reentry": "arbor.retention.allocators.reentry:Reentry",
        "uniform": "arbor.retention.allocators.uniform:Uniform",
    },
    "scorer": {
        "chance": "arbor.retention.scorers.random_tokens:Chance",
        "heavy": "arbor.retention.scorers.heavy_hitters:HeavyHitters",
        "recency": "arbor.retention.scorers.recency:Recency",
        "tova": "arbor.retention.scorers.tova:TOVA",
    },
    "backend": {
        "reference": "arbor.kernels.reference:ReferenceAttention",
        "rowwise": "arbor.kernels.rowwise:RowwiseAttention",
        "torch": "arbor.kernels.torch_cascade:TorchCascade",
    },
}

KINDS = tuple(BUILTIN)


T = TypeVar("T", bound=type[Any])


class Register:
    """Names classes of one's own: ``@register.controller("mine")`` above one, for every kind of `KINDS`."""

    def __init__(self) -> None:
        self._named: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}

    def __getattr__(self, kind: str) -> Callable[[str], Callable[[T], T]]:
        if kind not in KINDS:
            raise AttributeError(f"there is no kind '{kind}'; kinds are {', '.join(KINDS)}")
        return functools.partial(self._name, kind)

    def of(self, kind: str) -> Mapping[str, type[Any]]:
        """The classes named so far, by name."""
        return self._named.setdefault(kind, {})

    def _name(self, kind: str, name: str) -> Callable[[T], T]:
        def decorate(cls: T) -> T:
            earlier = self.of(kind).get(name)
            # running a notebook's cell again names the same class again
            again = earlier is not None and _path_of(earlier) == _path_of(cls)
            if not again and (earlier is not None or name in names(kind)):
                raise UsageError(
                    "name-taken",
                    f"there is a {kind} '{name}' already.",
                    f"Choose another name, such as 'my-{name}'.",
                    name=name,
                )
            if ":" in name or not name:
                raise UsageError(
                    "name-taken", f"'{name}' is no name for a {kind}.", "Leave out the colon."
                )
            self._named[kind][name] = cls
            return cls

        return decorate


def plural(kind: str) -> str:
    """``policy`` -> ``policies``; entry-point groups and ``arbor list`` go by it."""
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def names(kind: str) -> tuple[str, ...]:
    """Every name of a kind, ours first, then plugins', then registered ones, each sorted; imports none of them."""
    builtin = _builtin(kind)
    return (*sorted(builtin), *sorted(_plugins(kind)), *sorted(register.of(kind)))


def plugins(kind: str) -> dict[str, str]:
    """Names that other distributions added, and the dotted paths they stand for; imports none of them."""
    return {name: point.value for name, point in sorted(_plugins(kind).items())}


def resolve(kind: str, name: str) -> type[Any]:
    """The class a name stands for.

    Args:
        kind: one of `KINDS`.
        name: one of `names(kind)`, or ``package.module:Class``, which imports that module.

    Raises:
        UnknownName: no such name; says the nearest one.
        UsageError: a plugin or a dotted path that cannot be imported, or is no class.
    """
    path = _builtin(kind).get(name)
    if path is not None:
        return _load(path, kind, name)
    registered = register.of(kind).get(name)
    if registered is not None:
        return registered
    plugin = _plugins(kind).get(name)
    if plugin is not None:
        return _load(plugin.value, kind, name, plugin=True)
    if ":" in name:
        return _load(name, kind, name, plugin=True)
    raise unknown(kind, name)


def unknown(kind: str, name: str, more: Iterable[str] = ()) -> UnknownName:
    """The error for a name that no table holds: every name there is, and which of them are plugins'.

    Args:
        kind: one of `KINDS`.
        name: what was asked.
        more: names that mean something there though they stand for no class.
    """
    allowed = _allowed()
    note = f"plugins loaded: {', '.join(plugins(kind)) or 'none'}"
    if allowed:
        note += f"; ARBOR_PLUGINS={allowed}"
    return UnknownName(kind, name, {*more, *names(kind)}, note)


def build(kind: str, spec: Any, /, **fields: Any) -> Any:
    """A component from its name and settings.

    Args:
        kind: one of `KINDS`.
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
                f"{kind}-unnamed", f"a {kind} as a table needs a 'name'.", "", known=names(kind)
            )
        return build(kind, name, **{**settings, **fields})
    if isinstance(spec, str):
        name, own = split_spec(spec)
        return _construct(resolve(kind, name), name, {**fields, **own})
    _builtin(kind)
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
    spec: dict[str, Any] = {"name": _name_of(cls)}
    if dataclasses.is_dataclass(component):
        for field in dataclasses.fields(component):
            if field.init:
                value = getattr(component, field.name)
                other = _is_kind(field.name, value) and type(value) is not _default_type(field)
                spec[field.name] = spec_of(value) if other else _jsonable(value)
    return spec


def _is_kind(name: str, value: Any) -> bool:
    """Whether a field holds a component that has a name of its own, as a policy's `scorer` does."""
    return name in KINDS and dataclasses.is_dataclass(value)


def _default_type(field: dataclasses.Field[Any]) -> type[Any]:
    """The class of a field's default."""
    if field.default_factory is not dataclasses.MISSING:
        return type(field.default_factory())
    return type(field.default)


def _builtin(kind: str) -> Mapping[str, str]:
    table = BUILTIN.get(kind)
    if table is None:
        raise UnknownName("kind", kind, KINDS)
    return table


def _plugins(kind: str) -> Mapping[str, metadata.EntryPoint]:
    return _installed(kind, _allowed())


def _allowed() -> str:
    return os.environ.get("ARBOR_PLUGINS", "").strip()


@functools.cache
def _installed(kind: str, allowed: str) -> Mapping[str, metadata.EntryPoint]:
    """Plugins by name, read from their distributions' metadata only; one warning for each that cannot be meant."""
    if allowed.lower() == "off":
        return {}
    wanted = [word.strip() for word in allowed.split(",") if word.strip()]
    found: dict[str, metadata.EntryPoint] = {}
    points = sorted(
        metadata.entry_points(group=f"arbor.{plural(kind)}"),
        key=lambda p: (_distribution(p), p.name, p.value),
    )
    for point in points:
        full = f"{_distribution(point)}/{point.name}"
        if wanted and point.name not in wanted and full not in wanted:
            continue
        module, colon, attribute = point.value.partition(":")
        if not (module.strip() and colon and attribute.strip()):
            warnings.warn(
                f"arbor: the {kind} plugin '{full}' is left out: '{point.value}' is not package.module:Class.",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        clash = point.name in found or point.name in BUILTIN[kind]
        found.setdefault(full if clash else point.name, point)
    return found


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _load(path: str, kind: str, name: str, plugin: bool = False) -> type[Any]:
    module, _, attribute = path.partition(":")
    attribute = attribute.partition("[")[0].strip()  # extras, as in "module:Class [extra]"
    try:
        found = functools.reduce(
            getattr, attribute.split("."), importlib.import_module(module.strip())
        )
    except Exception as error:
        if not plugin:
            raise
        raise UsageError(
            f"{kind}-broken",
            f"the {kind} '{name}' ({path}) cannot be imported: {type(error).__name__}: {error}.",
            "ARBOR_PLUGINS=off hides plugins.",
            name=name,
            path=path,
        ) from error
    if not isinstance(found, type):
        raise UsageError(
            f"{kind}-broken", f"the {kind} '{name}' ({path}) is no class.", "", name=name, path=path
        )
    return found


def _name_of(cls: type[Any]) -> str:
    """The name a class goes by, found without importing anything."""
    path = _path_of(cls)
    for kind in KINDS:
        for name, own in register.of(kind).items():
            if own is cls:
                return name
        for name, known in BUILTIN[kind].items():
            if known == path:
                return name
        for name, point in _plugins(kind).items():
            module, _, attribute = point.value.partition(":")
            attribute = attribute.partition("[")[0].strip()
            loaded = sys.modules.get(module.strip())
            if point.value == path or (loaded and getattr(loaded, attribute, None) is cls):
                return name
    return path


def _path_of(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


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
    if key not in KINDS:
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


register = Register()
