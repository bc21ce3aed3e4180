"""Solution: the result of a search, as plain data."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from arbor import components
from arbor.aggregate.base import AnswerVotes
from arbor.errors import ArborError, InputError, UsageError
from arbor.events import ReachedLimit
from arbor.metrics import Metrics
from arbor.run.listeners import RecordedEvents
from arbor.support.texts import human_bytes, one_line
from arbor.tasks.base import Grade, Problem
from arbor.tasks.splits import content_id
from arbor.trace.fold import Replay
from arbor.trace.read import read_trace

if TYPE_CHECKING:
    import networkx
    import pandas

    from arbor.run.session import Status
    from arbor.view import PageTrace

SOLUTION_SCHEMA = "arbor.solution/1"
MOST_TEXT = 60  # characters of a problem or an answer in a repr
MOST_STEPS = 30  # thoughts of the answer's path in a notebook


@dataclass(frozen=True, slots=True)
class Step:
    """One thought of the answer's path: node id, text, value in [0, 1], tokens.

    The value is None where nothing read it, so that it was not judged.
    """

    node: int
    text: str
    value: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One finished path.

    Attributes:
        node: its last.
        answer: None if the path gave none.
        value: of its last block, in [0, 1]; None where it was not judged.
        logprob: sum of log probabilities of the last block's tokens.
        guessed: the text does not mark the answer.
        cut: a limit of paths ended it; then it has only an answer that its text states.
    """

    node: int
    answer: str | None
    value: float | None
    logprob: float
    guessed: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Solution:
    """The result of a search; JSON-able, no tensors, no live nodes.

    Attributes:
        id: the problem's content hash.
        task, problem: names what was solved.
        answer: None if no path gave one.
        text: the answer's whole path as text, prompt excluded.
        score: the value of the answer's last block, in [0, 1]; None where it was not judged.
        correct: the grade of the answer; None without an answer key.
        finish_reason: how the run ended: ``solved``; ``exhausted``, without an answer; ``cut``,
            where a limit of paths ended the answer's path, or any path where there is no answer; or
            by a limit of the search, a signal or an error.
        path: node ids, root first.
        steps: the thoughts on the path.
        candidates: every finished path, best first.
        votes: every answer with the paths that gave it, best first, as the aggregate ranked them.
        metrics: its cost.
        seed, config: enough to repeat it.
        trace_path: the trace, if one was written.
        guessed: the text does not mark the answer: the task took, for example, its last number.
        grade: the grader's judgement of the answer: what it extracted, by which method, and why;
            None without an answer key.
        limit: the limit that ended the run, by the name of its setting: ``max_expansions``,
            ``max_tokens``, ``timeout``, ``first`` or ``confidence``; None where none did.
        error: `ArborError.to_dict` of the error; then `finish_reason` is ``error``.
        recording: the events of the search, in memory, where no trace was written; neither compared
            nor part of `to_dict`.
    """

    id: str
    task: str
    problem: str
    answer: str | None = None
    text: str = ""
    score: float | None = None
    correct: bool | None = None
    finish_reason: Status | Literal["error"]
    path: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    seed: int
    config: Mapping[str, Any]
    trace_path: str | None = None
    guessed: bool = False
    grade: Grade | None = None
    error: Mapping[str, Any] | None = None
    schema: str = SOLUTION_SCHEMA
    recording: RecordedEvents | None = field(default=None, compare=False)
    votes: tuple[AnswerVotes, ...] = ()
    limit: ReachedLimit | None = None

    def __str__(self) -> str:
        return self.answer or ""

    def __repr__(self) -> str:
        return f"Solution({_short(self.problem)}: {self.summary})"

    @property
    def summary(self) -> str:
        """The answer, the end and the cost in one line."""
        cost = self.metrics
        found = "no answer"
        if self.answer is not None:
            graded = {True: ", correct", False: ", wrong", None: ""}[self.correct]
            kind = "guessed answer" if self.guessed else "answer"
            found = f"{kind} {_short(self.answer)}{graded}"
        return (
            f"{found}, {self.finish_reason}, {cost.blocks:,} blocks, "
            f"peak {cost.peak_tokens:,} of {cost.budget_tokens:,} tokens, {cost.wall_s:.1f} s"
        )

    @property
    def budget_reached(self) -> bool:
        """Whether the budget changed anything, see `Metrics.budget_reached`."""
        return self.metrics.budget_reached

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "recording"]
        data = {name: components.jsonable(getattr(self, name)) for name in names}
        return {"schema": data.pop("schema"), **data, "metrics": self.metrics.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The solution of a `to_dict`.

        Raises:
            InputError: ``solution-invalid``, it is that of no solution, or of another version.
        """
        names = {each.name for each in dataclasses.fields(cls)} - {"recording"}
        _check_document(data, names)
        values = dict(data)
        try:
            values["path"] = tuple(values["path"])
            values["steps"] = tuple(Step(**step) for step in values["steps"])
            values["candidates"] = tuple(Candidate(**c) for c in values["candidates"])
            values["votes"] = tuple(
                AnswerVotes(**{**each, "paths": tuple(each["paths"])})
                for each in values.get("votes", ())
            )
            values["metrics"] = Metrics.from_dict(values["metrics"])
            if values.get("grade") is not None:
                values["grade"] = Grade(**values["grade"])
            return cls(**values)
        except KeyError as error:
            raise _invalid(f"lacks {error}") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise _invalid(f"has a value that cannot be read: {error}") from error

    def replay(self) -> Replay:
        """The search as data: every block, the memory plot, contradictions.

        Raises:
            UsageError: no trace was written, and the events were not kept.
            TraceError: the trace cannot be read.
        """
        if self.trace_path is not None:
            return Replay.of(read_trace(self.trace_path))
        replay = Replay()
        for seconds, event in self._events():
            replay.feed(event, seconds)
        return replay

    def to_networkx(self) -> networkx.DiGraph:
        """The whole search as a directed graph, with an edge to every child.

            solution = solver.solve("4 5 6 10")
            graph = solution.to_networkx()
            networkx.shortest_path(graph, 0, solution.path[-1])

        Returns:
            Nodes are block ids (the root is 0) with the attributes text, value in [0, 1] (NaN where
            it was not valued), state (``open``, ``closed``, ``terminal`` or ``pruned``) and tokens.

        Raises:
            UsageError: no trace was written, and the events were not kept.
            TraceError: the trace cannot be read.
        """
        import networkx  # here: slow to import, and seldom needed

        graph = networkx.DiGraph()
        for each in self.replay().blocks.values():
            value = each.value if each.verified else math.nan
            named = {"value": value, "state": each.state.value, "tokens": each.tokens}
            graph.add_node(each.id, text=each.text, **named)
            if each.parent is not None:
                graph.add_edge(each.parent, each.id)
        return graph

    def to_pandas(self) -> pandas.DataFrame:
        """The whole search as a table, a row for every block.

            table = solution.to_pandas()
            table[table.state == "terminal"].sort_values("value").tail()

        Returns:
            Indexed by block id (the root is 0), with the columns parent (missing for the root),
            depth, tokens, text, value in [0, 1] (missing where it was not valued), state
            (``open``, ``closed``, ``terminal`` or ``pruned``), answer, and whether the block is on
            the answer's path.

        Raises:
            UsageError: pandas is not installed; or no trace was written, and the events were not
                kept.
            TraceError: the trace cannot be read.
        """
        pandas = import_pandas()
        blocks = list(self.replay().blocks.values())
        columns = {
            "parent": pandas.array([block.parent for block in blocks], dtype="Int64"),
            "depth": [block.depth for block in blocks],
            "tokens": [block.tokens for block in blocks],
            "text": [block.text for block in blocks],
            "value": [block.value if block.verified else math.nan for block in blocks],
            "state": [block.state.value for block in blocks],
            "answer": [block.answer for block in blocks],
            "on_path": [block.id in self.path for block in blocks],
        }
        return pandas.DataFrame(columns, index=pandas.Index([b.id for b in blocks], name="block"))

    def show(self, file: IO[str] | None = None) -> None:
        """Show the search: in a notebook the interactive page, elsewhere the tree as text.

        Without its events, only the answer's path is printed.

        Args:
            file: print there instead of on stdout, in a notebook too.
        """
        display = _notebook_display() if file is None and self._has_events else None
        if display is not None:
            from arbor.view import html_page, notebook_frame

            display(notebook_frame(html_page(self._page_trace(self.problem))))
            return
        from rich.console import Console

        from arbor.view.draw import draw
        from arbor.view.live import glyphs_of

        console = Console(file=file, highlight=False, markup=False, emoji=False)
        guessed = " (guessed)" if self.guessed else ""
        console.print(f"{one_line(self.problem)} -> {one_line(str(self.answer))}{guessed}")
        if self._has_events:
            size = console.size
            console.print(draw(self.replay(), size.width, size.height, glyphs_of(console)))
            return
        for step in self.steps:
            value = "" if step.value is None else f"v={step.value:.2f} "
            console.print(f"#{step.node} {value}{one_line(step.text)}")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the search as one HTML file that needs no server and no network.

        Raises:
            UsageError: no trace was written and the events were not kept, or the file cannot be
                written, or holds something else than such a page.
            TraceError: the trace cannot be read.
        """
        from arbor.view import write_page

        return write_page(path, self._page_trace(Path(path).stem))

    def _repr_html_(self) -> str:
        """The answer, its path and a static picture of the search, for a notebook; no script."""
        from arbor.view import plain_text, search_picture

        found = "no answer" if self.answer is None else plain_text(self.answer)
        found += " (guessed)" if self.guessed else ""
        steps = "".join(f"<li>{plain_text(step.text)}</li>" for step in self.steps[:MOST_STEPS])
        if len(self.steps) > MOST_STEPS:
            steps += f"<li>… {len(self.steps) - MOST_STEPS:,} more</li>"
        picture = search_picture(self.replay()) if self._has_events else ""
        return (
            f"<div><p><b>{plain_text(self.problem)}</b> → <b>{found}</b><br>"
            f"<small>{plain_text(self.summary, 400)}</small></p>"
            f"<ol>{steps}</ol>{picture}</div>"
        )

    @property
    def _has_events(self) -> bool:
        """Whether the search can be replayed."""
        return self.trace_path is not None or (self.recording is not None and self.recording.whole)

    def _events(self) -> RecordedEvents:
        """The events in memory.

        Raises:
            UsageError: they were not kept.
        """
        recording = self.recording
        if recording is not None and recording.whole:
            return recording
        message = "this solution has no events: its run wrote no trace and kept none in memory."
        if recording is not None:
            message = (
                f"this run wrote no trace, and its {recording.events:,} events take more than the "
                f"{human_bytes(recording.most_bytes)} that a solution keeps."
            )
        raise UsageError(
            "trace-missing",
            message,
            "Solve with trace='run.arbor.jsonl', or with Solver(record_bytes=…).",
        )

    def _page_trace(self, name: str) -> PageTrace:
        from arbor.view import page_trace_of, read_page_trace

        if self.trace_path is not None:
            return read_page_trace(self.trace_path)
        return page_trace_of(name, self._events())


def _check_document(data: Any, known: AbstractSet[str]) -> None:
    """Refuses what no `Solution.to_dict` gives.

    Args:
        data: as a caller gives it.
        known: the names of its entries.

    Raises:
        InputError: it is another document, or has an unknown entry.
    """
    if not isinstance(data, Mapping):
        raise _invalid(f"is {data!r:.60}, and no mapping")
    if "error" in data and "schema" not in data:
        raise _invalid(f"is that of a failed run: {data['error']!r:.200}")
    schema = data.get("schema")
    if schema != SOLUTION_SCHEMA:
        named = "has no schema" if schema is None else f"is of the schema {schema!r:.60}"
        raise _invalid(f"{named}; this arbor reads {SOLUTION_SCHEMA}", schema=str(schema))
    if unknown := [name for name in data if name not in known]:
        raise _invalid(f"has the unknown entry {unknown[0]!r:.60}")


def _invalid(what: str, **data: Any) -> InputError:
    return InputError(
        "solution-invalid",
        f"the solution's document {what}.",
        "Solution.to_dict and 'arbor solve --json' of this version give one.",
        **data,
    )


def _short(text: str) -> str:
    """A text in quotes on one line, cut."""
    return repr(text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…")


def _notebook_display() -> Callable[[str], None] | None:
    """Shows HTML in the notebook this runs in; None outside of one."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return lambda text: ipython.display.display({"text/html": text}, raw=True)


def failed_solution(
    task: str, problem: str | Problem, error: ArborError, config: Mapping[str, Any]
) -> Solution:
    """The solution of a problem that could not be solved because of an error.

    Args:
        config: of its run.
    """
    if isinstance(problem, Problem):
        identity, text = problem.id, problem.text
    else:
        identity, text = content_id(task, str(problem)), str(problem)
    return Solution(
        id=identity,
        task=task,
        problem=text,
        finish_reason="error",
        seed=config["seed"],
        config=config,
        error=error.to_dict(),
    )


def import_pandas() -> Any:
    """The module pandas, which arbor does not install.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UsageError(
            "pandas-missing", "pandas is not installed.", "pip install pandas"
        ) from error
    return pandas
