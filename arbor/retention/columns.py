"""Structs of arrays whose columns may be made when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self


class Columns:
    """A frozen dataclass of arrays, where nobody pays for a column that nobody reads.

    Made in the ordinary way, all columns are there. Made by `when_read`, some are computed at the first look, once.
    """

    @classmethod
    def when_read(cls, later: Mapping[str, Callable[[Self], Any]], **now: Any) -> Self:
        """A struct with some columns still to be made.

        Args:
            later: for each of these columns, what makes it, given the struct (a function that held it would keep it alive
                until the garbage collector comes). What it reads must not change until then.
            now: the other columns.
        """
        made = object.__new__(cls)
        made.__dict__.update(now, _later=later)
        return made

    @property
    def read(self) -> tuple[str, ...]:
        """Of the columns made when they are first read, those that were."""
        return tuple(name for name in self.__dict__.get("_later", ()) if name in self.__dict__)

    if not TYPE_CHECKING:  # a type checker shall still know which columns there are

        def __getattr__(self, name: str) -> Any:
            make = self.__dict__.get("_later", {}).get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__} has no column {name!r}")
            column = self.__dict__[name] = make(self)
            return column
