"""The solutions of many problems, in order or as they are found; errors raised or returned."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, Literal, get_args

from arbor.errors import ArborError, UsageError
from arbor.run.request import Options
from arbor.run.searches import in_order
from arbor.run.solution import Solution
from arbor.tasks.base import Problem

OnError = Literal["raise", "return"]

# (problem, options) of each job -> its place and what became of it, as they are found
Solving = Callable[
    [Iterable[tuple[str | Problem, Options]]],
    Generator[tuple[int, Solution | ArborError], None, None],
]


def each_solution(
    solving: Solving,
    failed: Callable[[str | Problem, ArborError, Options], Solution],
    problems: Iterable[str | Problem],
    options: Options,
    *,
    ordered: bool,
    on_error: OnError,
) -> Iterator[Solution]:
    """The solution of each problem.

    Args:
        solving: solves jobs.
        failed: the solution of a problem that ended with an error.
        problems: read as `solving` asks for them.
        options: the same for every problem.
        ordered: in the problems' order; else as they are found.
        on_error: whether an error is raised, or becomes a solution.

    Raises:
        UsageError: at once, for one problem instead of several, an unknown `on_error`, or a trace
            that all would write.
    """
    if isinstance(problems, str | Problem):
        raise UsageError(
            "problem-type", "one problem instead of several.", "Use solve, or [problem]."
        )
    if on_error not in get_args(OnError):
        raise UsageError("on-error", f"on_error is {on_error!r}.", "It is 'raise' or 'return'.")
    if options.get("trace") is not None:
        raise UsageError(
            "trace-shared", "one trace for many problems.", "Use solve, or as_completed."
        )
    return _each(solving, failed, problems, options, ordered, on_error)


def _each(
    solving: Solving,
    failed: Callable[[str | Problem, ArborError, Options], Solution],
    problems: Iterable[str | Problem],
    options: Options,
    ordered: bool,
    on_error: OnError,
) -> Iterator[Solution]:
    given: dict[int, str | Problem] = {}  # problems whose solutions are not handed out yet

    def jobs() -> Iterator[tuple[str | Problem, Options]]:
        for place, problem in enumerate(problems):
            given[place] = problem
            yield problem, options

    with closing(solving(jobs())) as results:
        found: Any = in_order(results) if ordered else results
        for place, result in found:
            problem = given.pop(place)
            if isinstance(result, ArborError):
                if on_error == "raise":
                    raise result
                result = failed(problem, result, options)
            yield result
