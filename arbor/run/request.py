"""Request: what one run asks for besides its problem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from arbor.budget import Budget
from arbor.errors import UsageError, did_you_mean
from arbor.events import MOST_INTEGER, Detail
from arbor.retention.future_reads import FutureReads
from arbor.run.limits import First, RunLimits
from arbor.support.setting import setting, settings_of
from arbor.support.texts import clipped, refuse_surrogates
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter, shared_trace


class Options(TypedDict, total=False):
    """Keyword arguments of `Solver.solve`, `stream`, `imap` and so on: the fields of `Request`."""

    expected: str | None
    budget: float | str | Budget | None
    seed: int | None
    timeout: float | None
    max_tokens: int | None
    first: First | None
    confidence: float | None
    trace: str | os.PathLike[str] | TraceWriter | None
    trace_level: Detail
    recorded: str | os.PathLike[str] | FutureReads | None


@dataclass(frozen=True, kw_only=True)
class TraceDetail:
    """How much of decoding a trace holds.

    Attributes:
        trace_level: one event for many steps (``events``), one for each step (``steps``), and the
            tokens of each step as well (``tokens``).
    """

    HEADING = "Output"

    trace_level: Detail = setting(
        "events",
        "Detail of decoding: a line for many steps (events), each step (steps), and its tokens (tokens).",
        shown="set",
    )


def _key(expected: str) -> str:
    """An answer key that is a text of whole characters."""
    refuse_surrogates(expected, "the answer key")
    return expected


@dataclass(frozen=True, kw_only=True)
class Request(RunLimits, TraceDetail):
    """What one run asks for.

    Attributes:
        expected: the answer key, where the task has none of its own; adds `correct`.
        budget, seed: instead of the solver's.
        trace: where to write the trace (``.arbor.jsonl`` or ``.gz``), or a writer.
        recorded: the trace of an earlier run of the same search, or its reads; for policies that
            need them (`belady`).

    Raises:
        UsageError, BudgetRange: an invalid value.
        InputError: `expected` has half of a character.
    """

    expected: str | None = setting(
        None,
        "Answer key; adds 'correct' to the result.",
        heading="Problem",
        metavar="ANSWER",
        read=_key,
    )
    budget: float | str | Budget | None = setting(
        None, "Instead of the solver's.", read=Budget.parse
    )
    seed: int | None = setting(None, "Instead of the solver's.", least=0, most=MOST_INTEGER)
    trace: str | os.PathLike[str] | TraceWriter | None = setting(None, "Where to write the trace.")
    recorded: str | os.PathLike[str] | FutureReads | None = setting(None, "An earlier run.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """What keyword arguments ask for.

        Raises:
            UsageError: an unknown one, such as a setting of a solver.
        """
        known = list(settings_of(cls))
        for name in options:
            if name not in known:
                guess = did_you_mean(name, known, likeness=0.75)  # or it is one of the solver's
                raise UsageError(
                    "unknown-setting",
                    f"a run has no setting '{name}'.",
                    f"{guess}It has {', '.join(known)}; others are the solver's, as in "
                    f"Solver({name}=…).",
                    setting=name,
                    known=known,
                )
        return cls(**options)

    def __post_init__(self) -> None:
        for name, each in settings_of(Request).items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))

    def writer(self) -> TraceWriter | None:
        """The writer of the trace, for one run; None if no trace is asked for.

        Raises:
            UsageError: the file cannot be created, or another search writes it, or the writer is
                closed: it has written a run.
        """
        if self.trace is None:
            return None
        if not isinstance(self.trace, TraceWriter):
            _check_path("trace", self.trace)
            return TraceWriter(self.trace)
        if self.trace.closed:
            raise UsageError(
                "trace-closed",
                f"the writer of {self.trace.path} is closed: it has written a run.",
                "Make a TraceWriter for each run, or pass a path.",
                path=str(self.trace.path),
            )
        if self.trace.taken:
            raise shared_trace(self.trace.path)
        self.trace.taken = True
        return self.trace

    def reads(self, problem: str, seed: int) -> FutureReads | None:
        """When the recorded run reads each block; None if no run was given.

        Args:
            problem, seed: of this run, which the recorded run must share.

        Raises:
            TraceError: the trace cannot be read.
            UsageError: the trace is of another problem or seed, or does not name them.
        """
        if self.recorded is None or isinstance(self.recorded, FutureReads):
            return self.recorded
        _check_path("recorded", self.recorded)
        trace = read_trace(self.recorded)
        header = trace.header
        other = "does not say what it is a run of"
        if header is not None:
            known = repr(clipped(header.problem)) if trace.words else "a problem it does not name"
            other = f"is a run of {known} with seed {header.seed}"
            if header.seed == seed and (not trace.words or header.problem == problem):
                return FutureReads.of(trace.events)
        raise UsageError(
            "recorded-other",
            f"{self.recorded} {other}; this one is of {clipped(problem)!r} with seed {seed}.",
            "Record this search first: solve(problem, trace=…) with the same settings.",
            path=str(self.recorded),
        )


def _check_path(name: str, given: object) -> None:
    if not isinstance(given, str | os.PathLike):
        what = f"{name} = {given!r:.60}: it must be the path of a trace."
        raise UsageError("setting-type", what, setting=name)
