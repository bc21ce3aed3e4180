"""Solution: the result of a search, as plain data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from arbor.errors import ArborError, UsageError
from arbor.metrics import Metrics
from arbor.support.graph import Vertex, search_graph
from arbor.tasks.base import Problem
from arbor.tasks.splits import content_id
from arbor.trace.fold import Replay
from arbor.trace.read import read_trace

if TYPE_CHECKING:
    import networkx

    from arbor.run.session import Status

SOLUTION_SCHEMA = "arbor.solution/1"


@dataclass(frozen=True, slots=True)
class Step:
    """One thought of the answer's path: node id, text, value in [0, 1], tokens."""

    node: int
    text: str
    value: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One finished path: its last node, its answer, the value and the sum of log probabilities."""

    node: int
    answer: str | None
    value: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a search; JSON-able, no tensors, no live nodes.

    Attributes:
        id: the problem's content hash.
        task, problem: names what was solved.
        answer: None if no path gave one.
        text: the answer's whole path as text, prompt excluded.
        score: the value of the answer's last block, in [0, 1].
        correct: the grade of the answer; None without an answer key.
        finish_reason: how the run ended.
        path: node ids, root first.
        steps: the thoughts on the path.
        candidates: every finished path, best first.
        metrics: its cost.
        seed, config: enough to repeat it.
        trace_path: the trace, if one was written.
        error: `ArborError.to_dict` of the error; then `finish_reason` is ``error``.
    """

    id: str
    task: str
    problem: str
    answer: str | None
    text: str
    score: float
    correct: bool | None
    finish_reason: Status | Literal["error"]
    path: tuple[int, ...]
    steps: tuple[Step, ...]
    candidates: tuple[Candidate, ...]
    metrics: Metrics
    seed: int
    config: Mapping[str, Any]
    trace_path: str | None = None
    error: Mapping[str, Any] | None = None
    schema: str = SOLUTION_SCHEMA

    def __str__(self) -> str:
        return self.answer or ""

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["path"] = list(self.path)
        data["steps"] = [dataclasses.asdict(step) for step in self.steps]
        data["candidates"] = [dataclasses.asdict(candidate) for candidate in self.candidates]
        data["metrics"] = self.metrics.to_dict()
        data["config"] = dict(self.config)
        data["error"] = None if self.error is None else dict(self.error)
        return {"schema": data.pop("schema"), **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The solution of a `to_dict`."""
        values = dict(data)
        values["path"] = tuple(values["path"])
        values["steps"] = tuple(Step(**step) for step in values["steps"])
        values["candidates"] = tuple(Candidate(**c) for c in values["candidates"])
        values["metrics"] = Metrics.from_dict(values["metrics"])
        return cls(**values)

    def replay(self) -> Replay:
        """The search, from its trace: every block, the memory plot, contradictions.

        Raises:
            UsageError: no trace was written.
            TraceError: the trace cannot be read.
        """
        return Replay.of(read_trace(self._trace()))

    def to_networkx(self) -> networkx.DiGraph:
        """The whole search as a directed graph, from its trace, with an edge to every child.

            solution = solver.solve("4 5 6 10", trace="run.arbor.jsonl")
            graph = solution.to_networkx()
            networkx.shortest_path(graph, 0, solution.path[-1])

        Without a trace, `ThoughtTree.to_networkx` gives the same graph of the live tree
        (``solver.engine.tree``) until the next search; docs/graph.md has examples.

        Returns:
            Nodes are block ids (the root is 0) with the attributes text, value in [0, 1], state
            (``open``, ``closed``, ``terminal`` or ``pruned``) and tokens.

        Raises:
            UsageError: no trace was written.
            TraceError: the trace cannot be read.
        """
        return search_graph(
            Vertex(
                block.id,
                block.parent,
                block.text,
                block.value,
                block.state.value,
                block.tokens,
            )
            for block in self.replay().blocks.values()
        )

    def show(self, file: IO[str] | None = None) -> None:
        """Print the answer's path; with a trace, the tree with the tokens each block holds.

        Args:
            file: instead of stdout.
        """
        from rich.console import Console

        from arbor.view.draw import draw
        from arbor.view.live import glyphs_of

        console = Console(file=file, highlight=False)
        console.print(f"{self.problem} -> {self.answer}", markup=False)
        if self.trace_path is not None:
            size = console.size
            console.print(draw(self.replay(), size.width, size.height, glyphs_of(console)))
            return
        for step in self.steps:
            console.print(f"#{step.node} v={step.value:.2f} {step.text.strip()}", markup=False)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the search as one HTML file that needs no server and no network.

        Raises:
            UsageError: no trace was written, or the file cannot be written.
            TraceError: the trace cannot be read.
        """
        from arbor.view import read_page_trace, write_page

        return write_page(path, read_page_trace(self._trace()))

    def _repr_html_(self) -> str | None:
        """The page in a notebook; without a trace, the notebook shows the plain text."""
        if self.trace_path is None:
            return None
        from arbor.view import html_page, notebook_frame, read_page_trace

        return notebook_frame(html_page(read_page_trace(self.trace_path)))

    def _trace(self) -> str:
        if self.trace_path is None:
            raise UsageError(
                "trace-missing", "this run wrote no trace.", "Solve with trace='run.arbor.jsonl'."
            )
        return self.trace_path


def failed_solution(
    task: str, problem: str | Problem, error: ArborError, seed: int, config: Mapping[str, Any]
) -> Solution:
    """The solution of a problem that could not be solved because of an error."""
    text = problem if isinstance(problem, str) else problem.text
    return Solution(
        id=content_id(task, text) if isinstance(problem, str) else problem.id,
        task=task,
        problem=text,
        answer=None,
        text="",
        score=0.0,
        correct=None,
        finish_reason="error",
        path=(),
        steps=(),
        candidates=(),
        metrics=Metrics(),
        seed=seed,
        config=config,
        error=error.to_dict(),
    )
