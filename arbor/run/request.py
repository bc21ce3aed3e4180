"""Request: what one run asks for beside its problem."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict, get_args

from arbor.budget import Budget
from arbor.errors import UsageError
from arbor.events import Detail
from arbor.retention.future_reads import FutureReads
from arbor.run.limits import limit_of, seed_of, timeout_of
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter


class Options(TypedDict, total=False):
    """What `Solver.solve` and its kin take beside the problem; the fields of `Request`, all optional."""

    expected: str | None
    budget: float | str | Budget | None
    seed: int | None
    timeout: float | None
    max_tokens: int | None
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
        trace: where to write the trace (``.arbor.jsonl`` or ``.gz``), or a writer.
        trace_level: how much trace and listeners are told of decoding: a line for many steps (``events``), for each step
            (``steps``), and the tokens of each step too (``tokens``).
        recorded: the trace of an earlier run of the same search, for the clairvoyant policy, or its uses.

    Raises:
        UsageError, BudgetRange: what cannot be meant.
    """

    expected: str | None = None
    budget: float | str | Budget | None = None
    seed: int | None = None
    timeout: float | None = None
    max_tokens: int | None = None
    trace: str | os.PathLike[str] | TraceWriter | None = None
    trace_level: Detail = "events"
    recorded: str | os.PathLike[str] | FutureReads | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            Budget.parse(self.budget)
        checked = {
            "seed": None if self.seed is None else seed_of(self.seed),
            "timeout": timeout_of(self.timeout),
            "max_tokens": limit_of("max_tokens", self.max_tokens),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.trace_level not in get_args(Detail):
            known = ", ".join(get_args(Detail))
            raise UsageError(
                "trace-level", f"there is no trace level '{self.trace_level}'.", f"Known: {known}."
            )

    @property
    def limits(self) -> dict[str, float]:
        """Those that were given, by name; they are no settings of a solver, and repeat a run all the same."""
        given = {"timeout": self.timeout, "max_tokens": self.max_tokens}
        return {name: limit for name, limit in given.items() if limit is not None}

    def writer(self) -> TraceWriter | None:
        """What writes the trace, if one is asked for.

        Raises:
            UsageError: the file cannot be created, or the writer has written a run and is closed.
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

    def uses(self, problem: str, seed: int) -> FutureReads | None:
        """What the recorded run reads and when, if one is given.

        Args:
            problem, seed: of this run; another one's future is not this one's.

        Raises:
            TraceError: it cannot be read.
            UsageError: it is of another problem or seed, or does not say of which.
        """
        if self.recorded is None or isinstance(self.recorded, FutureReads):
            return self.recorded
        trace = read_trace(self.recorded)
        header = trace.header
        other = "does not say what it is a run of"
        if header is not None:
            known = repr(header.problem) if trace.words else "a problem it does not name"
            other = f"is a run of {known} with seed {header.seed}"
            if header.seed == seed and (not trace.words or header.problem == problem):
                return FutureReads.of(trace.events)
        raise UsageError(
            "recorded-other",
            f"{self.recorded} {other}; this one is of {problem!r} with seed {seed}.",
            "Record this search first: solve(problem, trace=…) with the same settings.",
            path=str(self.recorded),
        )
