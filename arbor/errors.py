"""Every error arbor raises on purpose.

    ArborError                      code, message, hint, data
    ├── UsageError (ValueError)     a wrong flag, name or setting                       exit 2
    │   └── UnknownName             a name no table holds; says the nearest one
    ├── BudgetError (ValueError)
    │   ├── BudgetRange             the budget is not a ratio, a token or a byte count   exit 2
    │   └── BudgetInfeasible        fewer slots than one path needs; says the smallest   exit 6
    ├── ModelError                  missing, incomplete or unsupported model             exit 5
    ├── InputError (ValueError)     unreadable, empty or over-long problem               exit 4
    ├── TraceError (ValueError)     unreadable or newer trace                            exit 4
    └── OutOfMemory (MemoryError)   the machine, not the budget, ran out                 exit 6

`code` is stable and greppable (``budget-infeasible``); `message` says what is wrong with the numbers; `hint` says
the value that would work; `data` carries the same facts for programs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class ArborError(Exception):
    """Base of every deliberate error; never raised itself.

    Args:
        code: stable kebab-case name, e.g. ``budget-infeasible``.
        message: one sentence with the offending value.
        hint: what would work; empty if nothing would.
        data: the same facts, JSON-able.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, message: str, hint: str = "", **data: Any) -> None:
        self.code = code
        self.message = message
        self.hint = hint
        self.data = data
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text} {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, Any]:
        """The error as the ``error`` object of ``--json``."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "data": self.data}


class UsageError(ArborError, ValueError):
    """A flag, a name or a setting that cannot be meant."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that no table holds.

    Args:
        kind: what was looked for, e.g. ``controller``.
        name: what was asked.
        known: every name there is.
        note: what else bears on the names, in brackets after them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], note: str = "") -> None:
        names = sorted(known)
        guess = did_you_mean(name, names)
        more = f" ({note})" if note else ""
        super().__init__(
            f"unknown-{kind}",
            f"'{name}' is no known {kind}.",
            f"{guess}Known: {', '.join(names) or 'none'}{more}.",
            name=name,
            known=names,
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as a question, a space after it; nothing if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'? " if near else ""


def unknown_setting(where: str, name: str, known: Iterable[str], /, **data: Any) -> UsageError:
    """A setting that there is not.

    Args:
        where: the beginning of the message, as in ``'tot' has``.
        name: what was asked; compared with the last part of ``controller.width``.
        known: every setting there is.
        data: more for programs.
    """
    names = list(known)
    guess = did_you_mean(name, [each.rpartition(".")[2] for each in names])
    return UsageError(
        "unknown-setting",
        f"{where} no setting '{name}'.",
        f"{guess}Known: {', '.join(names) or 'none'}.",
        setting=name,
        known=names,
        **data,
    )


class BudgetError(ArborError, ValueError):
    """Something about the KV budget."""


class BudgetRange(BudgetError):
    """The budget is neither a ratio in (0, 1] nor a positive number of tokens or bytes."""

    exit_code = 2


class BudgetInfeasible(BudgetError):
    """The budget holds fewer slots than one path needs.

    Args:
        needed: smallest number of slots that works.
        budget: slots the budget gives.
        what: what needs them, in words.
        hint: how to make it work; the smallest budget if empty.
    """

    exit_code = 6

    def __init__(self, needed: int, budget: int, what: str, hint: str = "") -> None:
        self.needed = needed
        self.budget = budget
        super().__init__(
            "budget-infeasible",
            f"the budget is {budget:,} tokens, but {what} needs {needed:,}.",
            hint or f"Smallest workable: {needed}tok.",
            needed=needed,
            budget=budget,
        )


class ModelError(ArborError):
    """A model that is missing, incomplete, or that arbor cannot run exactly."""

    exit_code = 5


class InputError(ArborError, ValueError):
    """A problem that cannot be read, is empty, or is too long for the model."""

    exit_code = 4


class TraceError(ArborError, ValueError):
    """A trace that cannot be read, or was written by a newer arbor."""

    exit_code = 4


class OutOfMemory(ArborError, MemoryError):
    """The machine has less memory than the budget promised."""

    exit_code = 6
