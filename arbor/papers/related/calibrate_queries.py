"""The means of a model's queries before their position encoding, which TriAttention reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arbor.engine.engine import Engine
from arbor.engine.observer import QueryWindow
from arbor.events import Event
from arbor.papers.related.query_means import LayerMeans, QueryMeans
from arbor.retention.scorers import Recency
from arbor.retention.token_kv import Observation
from arbor.solver import Solver
from arbor.tasks.base import Problem

WINDOW = 1024


@dataclass(frozen=True)
class EveryQuery(Recency):
    """Has the last queries of all layers kept, so that they can be read before others follow.

    Attributes:
        window: queries of a path from one event to the next, the end of a block at the latest; of
            more the last ones are read.
    """

    window: int = WINDOW

    @property
    def observation(self) -> Observation:
        """Queries of all layers, which can be moved to other positions."""
        return Observation(window=self.window, rotation=True, every=1)


class QuerySums:
    """Listens to searches, and sums the queries that their engine's window keeps, each once.

    Queries are those of the tokens of blocks, prompts included; none are those of questions, nor of
    tokens whose KV is computed again. Sums are float64.

    Args:
        engine: its policy's scorer is `EveryQuery`.

    Attributes:
        queries: summed in each layer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        runner = engine.runner
        self._rotations = runner.rotations(range(runner.layer_count))
        self._window: QueryWindow | None = None  # of the search in progress
        self._next = 0  # the age of its first query that was not read
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> of queries, of their lengths
        self.queries = 0

    def __call__(self, event: Event) -> None:
        """Read what was computed before an event."""
        self.read()

    def read(self) -> None:
        """Add the queries that the window has kept since the last time."""
        window = self._engine.query_window
        if window is None:
            return
        if window is not self._window:
            self._window, self._next = window, 0
        at = np.flatnonzero(window.age >= self._next)
        if not len(at):
            return
        self._next = int(window.age.max()) + 1
        self.queries += len(at)
        for layer in window.layers:
            rotation = self._rotations[layer]
            assert rotation is not None, "checked when the tree was opened"
            plain = rotation.undone(window.queries(layer, at), window.position[at]).cpu().double()
            lengths = torch.hypot(*rotation.pairs(plain)).sum(0)
            query = plain.sum(0)
            if layer in self._sums:
                before = self._sums[layer]
                query, lengths = before[0] + query, before[1] + lengths
            self._sums[layer] = query, lengths

    def means(self) -> QueryMeans:
        """The means so far, of at least one query."""
        layers = [
            LayerMeans(*((each / self.queries).float().numpy() for each in self._sums[layer]))
            for layer in sorted(self._sums)
        ]
        return QueryMeans(tuple(layers), self.queries)


def collect_queries(solver: Solver, problems: Iterable[Problem]) -> tuple[QueryMeans, int]:
    """Solve problems at full retention and average the queries of their paths.

    Source: the calibration of TriAttention (arXiv 2604.04921). Differs: its code runs one forward
    over plain text, where the model here has written what it reads after the prompts.

    Args:
        solver: a full budget, nothing shared between prompts, and a policy whose scorer is
            `EveryQuery`.
        problems: of a training split, at least one.

    Returns:
        the means of all layers, and how many problems were solved.

    Raises:
        ModelError: a layer's position encoding is not a known rotation.
    """
    assert isinstance(solver.policy.scorer, EveryQuery), "the solver's policy keeps no queries"
    sums = QuerySums(solver.engine)
    usual = solver.listeners
    solver.listeners = (*usual, sums)
    count = 0
    try:
        for problem in problems:
            solver.solve(problem)
            sums.read()
            count += 1
    finally:
        solver.listeners = usual
    return sums.means(), count
