"""The forward primitive's input: ragged segments, and the cascade layout their attention needs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.base import CascadeLayout, CascadeLevel

Slots = NDArray[np.int32]

# One more cascade level costs a launch and a merge per layer on a GPU: estimated to pay from here
# on (Llama-8B shapes).
CUDA_SAVED_READS = 12_000


def least_saved_reads(device: torch.device) -> int:
    """Key reads that a shared span must save on a device to be a cascade level of its own."""
    return CUDA_SAVED_READS if device.type == "cuda" else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of context: the resident tokens of one block (or of its beginning).

    Attributes:
        key: pieces with equal keys in one batch name the same slots; what is shared is found by it.
        slots: int32 [c], in order of position.
        positions: int32 [c], increasing; gaps where tokens are not resident.
    """

    key: Hashable
    slots: Slots
    positions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """One request of a forward: new tokens after a context.

    Bottom-right causal: row j reads the context, the tail up to the rows, and the segment's rows up
    to j.

        path    |---- context ----|------- tail -------|
        rows                            |-- tokens ----|

    Attributes:
        context: pieces in order of position; what neighbouring segments share is found by their
            keys.
        tokens: int [m], m >= 1.
        positions: int64 [m], their places on the path, consecutive.
        tail: int32 [t + m], slots of consecutive positions after the context: t earlier tokens of
            an open block, then the rows' own.
        write: int32 [m], where this forward stores the rows' K/V: their own slots, or the trash
            slot where those already hold them.
        logits: how many rows, counted from the last, the caller wants logits of.
        again: the tokens were computed earlier; their queries do not count a second time where
            attention is observed.
    """

    context: tuple[Piece, ...]
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    tail: Slots
    write: Slots
    logits: int = 0
    again: bool = False

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def keys(self) -> int:
        """Keys its last row reads, itself included."""
        return sum(len(piece.slots) for piece in self.context) + len(self.tail)


@dataclass(slots=True)
class ForwardPlan:
    """One ragged batch, ready to run.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        write: int64 [T], slot per row (the trash slot allowed).
        logit_rows: int64 [n], rows whose logits are wanted, in order of the segments.
        layouts: window (None = full attention) -> layout, built on first use by `layout`.
        read_tokens: keys read if every row read its whole path by itself.
        unique_read_tokens: keys the full-attention cascade reads, each shared span once per
            forward.
    """

    ids: Tensor
    positions: Tensor
    write: Tensor
    logit_rows: Tensor
    segments: tuple[Segment, ...]
    shared: SharedPrefix
    read_tokens: int
    unique_read_tokens: int
    layouts: dict[int | None, CascadeLayout] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """T, rows of the batch."""
        return int(self.ids.shape[0])

    @property
    def again(self) -> Tensor:
        """Rows whose tokens were computed earlier, bool [T]."""
        flags = torch.tensor([segment.again for segment in self.segments])
        return flags.repeat_interleave(torch.tensor([s.rows for s in self.segments]))

    def layout(self, window: int | None) -> CascadeLayout:
        """The layout for layers that look back `window` positions (None: all)."""
        if window not in self.layouts:
            if window is None:
                tails = [segment.tail for segment in self.segments]
                self.layouts[None] = self.shared.layout(tails)
            else:
                self.layouts[window] = windowed_layout(self.segments, window)
        return self.layouts[window]


def plan_forward(
    segments: Sequence[Segment], *, min_saved_reads: int = 0, shared: SharedPrefix | None = None
) -> ForwardPlan:
    """Lower segments to one ragged batch.

    Args:
        segments: neighbours that share context next to each other (depth-first order of the tree).
        min_saved_reads: a shared span becomes a cascade level of its own only if it saves more key
            reads than this.
        shared: the sharing of the same contexts from an earlier plan, to be used again.
    """
    rows = [segment.rows for segment in segments]
    if shared is None:
        shared = share([segment.context for segment in segments], rows, min_saved_reads)
    ends = np.cumsum(rows)
    wanted = [
        np.arange(end - segment.logits, end) for segment, end in zip(segments, ends, strict=True)
    ]
    return ForwardPlan(
        ids=torch.from_numpy(np.concatenate([np.asarray(s.tokens, np.int64) for s in segments])),
        positions=torch.from_numpy(np.concatenate([s.positions for s in segments])),
        write=torch.from_numpy(np.concatenate([s.write for s in segments]).astype(np.int64)),
        logit_rows=torch.from_numpy(np.concatenate(wanted).astype(np.int64)),
        segments=tuple(segments),
        shared=shared,
        read_tokens=sum(s.rows * s.keys - s.rows * (s.rows - 1) // 2 for s in segments),
        unique_read_tokens=shared.unique_tokens + sum(len(s.tail) for s in segments),
    )


def visibility(
    segments: Sequence[Segment], trash: int, window: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many rows of a batch can see each slot (a row sees itself).

    Args:
        segments: the batch; those that run again count for nothing.
        trash: the slot of no token.
        window: positions a row looks back, itself included; None: all.

    Returns:
        slots int64 [S], distinct and increasing; rows int64 [S], >= 1.
    """
    slots: list[Slots] = []
    rows: list[NDArray[np.int64]] = []
    for segment in segments:
        if segment.again:
            continue
        begin = int(segment.positions[0])
        end = begin + segment.rows
        for piece in segment.context:
            slots.append(piece.slots)
            seen = np.full(len(piece.slots), segment.rows, np.int64)
            rows.append(
                seen if window is None else np.clip(piece.positions + window - begin, 0, seen)
            )
        slots.append(segment.tail)
        tail = np.arange(end - len(segment.tail), end)
        first = np.maximum(tail, begin)
        seen = end - first
        rows.append(seen if window is None else np.clip(tail + window - first, 0, seen))
    counts = np.bincount(np.concatenate(slots), np.concatenate(rows)).astype(np.int64)
    counts[trash:] = 0
    found = np.flatnonzero(counts)
    return found, counts[found]


# Sharing


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What the segments of a batch share, found once and reused while the same segments decode on.

    Attributes:
        rows: rows of each segment.
        levels: shared spans, one level per depth of sharing.
        private: int32 [*] per segment, the context that no level holds, in order of position.
        unique_tokens: context tokens read once each.
    """

    rows: tuple[int, ...]
    levels: tuple[CascadeLevel, ...]
    private: tuple[Slots, ...]
    unique_tokens: int

    def layout(self, tails: Sequence[Slots]) -> CascadeLayout:
        """Full-attention layout: shared levels, then private contexts and own tokens.

        Args:
            tails: int32 [*] per segment, see `Segment.tail`.
        """
        lists = [
            np.concatenate((private, tail)) if len(private) else tail
            for private, tail in zip(self.private, tails, strict=True)
        ]
        last = _level(self.rows, lists, causal=True)
        return CascadeLayout(rows=sum(self.rows), levels=(*self.levels, last))


def share(
    contexts: Sequence[Sequence[Piece]], rows: Sequence[int], min_saved_reads: int = 0
) -> SharedPrefix:
    """Find the spans that neighbouring segments share.

    A span that the same run of segments shares is one level entry, however many blocks it covers;
    its level is the number of shared spans above it. Spans that would save too little stay private.
    """
    spans: list[tuple[int, int, int, Slots]] = []  # level, first segment, end segment, slots
    private: list[list[Slots]] = [[] for _ in contexts]

    # runs of segments [first, end) that agree on pieces [0, index), with `level` shared spans above
    runs = [(0, len(contexts), 0, 0)] if contexts else []
    while runs:
        first, end, index, level = runs.pop()
        common: list[Slots] = []
        while True:
            heads = [c[index].key if index < len(c) else None for c in contexts[first:end]]
            if heads[0] is None or any(head != heads[0] for head in heads):
                break
            common.append(contexts[first][index].slots)
            index += 1
        if common:
            slots = np.concatenate(common) if len(common) > 1 else common[0]
            saved = (sum(rows[first:end]) - 1) * len(slots)
            if end - first > 1 and len(slots) and saved > min_saved_reads:
                spans.append((level, first, end, slots))
                level += 1
            else:
                for segment in range(first, end):
                    private[segment].append(slots)
        start = first
        while start < end:  # runs of segments that agree on the next piece
            stop = start + 1
            key = contexts[start][index].key if index < len(contexts[start]) else None
            while (
                key is not None
                and stop < end
                and index < len(contexts[stop])
                and contexts[stop][index].key == key
            ):
                stop += 1
            if stop - start > 1:
                runs.append((start, stop, index, level))
            else:
                private[start].extend(piece.slots for piece in contexts[start][index:])
            start = stop

    depth = max((level for level, *_ in spans), default=-1) + 1
    levels = []
    for level in range(depth):
        lists: list[Slots] = []
        counts: list[int] = []
        segment = 0
        for _, first, end, slots in sorted((s for s in spans if s[0] == level), key=lambda s: s[1]):
            if first > segment:  # rows that read nothing on this level
                lists.append(np.empty(0, np.int32))
                counts.append(sum(rows[segment:first]))
            lists.append(slots)
            counts.append(sum(rows[first:end]))
            segment = end
        if segment < len(contexts):
            lists.append(np.empty(0, np.int32))
            counts.append(sum(rows[segment:]))
        levels.append(_level(counts, lists, causal=False))
    flat = tuple(np.concatenate(parts) if parts else np.empty(0, np.int32) for parts in private)
    unique = sum(len(slots) for *_, slots in spans) + sum(len(slots) for slots in flat)
    return SharedPrefix(tuple(rows), tuple(levels), flat, unique)


def _level(rows: Sequence[int], lists: Sequence[Slots], *, causal: bool) -> CascadeLevel:
    qo_indptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(rows, out=qo_indptr[1:])
    kv_indptr = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(slots) for slots in lists], out=kv_indptr[1:])
    return CascadeLevel(
        qo_indptr=torch.from_numpy(qo_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        kv_indices=torch.from_numpy(np.concatenate(lists).astype(np.int32, copy=False)),
        causal=causal,
    )


def windowed_layout(segments: Sequence[Segment], window: int) -> CascadeLayout:
    """One level for layers that see a key iff 0 <= position distance < window.

    A window by index is right only where positions have no gaps: such segments stay one request,
    with the keys no row can see cut off; the others are split into single rows with exact lists.
    """
    rows: list[int] = []
    lists: list[Slots] = []
    for segment in segments:
        slots = np.concatenate([*(piece.slots for piece in segment.context), segment.tail])
        end = int(segment.positions[-1]) + 1
        tail = np.arange(end - len(segment.tail), end)
        positions = np.concatenate([*(piece.positions for piece in segment.context), tail])
        first = int(np.searchsorted(positions, segment.positions[0] - window + 1))
        gapless = positions[-1] - positions[first] == len(positions) - 1 - first
        if gapless:
            rows.append(segment.rows)
            lists.append(slots[first:])
            continue
        context = len(slots) - segment.rows
        for row in range(segment.rows):
            begin = int(np.searchsorted(positions, segment.positions[row] - window + 1))
            rows.append(1)
            lists.append(slots[begin : context + row + 1])
    return CascadeLayout(rows=sum(rows), levels=(_level(rows, lists, causal=True),))


def select_rows(layout: CascadeLayout, rows: Tensor, window: int | None) -> CascadeLayout:
    """The layout of some rows of a batch, as single-row requests; the others have left.

    Args:
        layout: of the whole batch.
        rows: int64 [n], increasing.
        window: the window `layout` was built for.
    """
    chosen = rows.numpy()
    levels = []
    for level in layout.levels:
        qo, kv = level.qo_indptr.numpy(), level.kv_indptr.numpy()
        indices = level.kv_indices.numpy()
        request = np.searchsorted(qo, chosen, side="right") - 1
        counts: list[int] = []
        lists: list[Slots] = []
        previous = -1
        for row, index in zip(chosen, request, strict=True):
            begin, end = int(kv[index]), int(kv[index + 1])
            if level.causal:
                end -= int(qo[index + 1]) - 1 - int(row)
                begin = begin if window is None else max(begin, end - window)
            if not level.causal and counts and index == previous:
                counts[-1] += 1
            else:
                counts.append(1)
                lists.append(indices[begin:end])
            previous = index
        levels.append(_level(counts, lists, causal=level.causal))
    return CascadeLayout(rows=len(chosen), levels=tuple(levels))
