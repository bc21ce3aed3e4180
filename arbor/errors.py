"""Every deliberate error of arbor.

    ArborError                      code, message, hint, data
    ├── UsageError (ValueError)     an invalid flag, name or setting                    exit 2
    │   └── UnknownName             an unknown name; suggests the closest match
    ├── BudgetError (ValueError)
    │   ├── BudgetRange             neither a ratio nor a number of tokens or bytes     exit 2
    │   └── BudgetInfeasible        fewer slots than one path needs; names the smallest exit 6
    ├── ModelError                  missing, incomplete or unsupported model             exit 5
    ├── InputError (ValueError)     unreadable, empty or over-long problem               exit 4
    ├── TraceError (ValueError)     unreadable or newer trace                            exit 4
    ├── OutOfMemory (MemoryError)   the machine, not the budget, ran out                exit 6
    ├── WorkerError (RuntimeError)  a process of a run died as often as it was begun    exit 8
    │   └── RankLost                a process that held a part of the model has ended
    └── SearchBug (RuntimeError)    an error of arbor's own in one search of several    exit 1

`code` is stable and greppable (``budget-infeasible``); `message` is what is wrong, with numbers;
`hint` is a value that would work; `data` holds the same facts for programs.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import traceback
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar


class ArborError(Exception):
    """Base of every deliberate error; never raised directly.

    Args:
        code: stable kebab-case name, e.g. ``budget-infeasible``.
        message: one sentence with the offending value; what is not printable in it is escaped.
        hint: what would work; empty if nothing would.
        data: the same facts, JSON-able.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, message: str, hint: str = "", **data: Any) -> None:
        self.code = code
        self.message = printable(message)
        self.hint = printable(hint)
        self.data = data
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, dict(self.__dict__))

    def to_dict(self) -> dict[str, Any]:
        """The error as the ``error`` object of ``--json``."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "data": self.data}


class SearchBug(ArborError, RuntimeError):
    """An error of arbor's own, or of a plug-in, that ended one search of several.

    Args:
        error: what was raised; its traceback is in `data`.
    """

    def __init__(self, error: Exception) -> None:
        lines = traceback.format_exception(error)
        super().__init__(
            "bug",
            f"{type(error).__name__}: {error}",
            "Please attach the sample's traceback and the output of 'arbor doctor --json' to a report.",
            traceback="".join(lines),
        )


def _restored(kind: type[ArborError], args: tuple[Any, ...], state: dict[str, Any]) -> ArborError:
    """An error that was pickled: its class makes the message from other arguments than `args`."""
    error: ArborError = Exception.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def printable(text: str) -> str:
    """A text without control characters: a terminal would obey them. They are shown escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


class UsageError(ArborError, ValueError):
    """An invalid flag, name or setting."""

    exit_code = 2


class UnknownName(UsageError):
    """An unknown name.

    Args:
        kind: kind of the name, e.g. ``controller``.
        name: the unknown name.
        known: the available names.
        note: remark in brackets after the available names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], note: str = "") -> None:
        names = sorted(known)
        guess = did_you_mean(name, names)
        more = f" ({note})" if note else ""
        super().__init__(
            f"unknown-{kind}",
            f"unknown {kind} '{name}'.",
            f"{guess}Known: {', '.join(names) or 'none'}{more}.",
            name=name,
            known=names,
        )


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str:
    """The closest known name as a question and a space; empty if none is close.

    Args:
        name: the unknown one.
        known: the others.
        likeness: from which a name is close, of `difflib`.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"Did you mean '{near[0]}'? " if near else ""


def logits_not_finite() -> ModelError:
    """Error for logits that no token can be chosen by."""
    return ModelError(
        "logits-not-finite",
        "the model's logits are not finite: its numbers have overflowed, or its weights are broken.",
        "Use --dtype bfloat16 or --dtype float32 where it is float16; else compare the weights with their source.",
    )


def check_settings(component: object, **ranges: tuple[bool, str]) -> None:
    """Refuse settings of a component that are out of range: words that its fields, typed by a
    `Literal`, do not have, and what is asked for besides.

    Args:
        component: whose attributes they are; a dataclass, else only `ranges` are checked.
        ranges: of each setting, whether its value is in range, and the range in words.

    Raises:
        UsageError: names the first that is not, with its value and the range.
    """
    cls: Any = type(component)
    words = {
        name: (getattr(component, name) in known, _alternatives(known))
        for name, known in _words_of(cls).items()
    }
    for name, (holds, needed) in (words | ranges).items():
        if not holds:
            given = getattr(component, name)
            value = ",".join(map(str, given)) if isinstance(given, tuple) else given
            raise UsageError("setting-range", f"{name}={value}: it must be {needed}.")


@functools.cache
def _words_of(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """The words that each field of a dataclass may be, of those that are one of a fixed set."""
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # of a subclass, with a type that is imported for type checkers alone
        return _words_of(cls.__base__)
    fields = [field.name for field in dataclasses.fields(cls)]
    return {
        name: typing.get_args(hints[name])
        for name in fields
        if typing.get_origin(hints[name]) is typing.Literal
    }


def _alternatives(words: Sequence[object]) -> str:
    """``a, b or c``."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


def unknown_setting(where: str, name: str, known: Iterable[str], /, **data: Any) -> UsageError:
    """The error for an unknown setting.

    Args:
        where: beginning of the message, as in ``'tot' has``.
        name: the unknown setting; compared with the last part of ``controller.width``.
        known: the available settings.
        data: more facts for programs.
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
    """An unusable KV budget."""


class BudgetRange(BudgetError):
    """A budget that is neither a ratio in (0, 1] nor a positive number of tokens or bytes."""

    exit_code = 2


class BudgetInfeasible(BudgetError):
    """A budget with fewer slots than one path needs.

    Args:
        needed: smallest number of slots that works.
        budget: slots of the budget.
        what: what needs them, in words.
        hint: what would work; by default the smallest budget.
    """

    exit_code = 6

    def __init__(self, needed: int, budget: int, what: str, hint: str = "") -> None:
        self.needed = needed
        self.budget = budget
        super().__init__(
            "budget-infeasible",
            f"the budget is {budget:,} tokens, but {what} needs {needed:,}.",
            hint or self.smallest,
            needed=needed,
            budget=budget,
        )

    @property
    def smallest(self) -> str:
        """The hint where no other was given."""
        return f"Smallest workable: {self.needed}tok."


class ModelError(ArborError):
    """A missing or incomplete model, or one that arbor cannot run exactly."""

    exit_code = 5


class InputError(ArborError, ValueError):
    """An unreadable or empty problem, or one too long for the model."""

    exit_code = 4


class TraceError(ArborError, ValueError):
    """An unreadable trace, or one written by a newer arbor."""

    exit_code = 4


class OutOfMemory(ArborError, MemoryError):
    """Less memory in the machine than the run needs."""

    exit_code = 6


class WorkerError(ArborError, RuntimeError):
    """A process of a run that died as often as it was begun."""

    exit_code = 8


class RankLost(WorkerError):
    """A process that held a part of the model has ended, and nothing more can be computed."""
