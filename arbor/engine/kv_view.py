"""KVView: shows scorers the keys, values and last queries of the tokens on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.observer import Observer, QueryWindow
from arbor.errors import ModelError
from arbor.kernels.int8 import decode, is_stored
from arbor.model.runner import ModelRunner
from arbor.retention.token_kv import (
    HeadKV,
    HeadTokens,
    KVSequence,
    Observation,
    PairRotation,
    TokenKV,
)
from arbor.tree import NO_SLOT, Node, ThoughtTree

PIECE = 1 << 24  # logits made at once


class KVView:
    """The keys, values and queries of the open trees, as a policy's scorer reads them.

    Args:
        observer: keeps the last queries of a tree; None: none are kept.

    Raises:
        ModelError: the policy wants to undo the position encoding of a layer that is of an unknown
            kind.
    """

    def __init__(
        self,
        state: ForestState,
        runner: ModelRunner,
        observation: Observation,
        observer: Observer | None,
    ) -> None:
        self._state = state
        self._runner = runner
        self._observer = observer
        self._layers = observation.layers_of(runner.layer_count)
        heads = observation.heads
        self._heads = None if heads is None else torch.tensor(heads, device=runner.device)
        self._rotations = _rotations(runner, self._layers) if observation.rotation else {}

    def token_kv(
        self, rows: NDArray[np.int64], offsets: NDArray[np.int64], leaves: Sequence[Node]
    ) -> TokenKV:
        """The column `Tokens.kv`.

        Args:
            rows: int64 [T], of the tokens' blocks.
            offsets: int64 [T], places in these.
            leaves: ends of the running paths.
        """
        orders = [self._order(tree) for tree in self._trees(rows)]
        sequences = [self._sequence(order, leaves) for order in orders]
        return TokenKV(tuple(sequences), self._places(orders, rows, offsets))

    def head_kv(
        self, rows: NDArray[np.int64], offsets: NDArray[np.int64], leaves: Sequence[Node]
    ) -> HeadKV:
        """The column `Tokens.kv` of what each KV head holds, [C * T]; see `token_kv`."""
        heads = self._state.memory.heads
        assert heads is not None, "KV heads hold the same tokens"
        orders = [self._order(tree, by_head=True) for tree in self._trees(rows)]
        sequences = [self._sequence(order, leaves) for order in orders]
        places = self._places(orders, rows, offsets)
        count = sum(len(order) for order in orders)
        found = np.broadcast_to(places, (len(heads), len(places)))
        if any(order.heads is not None for order in orders):
            rank = np.broadcast_to(np.arange(count), (len(heads), count)).copy()
            begin = 0
            for order in orders:
                end = begin + len(order)
                if order.heads is not None:
                    rank[:, begin:end] = begin + order.heads.rank
                begin = end
            found = rank[:, places]
        each = found + count * np.arange(len(heads))[:, None]
        return HeadKV(tuple(sequences), np.where(places < 0, -1, each).ravel())

    def _trees(self, rows: NDArray[np.int64]) -> list[ThoughtTree]:
        """The trees of blocks, in the order in which they were opened."""
        numbers = set(self._state.forest.numbers[np.unique(rows)].tolist())
        return [tree for tree in self._state.trees if tree.number in numbers]

    def _places(
        self, orders: Sequence[_Order], rows: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where tokens are in the trees' sequences, one after the other, int64 [T]; -1: nowhere."""
        forest, trash = self._state.forest, self._state.memory.pool.trash
        each, at = np.unique(rows, return_inverse=True)
        begins = np.array([node.span.begin for node in forest.nodes(each.tolist())], np.int64)
        slots = forest.spans.slot[begins[at] + offsets]
        numbers = forest.numbers[rows]
        found = np.full(len(rows), -1, np.int64)
        count = 0
        for order in orders:
            places = np.full(trash + 1, -1, np.int64)
            places[order.slots] = count + np.arange(len(order))
            mine = (numbers == order.tree.number) & (slots != NO_SLOT)
            found[mine] = places[slots[mine]]
            count += len(order)
        return found

    def _order(self, tree: ThoughtTree, *, by_head: bool = False) -> _Order:
        """The tokens of a tree that are on the device and written, in order of position."""
        memory = self._state.memory
        nodes = [node for node in tree.nodes if len(node.span)]
        lengths = np.array([len(node.span) for node in nodes], np.int64)
        nothing = np.empty(0, np.int64)
        slots = np.concatenate([nothing, *(node.span.slot for node in nodes)])
        here = slots != NO_SLOT
        pending = [node.span.slot[at] for node, at in memory.pending_tokens]
        if pending:
            here &= ~np.isin(slots, np.concatenate(pending))
        row = np.repeat(np.array([node.row for node in nodes], np.int64), lengths)
        starts = np.array([node.start for node in nodes], np.int64)
        place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        position = np.repeat(starts, lengths) + place
        at = np.flatnonzero(here)
        at = at[np.lexsort((row[at], position[at]))]
        slots, row, position = slots[at], row[at], position[at]
        heads = None
        if memory.heads is not None and by_head and memory.table.mixed[slots].any():
            held = memory.heads.positions(memory.table, slots).astype(np.int64)
            heads = _HeadOrder.of(held, slots, row)
        return _Order(tree, slots, row, position, heads)

    def _sequence(self, order: _Order, leaves: Sequence[Node]) -> KVSequence:
        """The keys, values and queries of a tree's tokens."""
        tree, heads = order.tree, order.heads
        leaves = [leaf for leaf in leaves if leaf.tree is tree]
        window = None if self._observer is None else self._observer.window_of(tree)
        asked = _Asked.of(window, tree)
        by_head = None
        if heads is None:
            index = torch.from_numpy(order.slots).to(self._runner.device)
        else:
            index = torch.from_numpy(heads.slots).to(self._runner.device)
            recent = asked.wrote(leaves, heads.row.ravel(), heads.position.ravel())
            by_head = partial(self._of_layer, heads.position, recent.reshape(heads.row.shape))
        return KVSequence(
            positions=order.position,
            layers=self._layers,
            keys=partial(self._keys, index),
            values=partial(self._values, index),
            logits=partial(self._logits, index, asked, order),
            whole=partial(self._logits, index, asked, order, whole=True),
            recent=asked.wrote(leaves, order.row, order.position),
            asked=asked.position,
            wrote=asked.places(order.row, order.position),
            queries=partial(self._queries, asked.window, asked.at),
            rotation=self._rotations.__getitem__,
            scaling=self._scaling,
            by_head=by_head,
        )

    def _mine(self, layer: int) -> slice:
        """The numbers of a layer's KV heads."""
        heads = self._state.memory.heads
        assert heads is not None, "KV heads hold the same tokens"
        first, end = np.searchsorted(heads.layer, [layer, layer + 1])
        return slice(int(first), int(end))

    def _of_layer(
        self, positions: NDArray[np.int64], recent: NDArray[np.bool_], layer: int
    ) -> HeadTokens:
        mine = self._mine(layer)
        return HeadTokens(positions[mine], recent[mine])

    def _scaling(self, layer: int) -> float:
        return self._runner.specs[layer].shape.scaling

    def _keys(self, index: Tensor, layer: int) -> Tensor:
        return self._chosen(self._rows(index, layer, values=False))

    def _values(self, index: Tensor, layer: int) -> Tensor:
        return self._chosen(self._rows(index, layer, values=True))

    def _rows(self, index: Tensor, layer: int, *, values: bool) -> Tensor:
        """K or V of a layer [n, H_kv, D] in slots [n], or of each KV head in its own [C, n]."""
        memory, shape = self._state.memory, self._runner.specs[layer].shape
        if index.dim() == 1:
            return self._runner.read(memory.pool, layer, index, values=values).float()
        pool, dim = memory.pool.k[layer], shape.head_dim_qk
        if values:
            pool, dim = memory.pool.v[layer], shape.head_dim_vo
        mine = index[self._mine(layer)].T
        rows = pool[mine, torch.arange(mine.shape[1], device=pool.device)]
        return (decode(rows, dim) if is_stored(pool) else rows).float()

    def _queries(self, window: QueryWindow | None, at: NDArray[np.int64], layer: int) -> Tensor:
        shape = self._runner.specs[layer].shape
        if window is None or not len(at):
            heads = shape.num_kv_heads if self._heads is None else len(self._heads)
            size = (0, heads * shape.group, shape.head_dim_qk)
            return torch.zeros(size, dtype=torch.float32, device=self._runner.device)
        queries = window.queries(layer, at)
        return self._chosen(queries.unflatten(1, (-1, shape.group))).flatten(1, 2)

    def _chosen(self, x: Tensor) -> Tensor:
        """The KV heads that the policy wants of [n, H_kv, ...]."""
        return x if self._heads is None else x[:, self._heads]

    def _logits(
        self,
        index: Tensor,
        asked: _Asked,
        order: _Order,
        layer: int,
        *,
        whole: bool = False,
    ) -> Iterator[Tensor]:
        """See `KVSequence.logits` and, with `whole`, `KVSequence.whole`."""
        shape = self._runner.specs[layer].shape
        keys = self._keys(index, layer)
        heads = keys.shape[1] * shape.group
        row, position = order.row[None], order.position[None]  # [1, n], or of each KV head
        if order.heads is not None:
            mine = self._mine(layer)
            row, position = order.heads.row[mine], order.heads.position[mine]
        step = max(1, PIECE // max(1, heads * len(order)))
        later = np.zeros(row.shape, np.int64)  # queries that count for each token already
        for end in range(len(asked.at), 0, -step):
            piece = slice(max(0, end - step), end)
            seen = asked.sees(piece, row.ravel(), position.ravel()).reshape(-1, *row.shape)
            if not whole:
                after = np.cumsum(seen[::-1], axis=0)[::-1] + later
                seen &= after <= asked.length
                later += seen.sum(0)
            if shape.window is not None:
                seen &= asked.position[piece, None, None] - position < shape.window
            queries = self._queries(asked.window, asked.at[piece], layer).view(
                len(seen), -1, shape.group, keys.shape[2]
            )
            logits = torch.einsum("whgd,nhd->whgn", queries, keys).flatten(1, 2) * shape.scaling
            if shape.softcap is not None:
                logits = shape.softcap * torch.tanh(logits / shape.softcap)
            unseen = torch.from_numpy(~seen).to(logits.device)
            if len(row) > 1:
                unseen = unseen.repeat_interleave(shape.group, 1)
            yield logits.masked_fill(unseen, -torch.inf)


@dataclass(frozen=True, eq=False)
class _HeadOrder:
    """What each KV head holds, in order of position; C heads, n slots.

    Attributes:
        rank: int64 [C, n], the place that a head's token in a slot has in its order.
        slots: int64 [C, n], in this order.
        row: int64 [C, n], of the tokens' blocks.
        position: int64 [C, n], of the tokens.
    """

    rank: NDArray[np.int64]
    slots: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def of(
        cls, held: NDArray[np.int64], slots: NDArray[np.int32], row: NDArray[np.int64]
    ) -> _HeadOrder:
        """The order of what heads hold.

        Args:
            held: int64 [C, n], positions of what they hold in each slot.
            slots: int32 [n].
            row: int64 [n], of the blocks.
        """
        at = np.argsort(held * (int(row.max()) + 1) + row, axis=1)
        rank = np.empty_like(at)
        np.put_along_axis(rank, at, np.arange(len(slots))[None], 1)
        position = np.take_along_axis(held, at, 1)
        return cls(rank, slots.astype(np.int64)[at], row[at], position)


@dataclass(frozen=True, eq=False)
class _Order:
    """The tokens of a tree on the device in order of position, n in all.

    Attributes:
        tree: whose.
        slots: int32 [n].
        row: int64 [n], of the tokens' blocks.
        position: int64 [n].
        heads: where KV heads hold other tokens than the slots' own; else None.
    """

    tree: ThoughtTree
    slots: NDArray[np.int32]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    heads: _HeadOrder | None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, eq=False)
class _Asked:
    """The kept queries of a tree that are among the last ones of some token.

    Attributes:
        window: where they are kept; None: none are.
        length: queries that count for each token.
        at: int64 [w], their places in the window, the oldest first.
        row: int64 [w], of the blocks of their tokens.
        position: int64 [w], of their tokens.
        paths: these blocks, by row.
    """

    window: QueryWindow | None
    length: int
    at: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    paths: Mapping[int, Node]

    @classmethod
    def of(cls, window: QueryWindow | None, tree: ThoughtTree) -> _Asked:
        """The queries of a tree."""
        if window is None:
            none = np.empty(0, np.int64)
            return cls(None, 0, none, none, none, {})
        rows = {node.row: node for node in tree.nodes}
        at = np.flatnonzero(np.isin(window.row, list(rows)))
        at = at[np.argsort(window.age[at])]
        owners = {row: rows[row] for row in np.unique(window.row[at]).tolist()}
        # a query's own token is the one for which the fewest later queries count
        used = np.zeros(len(at), np.bool_)
        for row, node in owners.items():
            below = [other for other, leaf in owners.items() if node in leaf.path]
            last = np.flatnonzero(np.isin(window.row[at], below))[-window.length :]
            used[last[window.row[at[last]] == row]] = True
        at = at[used]
        return cls(window, window.length, at, window.row[at], window.position[at], owners)

    def sees(
        self, piece: slice, row: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which tokens some of the queries see, bool [w', n].

        Args:
            piece: of the queries.
            row: int64 [n], of the tokens' blocks.
            position: int64 [n], of the tokens.
        """
        rows = self.row[piece]
        seen = np.zeros((len(rows), len(row)), np.bool_)
        for owner in np.unique(rows).tolist():
            seen[rows == owner] = np.isin(row, [node.row for node in self.paths[owner].path])
        seen &= position <= self.position[piece, None]
        return seen

    def wrote(
        self, leaves: Sequence[Node], row: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """The tokens that the last queries of running paths were computed for, bool [n]."""
        last = np.zeros(len(self.at), np.bool_)
        for leaf in leaves:
            mine = np.isin(self.row, [node.row for node in leaf.path])
            last[np.flatnonzero(mine)[-self.length :]] = True
        width = int(max(position.max(initial=0), self.position.max(initial=0))) + 1
        return np.isin(row * width + position, self.row[last] * width + self.position[last])

    def places(self, row: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each query's own token is among some, int64 [w]; -1: nowhere.

        Args:
            row: int64 [n], of the tokens' blocks.
            position: int64 [n], of the tokens.
        """
        width = int(max(position.max(initial=0), self.position.max(initial=0))) + 1
        held, own = row * width + position, self.row * width + self.position
        by_token = np.argsort(held)
        at = np.searchsorted(held, own, sorter=by_token)
        places = np.append(by_token, -1)[at]
        found: NDArray[np.int64] = np.where(np.append(held, -1)[places] == own, places, -1)
        return found


def _rotations(runner: ModelRunner, layers: tuple[int, ...]) -> dict[int, PairRotation]:
    """How layers encode positions.

    Raises:
        ModelError: a layer's encoding is not a known rotation.
    """
    known: dict[int, PairRotation] = {}
    for layer, rotation in runner.rotations(layers).items():
        if rotation is None:
            raise ModelError(
                "arch-unsupported",
                f"model_type '{runner.config.model_type}': the position encoding of layer {layer} "
                "is not a rotation that the policy could undo.",
                "Use a policy that reads no queries before their encoding, such as 'rkv'.",
            )
        known[layer] = rotation
    return known
