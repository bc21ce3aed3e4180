"""Options of a command from a record: a frozen dataclass whose fields are settings."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from arbor import components, registry
from arbor.cli.command import F, Number, WholeNumber, flag_of, option, option_group
from arbor.cli.configure import (
    KINDS,
    config_values,
    is_in_file,
    owner_of,
    set_twice,
    settings_by_part,
)
from arbor.cli.set_option import FILE, Row, component_settings, ranks_of, set_rows, source_of
from arbor.engine.mode_names import default_policy
from arbor.errors import UsageError
from arbor.model.sampling_params import Sampling
from arbor.support.setting import Setting, setting, settings_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from arbor.run.settings import Settings

    Record = TypeVar("Record", bound=DataclassInstance)

PLAIN = (bool, int, float, str)
METAVARS: Mapping[Any, str] = {int: "N", float: "X", Path: "FILE"}
ANYWHERE = ("short", "long")  # where an option is shown


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """Options that build a solver.

    Attributes:
        given: settings of `Settings` and of `Sampling` by name; components as text.
        set: further settings of components, each as ``KEY=VALUE`` or ``PART.KEY=VALUE``; they win
            over `given`, and the last one of a name wins.
    """

    given: Mapping[str, Any]
    set: tuple[str, ...] = setting(
        (),
        "Any other setting, of a component too (width=4); see 'arbor list settings'.",
        shown="short",
        metavar="NAME=VALUE",
    )

    @staticmethod
    def known() -> dict[str, Setting]:
        """The settings of a solver by name; those of sampling have the model's as defaults."""
        from arbor.run.settings import Settings  # light commands start without it

        sampling = settings_of(Sampling).items()
        own = dict(settings_of(Settings))
        own |= {name: dataclasses.replace(each, default=None) for name, each in sampling}
        return {name: each for name, each in own.items() if each.about.shown != "code"}

    def having(self, **changes: Any) -> Self:
        """The same with other settings."""
        return dataclasses.replace(self, given={**self.given, **changes})

    @property
    def components(self) -> dict[str, str]:
        """Kind -> name, perhaps with settings."""
        from arbor.run.settings import Settings

        given = self.given
        found = {kind: given.get(kind) or settings_of(Settings)[kind].default for kind in KINDS}
        usual = default_policy(given.get("mode", Settings.mode), given.get("rehydrate"))
        return found | {"policy": found["policy"] or usual}

    @cached_property
    def settings(self) -> Settings:
        """The settings, checked.

        Raises:
            ArborError: an invalid one; nothing was loaded.
        """
        from arbor.run.settings import Settings

        names = settings_of(Sampling)
        given = {name: each for name, each in self.given.items() if name not in names}
        parts = settings_by_part(self.set, self.components)
        for kind in KINDS:
            if parts[kind]:
                name, own = components.split_spec(self.components[kind])
                given[kind] = {**own, **parts[kind], "name": name}
        flags = {name: self.given[name] for name in names if name in self.given}
        return Settings.of(given | {"sampling": flags | parts["sampling"]})


def options_of(
    record: type[Any], *, without: Iterable[str] = (), **defaults: Any
) -> Callable[[F], F]:
    """A decorator: an option for each setting of a record that the command line shows.

    The others are taken by ``--set``, where the record has it.

    Args:
        record: a dataclass; a field that is a record itself stands for its settings.
        without: settings that the command does not have.
        defaults: those that differ from the record's.
    """
    known = known_settings(record)
    for name, value in defaults.items():
        known[name] = dataclasses.replace(known[name], default=value)
    for name in without:
        del known[name]

    def decorate(function: F) -> F:
        shown = [each for each in known.values() if each.about.shown in ANYWHERE]
        for each in reversed(shown):
            function = _option(each, known)(function)
        vars(function)["known"] = known
        return function

    return decorate


def option_for(record: type[Any], name: str) -> Callable[[F], F]:
    """A decorator: the option for one setting of a record."""
    return _option(settings_of(record)[name], {})


def known_settings(record: type[Any]) -> dict[str, Setting]:
    """The settings of a record and of the records in it, by name."""
    hints, found = typing.get_type_hints(record), {}
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        if field.name in settings_of(record):
            found[field.name] = settings_of(record)[field.name]
        elif hint is SolverOptions:
            found |= hint.known() | settings_of(SolverOptions)
        elif dataclasses.is_dataclass(hint):
            found |= known_settings(typing.cast("type[Any]", hint))
    return found


def _option(each: Setting, known: Mapping[str, Setting]) -> Callable[[F], F]:
    about, flag = each.about, flag_of(each.name)
    more: dict[str, Any] = {}
    if not any(each.default is empty for empty in (None, MISSING, False, ())):
        more["default"] = each.default
    several = typing.get_origin(each.hint) is tuple
    kinds = typing.get_args(each.hint)[:1] if several else each.types
    if about.kind is not None:
        more["type"] = about.kind
    elif each.choices:
        more["type"] = click.Choice(each.choices)
    elif kinds == (int,):
        more["type"] = WholeNumber(about.least, about.most)  # type: ignore[arg-type]
    elif kinds == (float,):
        more["type"] = Number(about.least, about.most, min_open=about.above)
    elif kinds == (Path,):
        more["type"] = click.Path(path_type=Path)
    elif kinds == (bool,):
        more["is_flag"] = True
        if each.default:
            flag, more["show_default"] = f"{flag}/--no-{flag[2:]}", False
    if several:
        more["multiple"] = True
    kind = kinds[0] if len(kinds) == 1 else None
    if metavar := about.metavar or METAVARS.get(kind, ""):
        more["metavar"] = metavar
    if about.names:
        more["shell_complete"] = names_of(about.names)
    if each.name == "set":
        more["shell_complete"] = _complete_set(known)
    return option(
        *about.also,
        flag,
        heading=about.heading,
        common=about.shown == "short",
        help=about.help,
        **more,
    )


def names_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A completer for the names of a kind, plugins included; imports none of them."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        return [name for name in registry.names(kind) if name.startswith(begun)]

    return complete


def budgets_and_policies(budgets: str, policies: str) -> Callable[[F], F]:
    """Options ``--budget`` and ``--policy`` that may be repeated, with their help."""
    shared: dict[str, Any] = {"multiple": True, "heading": "KV budget", "common": True}
    return option_group(
        option("--budget", metavar="X", help=budgets, **shared),
        option(
            "--policy",
            metavar="NAME[,KEY=VALUE]",
            help=policies,
            shell_complete=names_of("policy"),
            **shared,
        ),
    )


def _complete_set(
    known: Mapping[str, Setting],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A completer for the settings that have no option, and for the words that they are."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        found = []
        for name, each in known.items():
            words = each.choices or (("true", "false") if each.types == (bool,) else ())
            if each.about.shown == "set":
                found += [f"{name}={word}" for word in words] or [f"{name}="]
        return [each for each in found if each.startswith(begun)]

    return complete


def read_options(record: type[Record], values: Mapping[str, Any]) -> Record:
    """A command's options as a record.

    Args:
        record: a dataclass with a field for each option, or for a record of several.
        values: the options by name, as click gives them; completed from ``--config``, and by what
            ``--set`` names of the record's own settings.

    Raises:
        UsageError: an unknown or invalid one; those of a solver are checked with its settings.
    """
    ctx = click.get_current_context(silent=True)
    known = getattr(ctx and ctx.command.callback, "known", known_settings(record))
    values = {**config_values(), **values}
    if "set" in values:
        values["set"] = _take_set(values, known)
    return _record_of(record, values)


def _take_set(values: dict[str, Any], known: Mapping[str, Setting]) -> tuple[str, ...]:
    """Puts what ``--set`` gives of a record's settings among the options; the others.

    It wins over an option from the same source, and not over one from a stronger.

    Raises:
        UsageError: a source sets one twice, or an invalid one.
    """
    ranks = ranks_of(values)
    rest: list[Row] = []
    set_by: dict[str, int] = {}
    for rank, text in set_rows(values["set"]):
        own = own_setting(text, known, values)
        if own is None:
            rest.append((rank, text))
            continue
        ((name, value),) = own.items()
        if set_by.get(name) == rank or (rank == FILE and is_in_file(name)):
            raise set_twice(source_of(rank), name)
        set_by[name] = rank
        if rank >= ranks.get(name, rank):
            values[name], ranks[name] = value, rank
    return component_settings(rest, values, ranks)


def own_setting(
    text: str, known: Mapping[str, Setting], values: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The setting of a record that ``NAME=VALUE`` is; None: one of a component.

    Raises:
        UsageError: it may be either, or has no such value.
    """
    key, equals, value = (each.strip() for each in text.partition("="))
    owner, _, name = key.rpartition(".")
    name = name.replace("-", "_")
    each = known.get(name)
    of_sampling = name in settings_of(Sampling)
    owners = ("", "solver", "sampling") if of_sampling else ("", "solver")
    if each is None or not equals or owner not in owners or name == "set":
        return None
    if not owner and not of_sampling:
        asked = SolverOptions(given={kind: values.get(kind) for kind in (*KINDS, "mode")}, set=())
        kind = owner_of(name, asked.components)
        if kind and each.about.shown in ANYWHERE:
            return None  # the solver's has an option
        if kind:
            raise UsageError(
                "setting-ambiguous",
                f"--set {text}: whose '{name}'?",
                f"--set {kind}.{name}={value} or --set solver.{name}={value}.",
            )
    found, ctx = value_of(each, value), click.get_current_context(silent=True)
    if ctx is not None and isinstance(found, str):
        for other in ctx.command.params:
            if other.name == name:  # the setting has an option, which reads it
                found = other.type_cast_value(ctx, [found] if other.multiple else found)
    return {name: found}


def value_of(each: Setting, text: str) -> Any:
    """A text as the value of a setting, which is checked later.

    Raises:
        UsageError: the setting is a number or a switch, and the text is none.
    """
    if text.lower() == "none" and each.default is None:
        return None
    plain = each.about.kind is None and len(each.types) == 1 and each.types[0] in PLAIN
    return components.convert(text, each.types[0], each.name) if plain else text


def _record_of(record: type[Record], values: Mapping[str, Any]) -> Record:
    hints = typing.get_type_hints(record)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        if hint is SolverOptions:
            known = SolverOptions.known()
            given = {name: values[name] for name in known if values.get(name) is not None}
            fields[field.name] = SolverOptions(given=given, set=values["set"])
        elif dataclasses.is_dataclass(hint):
            fields[field.name] = _record_of(typing.cast("type[Any]", hint), values)
        elif field.name in values:
            each, value = settings_of(record).get(field.name), values[field.name]
            if each is not None and each.about.kind is None:  # else click has checked it
                value = each.checked(value)
            fields[field.name] = value
        elif field.default is MISSING:
            fields[field.name] = None
    return record(**fields)
