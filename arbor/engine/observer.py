"""Observer: collects what a policy wants observed of forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.head_statistics import HeadStatistics
from arbor.engine.query_window import QueryWindow
from arbor.model.plan import ForwardPlan, visibility
from arbor.model.runner import ForwardResult, ModelRunner
from arbor.retention.observation import Observation


class Observer:
    """What one engine observes for its policy.

    Args:
        state: of the open trees.
        runner: the model.
        observation: what the policy wants.
        by_head: takes what each KV head observes; None: only sums over the heads are wanted.

    Attributes:
        layers: those observed.
        window: the last queries of the running paths; None if the policy wants none.
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
        self.window = QueryWindow(observation.window, self.layers) if observation.window else None
        self._rows = np.empty(0, np.int64)  # of the forward in progress, whose queries are kept

    def asked(self, plan: ForwardPlan) -> dict[str, Any]:
        """What a forward is asked for, as arguments of `ModelRunner.forward`."""
        if not self._wanted.anything or bool(plan.again.all()):
            return {}
        asked: dict[str, Any] = {}
        if self._wanted.attention:
            asked["mass"] = dict.fromkeys(self.layers, self._heads)
            if self._by_head is not None:
                asked["by_head"] = True
        if self.window is not None:
            memory, write = self._state.memory, plan.table.write
            kept = write != memory.pool.trash
            new = ~plan.table.again & kept & (memory.table.owner[np.where(kept, write, 0)] >= 0)
            self._rows = self.window.chosen(plan.table.counts, new)
            if len(self._rows):
                asked["queries"] = dict.fromkeys(self.layers, torch.from_numpy(self._rows))
        return asked

    def take(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """Add what a forward that was asked gave; a replay gives nothing."""
        if result.mass is not None:
            self._add_attention(plan, result.mass)
        if self.window is not None and result.queries:
            slots, where = plan.table.write[self._rows], self._state.memory.table
            rows, positions = where.owner[slots], where.position[slots]
            self.window.add(rows, positions, result.queries, paths=len(plan.table.counts))

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

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the blocks of a tree that was dropped; other blocks may have their rows later."""
        if self.window is not None:
            self.window.forget(rows)
