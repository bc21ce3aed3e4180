"""Observer: collects what a policy wants observed of forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.heads.sets import HeadStatistics
from arbor.model.plan import ForwardPlan, visibility
from arbor.model.runner import ForwardResult, ModelRunner
from arbor.retention.token_kv import Observation
from arbor.tree import ThoughtTree


def last_of_each(
    counts: NDArray[np.int64], new: NDArray[np.bool_], length: int
) -> NDArray[np.int64]:
    """The rows of a forward whose queries are kept: the last of each segment, int64.

    Args:
        counts: int64 [n], rows of each segment.
        new: bool [T], rows that count.
        length: of each segment at most.
    """
    ends = np.cumsum(counts)
    left = np.repeat(ends, counts) - np.arange(len(new))
    return np.flatnonzero(new & (left <= length))


class QueryWindow:
    """The last queries of each running path of a tree, in a ring that holds `length` forwards of
    all its rows.

    Args:
        length: queries of each path, >= 1.
        layers: whose queries.

    Attributes:
        row: int64 [c], of the block that a query's token belongs to; -1: empty.
        position: int64 [c], of that token on its path.
        age: int64 [c], increasing with the time of writing.
    """

    def __init__(self, length: int, layers: Sequence[int]) -> None:
        self.length = length
        self.layers = tuple(layers)
        self.row = np.empty(0, np.int64)
        self.position = np.empty(0, np.int64)
        self.age = np.empty(0, np.int64)
        self._queries: dict[int, Tensor] = {}
        self._next = 0
        self._written = 0

    def add(
        self,
        rows: NDArray[np.integer],
        positions: NDArray[np.integer],
        queries: Mapping[int, Tensor],
        paths: int,
    ) -> None:
        """Keep queries of a forward.

        Args:
            rows: int [m], of the blocks of their tokens.
            positions: int [m], of these tokens.
            queries: layer -> [m, H_q, D].
            paths: segments that they are of: the ring grows to hold `length` queries of each.
        """
        self._reserve(self.length * paths, queries)
        capacity = len(self.row)
        at = (self._next + np.arange(len(rows))) % capacity
        self.row[at], self.position[at] = rows, positions
        self.age[at] = self._written + np.arange(len(rows))
        index = torch.from_numpy(at)
        for layer, ring in self._queries.items():
            ring[index.to(ring.device)] = queries[layer]
        self._next = (self._next + len(rows)) % capacity
        self._written += len(rows)

    def queries(self, layer: int, at: NDArray[np.int64]) -> Tensor:
        """The queries of some places, [m, H_q, D] float32."""
        ring = self._queries[layer]
        return ring[torch.from_numpy(at).to(ring.device)].float()

    def _reserve(self, capacity: int, like: Mapping[int, Tensor]) -> None:
        if capacity <= len(self.row):
            return
        kept = np.argsort(self.age)[len(self.row) - np.count_nonzero(self.row >= 0) :]
        kept = kept[self.row[kept] >= 0]
        row, position, age = self.row[kept], self.position[kept], self.age[kept]
        self.row = np.full(capacity, -1, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.age = np.full(capacity, -1, np.int64)
        count = self._next = len(kept)
        self.row[:count], self.position[:count], self.age[:count] = row, position, age
        for layer in self.layers:
            ring = like[layer].new_zeros((capacity, *like[layer].shape[1:]))
            if count:
                old = self._queries[layer]
                ring[:count] = old[torch.from_numpy(kept).to(old.device)]
            self._queries[layer] = ring


class Observer:
    """What one engine observes for its policy, which wants something.

    Args:
        by_head: takes what each KV head observes; None: only sums over the heads are wanted.

    Attributes:
        layers: those observed.
    """

    def __init__(
        self,
        state: ForestState,
        runner: ModelRunner,
        observation: Observation,
        by_head: HeadStatistics | None = None,
    ) -> None:
        self._by_head = by_head
        self._state = state
        self._runner = runner
        self._wanted = observation
        self.layers = observation.layers_of(runner.layer_count)
        heads = observation.heads
        self._heads = None if heads is None else torch.tensor(heads, device=runner.device)
        self._windows: dict[ThoughtTree, QueryWindow] = {}
        self._rows = np.empty(0, np.int64)  # of the forward in progress, whose queries are kept

    def asked(self, plan: ForwardPlan) -> dict[str, Any]:
        """What a forward is asked for, as arguments of `ModelRunner.forward`."""
        if bool(plan.again.all()):
            return {}
        asked: dict[str, Any] = {}
        if self._wanted.attention:
            asked["mass"] = dict.fromkeys(self.layers, self._heads)
            if self._by_head is not None:
                asked["by_head"] = True
        if self._wanted.window:
            memory, write = self._state.memory, plan.table.write
            kept = write != memory.pool.trash
            new = ~plan.table.again & kept & (memory.table.owner[np.where(kept, write, 0)] >= 0)
            self._rows = last_of_each(plan.table.counts, new, self._wanted.window)
            if len(self._rows):
                asked["queries"] = dict.fromkeys(self.layers, torch.from_numpy(self._rows))
        return asked

    def take(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """Add what a forward that was asked gave; a replay gives nothing."""
        if result.mass is not None:
            self._add_attention(plan, result.mass)
        if self._wanted.window and result.queries:
            self._add_queries(plan, result.queries)

    def window_of(self, tree: ThoughtTree) -> QueryWindow | None:
        """The last queries of a tree's running paths; None if the policy wants none."""
        if not self._wanted.window:
            return None
        if tree not in self._windows:
            self._windows[tree] = QueryWindow(self._wanted.window, self.layers)
        return self._windows[tree]

    def _add_queries(self, plan: ForwardPlan, queries: Mapping[int, Tensor]) -> None:
        """Keep queries of a forward, those of each tree in its own window: how many it keeps of a
        path does not depend on others."""
        slots, where = plan.table.write[self._rows], self._state.memory.table
        rows, positions = where.owner[slots], where.position[slots]
        segments = np.repeat(np.arange(len(plan.table.counts)), plan.table.counts)[self._rows]
        numbers = self._state.forest.numbers[rows]
        alone = len(self._state.trees) == 1
        for tree in self._state.trees:
            mine = np.flatnonzero(numbers == tree.number)
            window = self.window_of(tree)
            if window is None or not len(mine):
                continue
            own = queries
            if not alone:
                index = torch.from_numpy(mine)
                own = {layer: each[index.to(each.device)] for layer, each in queries.items()}
            paths = len(np.unique(segments[mine]))
            window.add(rows[mine], positions[mine], own, paths=paths)

    def _add_attention(self, plan: ForwardPlan, mass: Tensor) -> None:
        shapes = [self._runner.specs[layer].shape for layer in self.layers]
        windows = [shape.window for shape in shapes if shape.window is not None]
        window = max(windows) if len(windows) == len(shapes) else None
        slots, queries = visibility(plan, self._state.memory.pool.trash, window)
        if self._heads is None:
            heads = sum(shape.num_qo_heads for shape in shapes)
        else:
            heads = sum(shape.group * len(self._heads) for shape in shapes)
        if self._by_head is not None:
            group = [shape.group for shape in shapes for _ in range(shape.num_kv_heads)]
            each = mass / torch.tensor(group, device=mass.device)[:, None]
            self._by_head.observe(slots, each, queries)
            mass = mass.sum(0)
        received = mass[torch.from_numpy(slots).to(mass.device)] / heads
        self._state.observe(slots, received.cpu().numpy(), queries)

    def forget(self, tree: ThoughtTree) -> None:
        """Remove the queries of a tree that was dropped."""
        self._windows.pop(tree, None)
