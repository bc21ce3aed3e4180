"""Request: what one run asks for beside its problem."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict, get_args

from arbor.budget import Budget
from arbor.errors import UsageError
from arbor.events import Detail
from arbor.retention.uses import Uses
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
    recorded: str | os.PathLike[str] | Uses | None


def seed_of(seed: int) -> int:
    """A seed, checked.

    Raises:
        UsageError: not a whole number, or below 0.
    """
    if not hasattr(seed, "__index__") or seed < 0:
        raise UsageError("seed", f"seed is {seed!r}.", "It is a whole number, 0 or more.")
    return seed


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
    recorded: str | os.PathLike[str] | Uses | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            Budget.parse(self.budget)
        if self.seed is not None:
            seed_of(self.seed)
        if self.timeout is not None and not self.timeout >= 0:
            raise UsageError("limit", f"timeout is {self.timeout}.", "It is 0 seconds or more.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError("limit", f"max_tokens is {self.max_tokens}.", "It is 1 or more.")
        if self.trace_level not in get_args(Detail):
            known = ", ".join(get_args(Detail))
            raise UsageError(
                "trace-level", f"there is no trace level '{self.trace_level}'.", f"Known: {known}."
            )

    def writer(self) -> TraceWriter | None:
        """What writes the trace, if one is asked for.

        Raises:
            UsageError: the file cannot be created.
        """
        if self.trace is None or isinstance(self.trace, TraceWriter):
            return self.trace
        return TraceWriter(self.trace)

    def uses(self) -> Uses | None:
        """What the recorded run reads and when, if one is given.

        Raises:
            TraceError: it cannot be read.
        """
        if self.recorded is None or isinstance(self.recorded, Uses):
            return self.recorded
        return Uses.of(read_trace(self.recorded).events)
