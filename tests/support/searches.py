"""Searches: real ones with the built-in model, small and varied, and their traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arbor import Solver, StopSearch
from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import BudgetInfeasible
from arbor.events import Detail, Event, Listener
from arbor.trace import TraceWriter

TASKS = ("game24", "countdown", "reasoning", "recall", "chains")
CONTROLLERS = (
    "tot,width=3",
    "tot,strategy=dfs,width=3,max_visited=6",
    "beam,beam_size=3",
    "chain,samples=3",
    "dpts,width=3,parallel=2,max_visited=6",
)
# without the baseline that never evicts and the one that needs a recorded run
POLICIES = ("arborkv", "h2o", "kkt", "lru", "random", "reentry", "streaming", "tova", "uniform")
MODES: tuple[tuple[Mode, Rehydrate], ...] = (
    ("lossless", "selective"),
    ("lossless", "span"),
    ("lossy", "selective"),
    ("lossy", "span"),
    ("lossy", "off"),
)


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        share: its budget between the smallest workable one, 0, and full retention, 1.
        stop_at: the event at which a listener stops it; None: never.
    """

    task: str = "reasoning"
    controller: str = CONTROLLERS[0]
    policy: str = "reentry"
    kept: tuple[Mode, Rehydrate] = MODES[0]
    share: float = 0.0
    depth: int = 2
    step_tokens: int = 24
    seed: int = 0
    detail: Detail = "events"
    max_tokens: int | None = None
    stop_at: int | None = None


# a block is preempted before its boundary; a prompt is longer than the budget
PREEMPTED = Search()
IN_PIECES = Search(policy="lru", kept=("lossy", "off"), step_tokens=4)


class Model:
    """The built-in model, loaded once for every search."""

    def __init__(self) -> None:
        self._first = Solver()
        self._first.load()

    def close(self) -> None:
        self._first.close()

    def trace(
        self,
        search: Search,
        path: Path,
        text: Literal["full", "none"] = "full",
        listeners: Sequence[Listener] = (),
    ) -> Path:
        """Runs a search and writes its trace."""
        mode, rehydrate = search.kept
        solver = Solver(
            task=search.task,
            controller=search.controller,
            verifier="exact" if search.task in ("game24", "countdown") else "self",
            policy=search.policy,
            mode=mode,
            rehydrate=rehydrate,
            max_depth=search.depth,
            step_tokens=search.step_tokens,
            max_expansions=6,
            seed=search.seed,
            listeners=(Stop(search.stop_at), *listeners),
        )
        solver.checkpoint = self._first.checkpoint
        problem = "What is 2+3?" if search.task == "reasoning" else solver.task.example
        plan = solver.plan(problem, budget="full")
        room = plan.full_tokens - plan.enough_tokens
        # a question may be longer than planned; the trace shows the search up to there
        with suppress(BudgetInfeasible):
            solver.solve(
                problem,
                budget=f"{plan.enough_tokens + int(search.share * room)}tok",
                max_tokens=search.max_tokens,
                trace=TraceWriter(path, text=text),
                trace_level=search.detail,
            )
        return path


class Stop:
    """A listener that stops the search at an event."""

    def __init__(self, at: int | None) -> None:
        self.left = at

    def __call__(self, event: Event) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == -1:
                raise StopSearch


@contextmanager
def model() -> Iterator[Model]:
    """The built-in model, closed at the end."""
    loaded = Model()
    try:
        yield loaded
    finally:
        loaded.close()
