"""Request: what one run asks for besides its problem."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict, get_args

from arbor.budget import Budget
from arbor.errors import UsageError, did_you_mean
from arbor.events import Detail
from arbor.retention.future_reads import FutureReads
from arbor.run.limits import (
    First,
    RunLimits,
    check_confidence,
    check_count,
    check_first,
    check_seed,
    check_timeout,
)
from arbor.support.texts import clipped, refuse_surrogates
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter


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


@dataclass(frozen=True, slots=True)
class Request:
    """What one run asks for.

    Attributes:
        expected: the answer key, where the task has none of its own; adds `correct`.
        budget, seed: instead of the solver's.
        timeout: wall seconds; then the best so far is the answer.
        max_tokens: tokens of closed blocks; then the best so far is the answer.
        first: end at the first finished path with an answer (``answer``), or at the first of those
            that the verifier values at 0.5 or more (``verified``).
        confidence: in (0, 1]; end once the confidence in the best answer reaches it: its score, or
            under a voting aggregate the probability that it stays ahead.
        trace: where to write the trace (``.arbor.jsonl`` or ``.gz``), or a writer.
        trace_level: detail of decoding in events: one event for many steps (``events``), one for
            each step (``steps``), and the tokens of each step as well (``tokens``).
        recorded: the trace of an earlier run of the same search, or its reads; for policies that
            need them (`belady`).

    Raises:
        UsageError, BudgetRange: an invalid value.
        InputError: `expected` has half of a character.
    """

    expected: str | None = None
    budget: float | str | Budget | None = None
    seed: int | None = None
    timeout: float | None = None
    max_tokens: int | None = None
    first: First | None = None
    confidence: float | None = None
    trace: str | os.PathLike[str] | TraceWriter | None = None
    trace_level: Detail = "events"
    recorded: str | os.PathLike[str] | FutureReads | None = None

    @classmethod
    def of(cls, options: Options) -> Self:
        """What keyword arguments ask for.

        Raises:
            UsageError: an unknown one, such as a setting of a solver.
        """
        known = [each.name for each in fields(cls)]
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
        if self.expected is not None:
            if not isinstance(self.expected, str):
                raise UsageError(
                    "problem-type",
                    f"expected={self.expected!r:.60}: the answer key is a text.",
                    "As in expected='24'.",
                )
            refuse_surrogates(self.expected, "the answer key")
        if self.budget is not None:
            Budget.parse(self.budget)
        checked = {
            "seed": None if self.seed is None else check_seed(self.seed),
            "timeout": check_timeout(self.timeout),
            "max_tokens": check_count("max_tokens", self.max_tokens),
            "first": check_first(self.first),
            "confidence": check_confidence(self.confidence),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.trace_level not in get_args(Detail):
            known = ", ".join(get_args(Detail))
            raise UsageError(
                "trace-level", f"unknown trace level '{self.trace_level}'.", f"Known: {known}."
            )

    @property
    def limits(self) -> dict[str, Any]:
        """The limits given, by name; needed to repeat a run, though not solver settings."""
        given = {name: getattr(self, name) for name in RunLimits.__annotations__}
        return {name: limit for name, limit in given.items() if limit is not None}

    def writer(self) -> TraceWriter | None:
        """The writer of the trace; None if no trace is asked for.

        Raises:
            UsageError: the file cannot be created, or the writer is closed: it has written a run.
        """
        if self.trace is None:
            return None
        if not isinstance(self.trace, TraceWriter):
            return TraceWriter(self.trace)
        if self.trace.closed:
            raise UsageError(
                "trace-closed",
                f"the writer of {self.trace.path} is closed: it has written a run.",
                "Make a TraceWriter for each run, or pass a path.",
                path=str(self.trace.path),
            )
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
