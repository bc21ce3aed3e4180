"""Attention over 8-bit KV by a backend for numbers: decoded in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    apply_sinks,
)
from arbor.kernels.int8 import read_slots

# K and V that are decoded at once, as float32. At 8 heads of 128 channels, 4,096 keys.
DECODED_BYTES = 32 << 20


class Reads(NamedTuple):
    """Neighbouring requests of a level, or a part of one: rows and the keys they read.

    Attributes:
        rows: ends of the requests' rows, the first one's beginning first.
        keys: each request's slots, int32.
        causal: as in `CascadeLevel`.
    """

    rows: list[int]
    keys: list[Tensor]
    causal: bool


@dataclass(slots=True)
class Piece:
    """A part of a layout whose keys are decoded together.

    Attributes:
        first_row, end_row: rows of the batch that read them.
        slots: int64 [n], their slots.
        plan: of the other backend, over keys 0 .. n.
    """

    first_row: int
    end_row: int
    slots: Tensor
    plan: Any


@dataclass(slots=True)
class DecodedPlan:
    """The pieces of one forward for one shape.

    Attributes:
        rows: of the batch, T.
        shape: of the layers.
        whole: the only piece is the layout itself.
        pieces: every row reads each of its keys in exactly one.
    """

    rows: int
    shape: AttentionShape
    whole: bool
    pieces: list[Piece] = field(default_factory=list)


class DecodedCascade:
    """Attention over 8-bit KV: each piece is copied, decoded, and attended to by another backend.

    A batch that reads few keys is one piece, with all of its levels. Otherwise pieces are merged by
    their log-sum-exp, so that what is decoded at once keeps to the limit whatever the context. Sums
    are in at least float32.

    Args:
        inner: a backend for float32 and float64, whose `run` gives 0 and -inf to rows without keys.
        decoded_bytes: K and V decoded at once.
    """

    def __init__(self, inner: AttentionBackend, decoded_bytes: int = DECODED_BYTES) -> None:
        self._inner = inner
        self._bytes = decoded_bytes

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> DecodedPlan:
        """The pieces of a layout, with their plans."""
        width = shape.num_kv_heads * (shape.head_dim_qk + shape.head_dim_vo)
        most = max(1, self._bytes // (4 * width))
        whole = sum(len(level.kv_indices) for level in layout.levels) <= most
        plan = DecodedPlan(layout.rows, shape, whole)
        if whole:
            plan.pieces.append(self._whole(layout, shape))
            return plan
        for level in layout.levels:
            for reads in _joined(_bounded(level, shape.window, most), most):
                plan.pieces.append(self._piece(reads, shape))
        return plan

    def _whole(self, layout: CascadeLayout, shape: AttentionShape) -> Piece:
        """A layout as one piece, with its levels."""
        levels, first = [], 0
        for level in layout.levels:
            end = first + len(level.kv_indices)
            own = torch.arange(first, end, dtype=torch.int32)
            levels.append(replace(level, kv_indices=own))
            first = end
        slots = torch.cat([level.kv_indices for level in layout.levels]).long()
        inner = self._inner.plan(replace(layout, levels=tuple(levels)), shape)
        return Piece(0, layout.rows, slots, inner)

    def _piece(self, reads: Reads, shape: AttentionShape) -> Piece:
        rows = torch.tensor(reads.rows, dtype=torch.int32) - reads.rows[0]
        ends = torch.tensor([0, *(len(keys) for keys in reads.keys)]).cumsum(0)
        slots = torch.cat(reads.keys)
        own = torch.arange(len(slots), dtype=torch.int32)
        level = CascadeLevel(rows, ends.int(), own, reads.causal)
        layout = CascadeLayout(int(rows[-1]), (level,))
        plan = self._inner.plan(layout, shape)
        return Piece(reads.rows[0], reads.rows[-1], slots.long(), plan)

    def run(
        self,
        plan: DecodedPlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`."""
        shape = plan.shape
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        out = wide.new_zeros(plan.rows, shape.num_qo_heads, shape.head_dim_vo)
        lse = wide.new_full((plan.rows, shape.num_qo_heads), -torch.inf, dtype=torch.float32)
        for piece in plan.pieces:
            rows, slots = slice(piece.first_row, piece.end_row), piece.slots.to(k_pool.device)
            keys = read_slots(k_pool, slots, shape.head_dim_qk).to(wide.dtype)
            values = read_slots(v_pool, slots, shape.head_dim_vo).to(wide.dtype)
            part, part_lse = self._inner.run(piece.plan, wide[rows], keys, values)
            if plan.whole:  # which may have rows without keys
                out, lse = part, part_lse
                continue
            weight = torch.sigmoid(part_lse - lse[rows]).unsqueeze(-1)
            out[rows].lerp_(part, weight.to(out.dtype))
            lse[rows] = torch.logaddexp(lse[rows], part_lse)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out.to(q.dtype), lse

    def mass(
        self,
        plan: DecodedPlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`."""
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        sums = len(heads) if heads is not None else plan.shape.num_kv_heads
        size = (sums, k_pool.shape[0]) if by_head else (k_pool.shape[0],)
        mass = torch.zeros(size, dtype=torch.float32, device=q.device)
        for piece in plan.pieces:
            rows, slots = slice(piece.first_row, piece.end_row), piece.slots.to(k_pool.device)
            keys = read_slots(k_pool, slots, plan.shape.head_dim_qk).to(wide.dtype)
            received = self._inner.mass(
                piece.plan, wide[rows], keys, lse[rows], heads, by_head=by_head
            )
            mass.index_add_(-1, slots, received)
        return mass


def _bounded(level: CascadeLevel, window: int | None, most: int) -> Iterator[Reads]:
    """A level's requests in order of their rows, cut so that none reads more than `most` keys."""
    rows, ends = level.qo_indptr.tolist(), level.kv_indptr.tolist()
    for request in range(len(rows) - 1):
        keys = level.kv_indices[ends[request] : ends[request + 1]]
        first, end = rows[request], rows[request + 1]
        if not level.causal:
            yield from _chunks(first, end, keys, most)
            continue
        if len(keys) <= most:
            yield Reads([first, end], [keys], True)
            continue
        before = len(keys) - (end - first)  # keys before the first row's own
        together = most if window is None else max(1, most - window + 1)
        for row in range(first, end, together):
            stop = min(end, row + together)
            own, last = before + row - first, before + stop - first
            if window is None:
                yield from _chunks(row, stop, keys[:own], most)
                yield Reads([row, stop], [keys[own:last]], True)
            elif window <= most:
                yield Reads([row, stop], [keys[max(0, own - window + 1) : last]], True)
            else:  # one row, all of whose window it reads
                yield from _chunks(row, stop, keys[max(0, own - window + 1) : last], most)


def _chunks(first_row: int, end_row: int, keys: Tensor, most: int) -> Iterator[Reads]:
    """Keys that all of some rows read, so many at a time."""
    for part in keys.split(most) if len(keys) else ():
        yield Reads([first_row, end_row], [part], False)


def _joined(parts: Iterator[Reads], most: int) -> Iterator[Reads]:
    """Neighbours of one kind as one, as long as they read at most so many keys."""
    last: Reads | None = None
    for part in parts:
        if (
            last is not None
            and last.causal == part.causal
            and last.rows[-1] == part.rows[0]
            and sum(map(len, last.keys)) + len(part.keys[0]) <= most
        ):
            last.rows.append(part.rows[-1])
            last.keys.append(part.keys[0])
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
