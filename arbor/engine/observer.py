"""Observer: collects what a policy wants observed of forwards, and shows it when it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.query_window import QueryWindow
from arbor.errors import ModelError
from arbor.kernels.int8 import read_slots
from arbor.model.plan import ForwardPlan, visibility
from arbor.model.runner import ForwardResult, ModelRunner
from arbor.retention.observation import Observation
from arbor.retention.token_kv import KVSequence, PairRotation, TokenKV
from arbor.tree import NO_SLOT, ThoughtTree


class Observer:
    """What one engine observes for its policy.

    Args:
        state: of the open trees.
        runner: the model.
        observation: what the policy wants.
    """

    def __init__(self, state: ForestState, runner: ModelRunner, observation: Observation) -> None:
        self._state = state
        self._runner = runner
        self._wanted = observation
        self._layers = observation.layers_of(runner.layer_count)
        heads = observation.heads
        self._heads = None if heads is None else torch.tensor(heads, dtype=torch.int64)
        self._window = QueryWindow(observation.window, self._layers) if observation.window else None
        self._rotations = self._found_rotations() if observation.rotation else {}
        self._rows = np.empty(0, np.int64)  # of the forward in progress, whose queries are kept

    def _found_rotations(self) -> dict[int, PairRotation | None]:
        """How the observed layers encode positions.

        Raises:
            ModelError: a layer's encoding is not a known rotation.
        """
        runner = self._runner
        rotations = runner.rotations(self._layers)
        unknown = [layer for layer, rotation in rotations.items() if rotation is None]
        if unknown:
            raise ModelError(
                "arch-unsupported",
                f"model_type '{runner.config.model_type}': the position encoding of layer "
                f"{unknown[0]} is not a rotation that the policy could undo.",
                "Use a policy that reads no queries before their encoding, such as 'rkv'.",
            )
        return rotations

    def asked(self, plan: ForwardPlan) -> dict[str, Any]:
        """What a forward is asked for, as arguments of `ModelRunner.forward`."""
        if not self._wanted.anything or bool(plan.again.all()):
            return {}
        asked: dict[str, Any] = {}
        if self._wanted.attention:
            asked["mass"] = dict.fromkeys(self._layers, self._heads)
        if self._window is not None:
            table, memory = plan.table, self._state.memory
            new = ~table.again
            slots = np.where(table.write == memory.pool.trash, 0, table.write)
            new &= (table.write != memory.pool.trash) & (memory.table.owner[slots] >= 0)
            self._rows = self._window.chosen(table.counts, new)
            if len(self._rows):
                rows = torch.from_numpy(self._rows)
                asked["queries"] = dict.fromkeys(self._layers, rows)
        return asked

    def take(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """Add what a forward that was asked gave."""
        if result.mass is not None:  # a replay knows of no attention
            self._add_attention(plan, result.mass)
        if self._window is not None and result.queries:
            slots = plan.table.write[self._rows]
            where = self._state.memory.table
            rows, positions = where.owner[slots], where.position[slots]
            self._window.add(
                rows.astype(np.int64),
                positions.astype(np.int64),
                result.queries,
                len(plan.table.counts),
            )

    def _add_attention(self, plan: ForwardPlan, mass: Tensor) -> None:
        shapes = [self._runner.specs[layer].shape for layer in self._layers]
        windows = [shape.window for shape in shapes if shape.window is not None]
        window = max(windows) if len(windows) == len(shapes) else None
        slots, queries = visibility(plan, self._state.memory.pool.trash, window)
        if self._heads is None:
            heads = sum(shape.num_qo_heads for shape in shapes)
        else:
            heads = sum(shape.group * len(self._heads) for shape in shapes)
        received = mass[torch.from_numpy(slots).to(mass.device)] / heads
        self._state.observe(slots, received.cpu().numpy(), queries)

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the blocks of a tree that was dropped; other blocks may have their rows later."""
        if self._window is not None:
            self._window.forget(rows)

    # What scorers see

    def token_kv(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> TokenKV:
        """Where tokens are in the sequences of the open trees.

        Args:
            rows: int64 [T], of their blocks.
            offsets: int64 [T], places in these.
        """
        memory, forest = self._state.memory, self._state.forest
        places = np.full(memory.pool.trash + 1, -1, np.int64)
        sequences, count = [], 0
        numbers = forest.numbers_of(rows)
        slots = np.full(len(rows), NO_SLOT, np.int64)
        begins = {row: forest[row].span.begin for row in np.unique(rows).tolist()}
        if begins:
            known = np.zeros(max(begins) + 1, np.int64)
            known[list(begins)] = list(begins.values())
            slots = forest.spans.slot[known[rows] + offsets].astype(np.int64)
        found = np.full(len(rows), -1, np.int64)
        for tree in self._state.trees:
            sequence, used = self._sequence(tree)
            places[:] = -1
            places[used] = count + np.arange(len(used))
            mine = (numbers == tree.number) & (slots != NO_SLOT)
            found[mine] = places[slots[mine]]
            sequences.append(sequence)
            count += len(used)
        return TokenKV(tuple(sequences), found)

    def _sequence(self, tree: ThoughtTree) -> tuple[KVSequence, NDArray[np.int64]]:
        """The tokens of a tree that are on the device and written, and their slots, int64 [n]."""
        spans = self._state.forest.spans
        nodes = [node for node in tree.nodes if len(node.span)]
        lengths = np.array([len(node.span) for node in nodes], np.int64)
        begins = np.array([node.span.begin for node in nodes], np.int64)
        place = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
        offset = np.arange(len(place)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots = spans.slot[place + np.arange(len(place))].astype(np.int64)
        here = slots != NO_SLOT
        for node, offsets in self._state.memory.pending_tokens:
            here &= ~np.isin(slots, node.span.slot[offsets])
        row = np.repeat(np.array([node.row for node in nodes], np.int64), lengths)
        position = np.repeat(np.array([node.start for node in nodes], np.int64), lengths) + offset
        at = np.flatnonzero(here)
        at = at[np.lexsort((row[at], position[at]))]
        slots, row, position = slots[at], row[at], position[at]
        asked, seen = self._seen(tree, row, position)
        mask = torch.from_numpy(seen)
        recent = np.zeros(len(at), np.bool_)
        if self._window is not None and len(asked):
            big = int(max(position.max(initial=0), self._window.position[asked].max())) + 1
            own = self._window.row[asked] * big + self._window.position[asked]
            recent = np.isin(row * big + position, own)
        index = torch.from_numpy(slots).to(self._state.memory.pool.device)
        sequence = KVSequence(
            positions=position,
            layers=self._layers,
            keys=partial(self._keys, index),
            values=partial(self._values, index),
            logits=partial(self._logits, index, asked, mask, position),
            recent=recent,
            asked=np.empty(0, np.int64) if self._window is None else self._window.position[asked],
            queries=partial(self._queries, asked),
            rotation=self._rotation,
            scaling=lambda layer: self._runner.specs[layer].shape.scaling,
        )
        return sequence, slots

    def _seen(
        self, tree: ThoughtTree, row: NDArray[np.int64], position: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The kept queries of a tree, int64 [w], the oldest first, and bool [w, n], which tokens
        count them: the last ones that see it."""
        window = self._window
        if window is None:
            return np.empty(0, np.int64), np.zeros((0, len(row)), np.bool_)
        rows = {node.row: node for node in tree.nodes}
        asked = np.flatnonzero(np.isin(window.row, list(rows)))
        asked = asked[np.argsort(window.age[asked])]
        seen = np.zeros((len(asked), len(row)), np.bool_)
        for owner in np.unique(window.row[asked]).tolist():
            on_path = np.isin(row, [node.row for node in rows[owner].path])
            mine = np.flatnonzero(window.row[asked] == owner)
            seen[mine] = on_path & (position <= window.position[asked[mine], None])
        later = np.cumsum(seen[::-1], axis=0)[::-1]
        seen &= later <= window.length
        used = np.flatnonzero(seen.any(1))
        return asked[used], seen[used]

    def _keys(self, index: Tensor, layer: int) -> Tensor:
        shape = self._runner.specs[layer].shape
        pool = self._state.memory.pool.k[layer]
        return self._of_heads(read_slots(pool, index, shape.head_dim_qk).float())

    def _values(self, index: Tensor, layer: int) -> Tensor:
        shape = self._runner.specs[layer].shape
        pool = self._state.memory.pool.v[layer]
        return self._of_heads(read_slots(pool, index, shape.head_dim_vo).float())

    def _of_heads(self, x: Tensor) -> Tensor:
        return x if self._heads is None else x[:, self._heads.to(x.device)]

    def _queries(self, asked: NDArray[np.int64], layer: int) -> Tensor:
        shape = self._runner.specs[layer].shape
        heads = shape.num_kv_heads if self._heads is None else len(self._heads)
        if self._window is None or not len(asked):
            pool = self._state.memory.pool
            size = (0, heads * shape.group, shape.head_dim_qk)
            return torch.zeros(size, device=pool.device)
        q = self._window.queries(layer, asked).unflatten(1, (-1, shape.group))
        return self._of_heads(q).flatten(1, 2)

    def _rotation(self, layer: int) -> PairRotation:
        rotation = self._rotations[layer]
        assert rotation is not None, "refused before"
        return rotation

    def _logits(
        self,
        index: Tensor,
        asked: NDArray[np.int64],
        seen: Tensor,
        position: NDArray[np.int64],
        layer: int,
    ) -> Tensor:
        """See `KVSequence.logits`."""
        shape = self._runner.specs[layer].shape
        k = self._keys(index, layer)
        if self._window is None or not len(asked):
            return k.new_zeros(0, k.shape[1] * shape.group, len(position))
        q = self._queries(asked, layer).unflatten(1, (-1, shape.group))
        logits = torch.einsum("whgd,nhd->whgn", q, k).flatten(1, 2) * shape.scaling
        if shape.softcap is not None:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        if shape.window is not None:
            distance = self._window.position[asked, None] - position
            seen = seen & torch.from_numpy(distance < shape.window)
        return logits.masked_fill(~seen.to(logits.device)[:, None], -torch.inf)
