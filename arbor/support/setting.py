"""setting: a field of a frozen dataclass with what users read of it, declared where it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from arbor.errors import UsageError, unknown_setting

KEY = "about"  # of a field's metadata
Shown = Literal["short", "long", "set", "code"]
Recorded = Literal["always", "if_set", "never"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known of a setting besides its name, type and default.

    Attributes:
        help: what it does, in a sentence.
        heading: its group in the help; empty: the `HEADING` of the class, else ``Search``.
        shown: where the command line has it: as an option of the short help, as one of the long
            help, with ``--set`` only, or not at all (``code``).
        metavar: what its value is, in the help; by default N, X or FILE by its type.
        least, most, above: bounds of a number; `above`: the least one is excluded.
        read: a value as a user gives it -> the checked one; None: as it is.
        recorded: whether traces and configurations hold it: always, where it is not the default,
            or never.
        names: a kind of component whose names a shell completes.
        requested: whether a request to a server may give it.
        needs: another setting without which this one has no effect, perhaps with the values that
            give it one: ``host``, ``share=similar|audit``.
        also: short flags, as in ``-o``.
        kind: a type of click instead of that of the field.
    """

    help: str
    heading: str = ""
    shown: Shown = "long"
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    above: bool = False
    read: Callable[[Any], Any] | None = None
    recorded: Recorded = "if_set"
    names: str = ""
    requested: bool = False
    needs: str = ""
    also: tuple[str, ...] = ()
    kind: Any = None


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass, with its `About`; `default` may be `dataclasses.MISSING`."""
    return dataclasses.field(default=default, metadata={KEY: About(help=help, **more)})


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a class.

    Attributes:
        name: of the field.
        default: as a user would give it; `MISSING` for a required one.
        hint: type of the checked value.
        about: the rest.
    """

    name: str
    default: Any
    hint: Any
    about: About

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that its value may have, without None."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        found = typing.get_args(self.hint) if union else (self.hint,)
        return tuple(each for each in found if each is not types.NoneType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it is one of; none where it takes others."""
        literals = [each for each in self.types if typing.get_origin(each) is Literal]
        return tuple(word for each in literals for word in typing.get_args(each))

    def checked(self, value: Any) -> Any:
        """The value that a user gives, as it is used.

        Raises:
            UsageError: of another type, not one of its words, or refused by its reader.
        """
        if value is None and self.default is None:
            return None
        if self.choices and value not in self.choices:
            raise UsageError(
                "setting-choice",
                f"unknown {self.name} {value!r:.60}.",
                f"Known: {', '.join(self.choices)}.",
                setting=self.name,
            )
        text = all(each is str or typing.get_origin(each) is os.PathLike for each in self.types)
        for applies, plain, wanted in (
            (text, str | os.PathLike, "text"),
            (self.types == (bool,), bool, "true or false"),
        ):
            if applies and not isinstance(value, plain):
                raise UsageError(
                    "setting-type",
                    f"{self.name} = {value!r:.60}: it must be {wanted}.",
                    setting=self.name,
                )
        if self.types in ((int,), (float,)):
            value = checked_number(
                self.name,
                value,
                whole=self.types == (int,),
                least=self.about.least,
                most=self.about.most,
                above=self.about.above,
            )
        return value if self.about.read is None else self.about.read(value)


def checked_number(
    name: str,
    value: Any,
    *,
    whole: bool = False,
    least: float | None = None,
    most: float | None = None,
    above: bool = False,
) -> Any:
    """A number within its bounds: an int if `whole`, else a float.

    Args:
        name: of what it is, in the error.
        value: as a user gives it.
        whole, least, most, above: see `About`.

    Raises:
        UsageError: anything else.
    """
    number: float = math.nan
    if not isinstance(value, str | bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = operator.index(value) if whole else float(value)
    low = -math.inf if least is None else least
    high = math.inf if most is None else most
    if not low <= number <= high or (above and number == low):
        words = [f"{'above' if above else 'of at least'} {least}"] if least is not None else []
        words += [] if most is None else [f"at most {most}"]
        bounds = " and ".join(words)
        raise UsageError(
            "limit",
            f"{name} is {value!r:.60}.",
            f"It is a {'whole ' * whole}number {bounds}".rstrip() + ".",
            setting=name,
        )
    return number


_KNOWN: dict[type[Any], dict[str, Setting]] = {}


def settings_of(cls: type[Any]) -> dict[str, Setting]:
    """The settings of a dataclass by name, in the order of its fields."""
    if cls not in _KNOWN:
        hints = typing.get_type_hints(cls)
        _KNOWN[cls] = {
            each.name: Setting(each.name, each.default, hints[each.name], _about(cls, each))
            for each in dataclasses.fields(cls)
            if KEY in each.metadata
        }
    return _KNOWN[cls]


def changed_settings(record: Any, cls: type[Any] | None = None) -> dict[str, Any]:
    """The settings of a record that differ from their defaults, by name.

    Args:
        record: an instance of a dataclass.
        cls: a base of its class, whose settings alone are meant.
    """
    known = settings_of(cls or type(record))
    values = {name: getattr(record, name) for name in known}
    return {name: value for name, value in values.items() if value != known[name].default}


def _about(cls: type[Any], field: dataclasses.Field[Any]) -> About:
    """What is known of a field, with the heading of the class that declares it."""
    about: About = field.metadata[KEY]
    owner = next(
        each for each in cls.__mro__ if field.name in vars(each).get("__annotations__", ())
    )
    return dataclasses.replace(about, heading=about.heading or getattr(owner, "HEADING", "Search"))


def checked_values(
    cls: type[Any], owner: str, given: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Every setting of a class with its checked value; the default where none is given.

    Args:
        cls: a dataclass.
        owner: of the settings, in errors.
        given: as a user gives them.

    Raises:
        UsageError: an unknown or invalid one.
    """
    refuse_unknown(owner, given, settings_of(cls))
    for name, each in settings_of(cls).items():
        yield name, each.checked(given.get(name, each.default))


def refuse_unused(record: Any) -> None:
    """Refuses a setting that is not its default and has no effect, for want of another.

    Raises:
        UsageError: names both.
    """
    for name, each in settings_of(type(record)).items():
        other, _, words = each.about.needs.partition("=")
        value = getattr(record, name)
        if not other or value == each.checked(each.default):
            continue
        given = getattr(record, other)
        if given in words.split("|") if words else given is not None:
            continue
        wanted = " or ".join(f"{other}={word}" for word in words.split("|")) if words else other
        raise UsageError(
            "setting-unused",
            f"{name}={value} has no effect without {wanted}.",
            f"Give {wanted} too, or leave out {name}.",
            setting=name,
        )


def refuse_unknown(owner: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuses an unknown setting.

    Raises:
        UsageError: names it and the closest known one.
    """
    for name in given:
        if name not in known:
            raise unknown_setting(f"{owner} has", name, sorted(known))


def known_keywords(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a call: an unknown keyword is a `UsageError` that names the closest known one.

    Args:
        owner: whose settings the keywords are, as in ``the solver``.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        _, *known = inspect.signature(call).parameters  # after self

        @functools.wraps(call)
        def checked(*args: P.args, **settings: P.kwargs) -> R:
            refuse_unknown(owner, settings, dict.fromkeys(known))
            return call(*args, **settings)

        return checked

    return decorate
