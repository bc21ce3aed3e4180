"""Structs of arrays whose columns may be computed when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self


class Columns:
    """A frozen dataclass of arrays; a column that is never read need not be computed.

    The constructor takes all columns; `when_read` makes some of them at their first use, once.
    """

    @classmethod
    def when_read(cls, later: Mapping[str, Callable[[Self], Any]], **now: Any) -> Self:
        """A struct with some columns still to be computed.

        Args:
            later: for each of these columns, a function that computes it from the struct (a closure
                over the struct would keep it alive until garbage collection). What the function
                reads must not change until then.
            now: the other columns.
        """
        made = object.__new__(cls)
        made.__dict__.update(now, _later=later)
        return made

    @property
    def read(self) -> tuple[str, ...]:
        """The columns computed at their first use that have been used."""
        return tuple(name for name in self.__dict__.get("_later", ()) if name in self.__dict__)

    # hidden from type checkers, which would accept any name for a column
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            make = self.__dict__.get("_later", {}).get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__} has no column {name!r}")
            column = self.__dict__[name] = make(self)
            return column
