"""Streaming: attention over KV on the device and in host memory, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    apply_sinks,
)
from arbor.kernels.invariant import row_invariant
from arbor.memory.staging_buffer import StagingBuffer
from arbor.model.plan import SegmentTable, select_rows
from arbor.model.sharing import Slots, level_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """One call of the backend: some rows of a batch over keys of one stretch of positions.

    Attributes:
        rows: int64 [r], the rows, increasing.
        layout: of these rows, over slots of the pool.
        records: int32 [n], to be in the first n slots of the staging buffer while it runs.
    """

    rows: Tensor
    layout: CascadeLayout
    records: NDArray[np.int32]


class _Request(NamedTuple):
    """Neighbouring rows of a batch, from `first` to `end`, and the addresses of their keys."""

    first: int
    end: int
    keys: Slots


def chunks_of(table: SegmentTable, staging: StagingBuffer, window: int | None) -> list[Chunk]:
    """The calls that compute a batch's attention, in the order in which a row's results are merged.

    A row's keys are cut at fixed positions, multiples of the buffer's size, wherever they lie. A
    stretch thus fits into the buffer, and what is summed with what does not depend on which keys
    are on the device.

    Args:
        table: of the batch; contexts name slots, or records by their addresses.
        staging: the buffer.
        window: positions a row looks back, itself included; None: all.
    """
    size = staging.tokens
    past: dict[int, list[_Request]] = {}  # by number of the stretch; rows that read all of it
    own: dict[int, list[_Request]] = {}  # rows whose own keys it has: causal from the end
    for first_row, position, keys, places in _segments(table, window):
        end_row = first_row + int(places[-1]) + 1 - position
        cuts = np.flatnonzero(np.diff(places // size)) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(places)]):
            number = int(places[begin]) // size
            part = keys[begin:end]
            # the segment's rows from these on are at positions in the stretch, and beyond it
            within = first_row + max(0, number * size - position)
            beyond = first_row + max(0, (number + 1) * size - position)
            if end_row > beyond:
                past.setdefault(number, []).append(_Request(beyond, end_row, part))
            if min(beyond, end_row) > within:
                mine = _Request(within, min(beyond, end_row), part)
                own.setdefault(number, []).append(mine)
    chunks = []
    for number in sorted(past.keys() | own.keys()):
        for requests, causal in ((past.get(number), False), (own.get(number), True)):
            for group in _groups(requests or (), staging, merge=not causal):
                chunks.append(_chunk(group, staging, causal=causal))
    return chunks


def _segments(
    table: SegmentTable, window: int | None
) -> Iterator[tuple[int, int, Slots, NDArray[np.int64]]]:
    """Each segment's first row, the position of that, the addresses of the keys up to its last row
    in order of position, and their positions; row by row where a window cuts their beginning."""
    row = 0
    columns = zip(
        table.contexts, table.tails, table.counts.tolist(), table.ends.tolist(), strict=True
    )
    for context, tail, count, end in columns:
        keys = np.concatenate([*(piece.slots for piece in context), tail])
        tail_at = np.arange(end - len(tail), end)
        places = np.concatenate([*(piece.positions for piece in context), tail_at])
        if window is None:
            yield row, end - count, keys, places
        else:
            for position in range(end - count, end):
                seen = slice(*np.searchsorted(places, (position - window + 1, position + 1)))
                yield row + position - end + count, position, keys[seen], places[seen]
        row += count


def _groups(
    requests: Sequence[_Request], staging: StagingBuffer, *, merge: bool
) -> Iterator[list[_Request]]:
    """Requests whose records fit into the buffer together.

    Args:
        requests: in order of their rows; each fits alone.
        staging: the buffer.
        merge: neighbours with the same keys become one request.
    """
    group: list[_Request] = []
    records: set[int] = set()
    for each in requests:
        last = group[-1] if group else None
        same = last is not None and np.array_equal(last.keys, each.keys)
        if merge and same and last is not None and last.end == each.first:
            group[-1] = _Request(last.first, each.end, each.keys)
            continue
        mine = set(each.keys[each.keys >= staging.records_from].tolist())
        if group and len(records | mine) > staging.tokens:
            yield group
            group, records = [], set()
        group.append(each)
        records |= mine
    if group:
        yield group


def _chunk(requests: Sequence[_Request], staging: StagingBuffer, *, causal: bool) -> Chunk:
    """One call for these requests; what they read in host memory is in the buffer then."""
    keys = np.concatenate([each.keys for each in requests])
    stored = keys >= staging.records_from
    addresses, places = np.unique(keys[stored], return_inverse=True)
    slots = keys.copy()
    slots[stored] = staging.slots[places]
    ends = np.cumsum([len(each.keys) for each in requests])[:-1]
    counts = [each.end - each.first for each in requests]
    rows = np.concatenate([np.arange(each.first, each.end) for each in requests])
    level = level_of(counts, np.split(slots, ends), causal=causal)
    return Chunk(
        rows=torch.from_numpy(rows),
        layout=CascadeLayout(rows=len(rows), levels=(level,)),
        records=(addresses - staging.records_from).astype(np.int32),
    )


class StreamedAttention:
    """The attention of one batch over slots of the pool and records in host memory.

    A row's result is merged from those of its chunks by their log-sum-exp, in order of position, in
    at least float32. With a backend whose rows do not depend on the batch its bits depend on its
    query, its keys and the size of the buffer alone, not on where the keys lie.

    Args:
        table: of the batch.
        staging: the buffer.
        backend: computes each chunk.
    """

    def __init__(
        self, table: SegmentTable, staging: StagingBuffer, backend: AttentionBackend
    ) -> None:
        self._table = table
        self._staging = staging
        self._backend = backend
        self._alive: Tensor | None = None
        self._chunks: dict[int | None, list[Chunk]] = {}  # by window
        self._plans: dict[AttentionShape, list[Any]] = {}

    def keep_rows(self, alive: Tensor) -> None:
        """Only these rows (int64 [T'], increasing) are left."""
        self._alive = alive
        self._chunks.clear()
        self._plans.clear()

    def run(
        self,
        layer: int,
        shape: AttentionShape,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer; see `AttentionBackend.run`.

        Args:
            layer: layer index.
            shape: of the layer.
            q: [T, H_q, D_k].
            pools: K and V of the layer, the rows' own K/V written.
            sinks: [H_q] or None.
        """
        parts = []
        for chunk, plan in self._calls(shape):
            self._staging.load(layer, chunk.records)
            parts.append(self._backend.run(plan, _of(q, chunk), *pools))
        out, lse = _merged(self._chunks[shape.window], parts, q)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out.to(q.dtype), lse.float()

    def mass(
        self,
        layer: int,
        shape: AttentionShape,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None,
    ) -> Tensor:
        """Attention mass of each address in a layer, float32 [addresses]; see
        `AttentionBackend.mass`. K in host memory is copied once more.

        Args:
            layer: layer index.
            shape, q, lse, heads: of the layer, `lse` from `run`.
            k_pool: K of the layer.
        """
        staging = self._staging
        mass = torch.zeros(staging.addresses, dtype=torch.float32, device=k_pool.device)
        staged = torch.from_numpy(staging.slots.astype(np.int64))
        for chunk, plan in self._calls(shape):
            staging.load(layer, chunk.records, values=False)
            received = self._backend.mass(plan, _of(q, chunk), k_pool, _of(lse, chunk), heads)
            count = len(chunk.records)
            if count:
                read = torch.from_numpy(chunk.records.astype(np.int64)) + staging.records_from
                mass[read] += received[staged[:count]]
                received[staged] = 0
            mass[: len(received)] += received
        return mass

    def _calls(self, shape: AttentionShape) -> Iterator[tuple[Chunk, Any]]:
        """The chunks of a shape and the backend's plan of each."""
        window = shape.window
        if window not in self._chunks:
            chunks = chunks_of(self._table, self._staging, window)
            self._chunks[window] = chunks if self._alive is None else _left(chunks, self._alive)
        chunks = self._chunks[window]
        if shape not in self._plans:
            exact = replace(shape, window=None)  # the lists hold what a row sees, and no more
            self._plans[shape] = [self._backend.plan(each.layout, exact) for each in chunks]
        return zip(chunks, self._plans[shape], strict=True)


def _left(chunks: Sequence[Chunk], alive: Tensor) -> list[Chunk]:
    """The chunks of the rows that are left, by their numbers among these."""
    result = []
    for chunk in chunks:
        mine = torch.isin(chunk.rows, alive).nonzero().squeeze(1)
        if len(mine):
            rows = torch.searchsorted(alive, chunk.rows[mine])
            result.append(Chunk(rows, select_rows(chunk.layout, mine, None), chunk.records))
    return result


def _of(x: Tensor, chunk: Chunk) -> Tensor:
    """The chunk's rows of [T, ...]."""
    return x if len(chunk.rows) == len(x) else x[chunk.rows.to(x.device)]


def _merged(
    chunks: Sequence[Chunk], parts: Sequence[tuple[Tensor, Tensor]], q: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention of all rows, in at least float32, from its parts: a row's are added in order.

    Args:
        chunks: which rows each part has; every row has one at least.
        parts: out [r, H, D] and lse [r, H] of each chunk.
        q: [T, H, D_k].
    """
    work = torch.promote_types(q.dtype, torch.float32)
    rows = [None if len(each.rows) == len(q) else each.rows.to(q.device) for each in chunks]
    lses = [lse.to(work) for _, lse in parts]
    top = q.new_full(q.shape[:2], -math.inf, dtype=work)
    for mine, lse in zip(rows, lses, strict=True):
        if mine is None:
            torch.maximum(top, lse, out=top)
        else:
            top[mine] = torch.maximum(top[mine], lse)
    below = [
        lse - (top if mine is None else top[mine]) for mine, lse in zip(rows, lses, strict=True)
    ]
    total = torch.zeros_like(top)
    out = q.new_zeros(*q.shape[:2], parts[0][0].shape[2], dtype=work)
    with row_invariant(q.device):
        weights = torch.cat(below).exp().split([len(each) for each in below])
        for mine, (part, _), weight in zip(rows, parts, weights, strict=True):
            share = part.to(work) * weight.unsqueeze(-1)
            if mine is None:
                out += share
                total += weight
            else:
                out[mine] += share
                total[mine] += weight
        lse = top + total.log()
    return out / total.unsqueeze(-1), lse
