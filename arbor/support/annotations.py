"""Types of a class's fields, also where a type checker alone imports some of them."""

from __future__ import annotations

import typing
from typing import Any, cast


class _Named(type):
    def __getattr__(cls, name: str) -> type[TypeOfCheckers]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _named(f"{cls.__name__}.{name}")


class TypeOfCheckers(metaclass=_Named):
    """Base of the classes that stand for a type which is not known when the program runs."""

    def __class_getitem__(cls, _: Any) -> type[TypeOfCheckers]:
        return cls


def types_of(cls: type[Any]) -> dict[str, Any]:
    """The type of each annotated attribute, `typing.get_type_hints`.

    A name imported under ``if TYPE_CHECKING:`` is a subclass of `TypeOfCheckers` of that name.

    Raises:
        Exception: an annotation is no type.
    """
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(cls, localns=unknown or None)
        except NameError as error:
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = _named(error.name)


def is_unknown(hint: Any) -> bool:
    """Whether a type is not known when the program runs."""
    return isinstance(hint, type) and issubclass(hint, TypeOfCheckers)


def _named(name: str) -> type[TypeOfCheckers]:
    return cast("type[TypeOfCheckers]", _Named(name, (TypeOfCheckers,), {}))
