"""The forward primitive's input: ragged segments, and the cascade layout their attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import AttentionBackend, CascadeLayout
from arbor.model.level_rule import LevelRule
from arbor.model.sharing import Context, Piece, SharedPrefix, Sharing, Slots, level_of

__all__ = [
    "CUDA_SAVED_READS",
    "ForwardPlan",
    "Piece",
    "Segment",
    "SegmentTable",
    "joined",
    "plan_forward",
    "plan_table",
    "select_rows",
    "usual_levels",
    "visibility",
]

# One more level of FlashInfer's cascade costs a launch and a merge per layer on a GPU: estimated to
# pay from here on (Llama-8B shapes).
CUDA_SAVED_READS = 12_000


def usual_levels(device: torch.device, backend: AttentionBackend) -> LevelRule:
    """Which shared spans are levels of their own where nothing was measured."""
    usual = CUDA_SAVED_READS if device.type == "cuda" else 0
    saved = getattr(backend, "least_saved_reads", usual)
    return LevelRule(saved, most_levels=getattr(backend, "most_shared_levels", None))


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
        again: the queries do not count where attention is observed: their tokens were computed
            earlier, or may not run through every layer.
    """

    context: Context
    tokens: Sequence[int]
    positions: NDArray[np.int64]
    tail: Slots
    write: Slots
    logits: int = 0
    again: bool = False

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The segments of one forward as columns: n segments, T rows.

    A decode step fills it without a `Segment` per row.

    Attributes:
        contexts: of each segment.
        context_lengths: int64 [n], tokens of these.
        tails: int32 [*] per segment, see `Segment.tail`.
        tail_lengths: int64 [n], tokens of these.
        counts: int64 [n], rows of each segment.
        ends: int64 [n], the position after each segment's last row.
        ids: int64 [T].
        positions: int64 [T].
        write: [T], slot per row.
        logit_rows: int64, rows whose logits are wanted.
        again: bool [T], rows whose tokens were computed earlier.
    """

    contexts: Sequence[Context]
    context_lengths: NDArray[np.int64]
    tails: Sequence[Slots]
    tail_lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    write: NDArray[np.integer]
    logit_rows: NDArray[np.int64]
    again: NDArray[np.bool_]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> SegmentTable:
        """The columns of segments."""
        counts = np.array([segment.rows for segment in segments], np.int64)
        last = np.cumsum(counts)
        wanted = [
            np.arange(end - segment.logits, end)
            for segment, end in zip(segments, last, strict=True)
        ]
        lengths = [sum(len(piece.slots) for piece in segment.context) for segment in segments]
        positions = np.concatenate([segment.positions for segment in segments])
        return cls(
            contexts=[segment.context for segment in segments],
            context_lengths=np.array(lengths, np.int64),
            tails=[segment.tail for segment in segments],
            tail_lengths=np.array([len(segment.tail) for segment in segments], np.int64),
            counts=counts,
            ends=positions[last - 1] + 1,
            ids=np.concatenate([np.asarray(segment.tokens, np.int64) for segment in segments]),
            positions=positions,
            write=np.concatenate([segment.write for segment in segments]),
            logit_rows=np.concatenate(wanted).astype(np.int64),
            again=np.repeat([segment.again for segment in segments], counts),
        )


def joined(tables: Sequence[SegmentTable]) -> SegmentTable:
    """Several tables as one, their segments one after the other."""
    if len(tables) == 1:
        return tables[0]
    begins = np.cumsum([0, *(len(table.ids) for table in tables)])
    return SegmentTable(
        contexts=[context for table in tables for context in table.contexts],
        context_lengths=np.concatenate([table.context_lengths for table in tables]),
        tails=[tail for table in tables for tail in table.tails],
        tail_lengths=np.concatenate([table.tail_lengths for table in tables]),
        counts=np.concatenate([table.counts for table in tables]),
        ends=np.concatenate([table.ends for table in tables]),
        ids=np.concatenate([table.ids for table in tables]),
        positions=np.concatenate([table.positions for table in tables]),
        write=np.concatenate([table.write for table in tables]),
        logit_rows=np.concatenate(
            [table.logit_rows + begin for table, begin in zip(tables, begins, strict=False)]
        ),
        again=np.concatenate([table.again for table in tables]),
    )


@dataclass(slots=True)
class ForwardPlan:
    """One ragged batch, ready to run.

    Attributes:
        rows: T.
        ids: int64 [T].
        positions: int64 [T].
        write: int64 [T], slot per row (the trash slot allowed).
        logit_rows: int64 [n], rows whose logits are wanted, in order of the segments.
        again: bool [T], rows whose tokens were computed earlier.
        table: the segments.
        shared: what these share.
        layouts: window (None = full attention) -> layout, built on first use by `layout`.
        ids_there: int64 [T] on the device of the model, in place of `ids`; None: `ids` are right.
        reads: int64 [n], per segment, keys read if every row read its whole path by itself.
        unique_reads: int64 [n], per segment, keys the full-attention cascade reads; a span that
            several segments share counts for the first of them.
    """

    rows: int
    ids: Tensor
    positions: Tensor
    write: Tensor
    logit_rows: Tensor
    again: Tensor
    table: SegmentTable
    shared: SharedPrefix
    reads: NDArray[np.int64]
    unique_reads: NDArray[np.int64]
    layouts: dict[int | None, CascadeLayout] = field(default_factory=dict)
    ids_there: Tensor | None = None

    def layout(self, window: int | None) -> CascadeLayout:
        """The layout for layers that look back `window` positions (None: all)."""
        if window not in self.layouts:
            if window is None:
                self.layouts[None] = self.shared.layout(self.table.tails, self.table.tail_lengths)
            else:
                self.layouts[window] = windowed_layout(self.table, window)
        return self.layouts[window]


def plan_forward(
    segments: Sequence[Segment],
    *,
    min_saved_reads: int = 0,
    levels: LevelRule | None = None,
    shared: SharedPrefix | None = None,
) -> ForwardPlan:
    """Lower segments to one ragged batch.

    Args:
        segments: neighbours that share context next to each other (depth-first order of the tree).
        min_saved_reads: a shared span becomes a cascade level of its own only if it saves more key
            reads than this.
        levels: in place of `min_saved_reads`.
        shared: the sharing of the same contexts from an earlier plan, to be used again.
    """
    table = SegmentTable.of(segments)
    if shared is None:
        shared = Sharing(levels or LevelRule(min_saved_reads)).of(
            table.contexts, table.counts.tolist()
        )
    return plan_table(table, shared)


def plan_table(table: SegmentTable, shared: SharedPrefix) -> ForwardPlan:
    """Lower segments that are columns already; see `plan_forward`."""
    tails, counts = table.tail_lengths, table.counts
    reads = counts * (table.context_lengths + tails) - counts * (counts - 1) // 2
    return ForwardPlan(
        rows=len(table.ids),
        ids=torch.from_numpy(table.ids),
        positions=torch.from_numpy(table.positions),
        write=torch.from_numpy(table.write.astype(np.int64)),
        logit_rows=torch.from_numpy(table.logit_rows),
        again=torch.from_numpy(table.again),
        table=table,
        shared=shared,
        reads=reads,
        unique_reads=shared.unique + tails,
    )


def visibility(
    plan: ForwardPlan, trash: int, window: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many rows of a batch can see each slot (a row sees itself).

    Args:
        plan: of the batch; rows that run again count for nothing.
        trash: the slot of no token.
        window: positions a row looks back, itself included; None: all.

    Returns:
        slots int64 [S], distinct and increasing; rows int64 [S], >= 1. Records in host memory that
        the batch reads are among them, by their addresses.
    """
    new = np.concatenate(([0], np.cumsum(~plan.again.numpy())))  # new rows before each row
    slots: list[Slots] = []
    rows: list[NDArray[np.int64]] = []
    for level in plan.layout(window).levels:
        begins, keys = level.qo_indptr.numpy(), level.kv_indptr.numpy()
        lengths = np.diff(keys)
        seen = np.repeat(np.diff(new[begins]), lengths)
        if level.causal:  # a request is one segment: all of its rows are new, or none
            left = np.repeat(keys[1:], lengths) - np.arange(keys[-1])  # 1 for the last key
            within = left if window is None else np.minimum(left, window)
            seen = np.clip(within - np.maximum(0, left - seen), 0, seen)
        slots.append(level.kv_indices.numpy())
        rows.append(seen)
    counts = np.bincount(np.concatenate(slots), np.concatenate(rows)).astype(np.int64)
    counts[trash : trash + 1] = 0
    found = np.flatnonzero(counts)
    return found, counts[found]


def windowed_layout(table: SegmentTable, window: int) -> CascadeLayout:
    """One level for layers that see a key iff 0 <= position distance < window.

    A window by index is right only where positions have no gaps: such segments stay one request,
    with the keys no row can see cut off; the others are split into single rows with exact lists.
    """
    rows: list[int] = []
    lists: list[Slots] = []
    columns = zip(
        table.contexts, table.tails, table.counts.tolist(), table.ends.tolist(), strict=True
    )
    for context, tail, count, end in columns:
        slots, first = _from(context, tail, end, end - count - window + 1)
        if count == 1 or len(slots) == end - first:
            rows.append(count)
            lists.append(slots)
            continue
        for last in range(end - count, end):  # the position of each row
            own = tail[: len(tail) - (end - 1 - last)]
            rows.append(1)
            lists.append(_from(context, own, last + 1, last - window + 1)[0])
    last_level = level_of(rows, lists, causal=True)
    return CascadeLayout(rows=sum(rows), levels=(last_level,))


def _from(context: Context, tail: Slots, end: int, begin: int) -> tuple[Slots, int]:
    """The slots at positions from `begin` on, and the first of these positions.

    Args:
        context: see `Segment`.
        tail: int32 [*], slots of the positions before `end`.
        end: the position after the tail.
        begin: a position.
    """
    start = end - len(tail)
    if begin >= start or not context:
        return tail[max(0, begin - start) :], max(begin, start)
    parts, first = [tail], start
    for piece in reversed(context):
        at = int(np.searchsorted(piece.positions, begin))
        if at < len(piece.positions):
            parts.append(piece.slots[at:])
            first = int(piece.positions[at])
        if at:
            break
    return np.concatenate(parts[::-1]), first


def select_rows(layout: CascadeLayout, rows: Tensor, window: int | None) -> CascadeLayout:
    """The layout of some rows of a batch; the others have left.

    A causal request that has lost rows becomes single-row requests.

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
        places = np.searchsorted(chosen, qo)  # where each request's rows begin in `chosen`
        counts: list[int] = []
        lists: list[Slots] = []
        for index in np.flatnonzero(np.diff(places)).tolist():
            begin, end = int(kv[index]), int(kv[index + 1])
            mine = chosen[places[index] : places[index + 1]].tolist()
            count = len(mine)
            last = int(qo[index + 1]) - 1
            if not level.causal or count == last + 1 - int(qo[index]):
                counts.append(count)
                lists.append(indices[begin:end])
            else:
                for row in mine:
                    stop = end - (last - row)
                    start = begin if window is None else max(begin, stop - window)
                    counts.append(1)
                    lists.append(indices[start:stop])
        levels.append(level_of(counts, lists, causal=level.causal))
    return CascadeLayout(rows=len(chosen), levels=tuple(levels))
