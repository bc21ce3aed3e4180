"""Planning for `TorchCascade`: a cascade level as few calls over slices of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLevel

Slots = npt.NDArray[np.int64]

# Measured rules (docs/experiments/native_attention.csv):

# A broken key list is read run by run if its runs are this long on average, else gathered.
RUN_TOKENS = 48
# Causal requests of up to this many rows run as one masked call, longer ones as context + own.
MASKED_ROWS = 16
# Rows of a masked causal request that run at once; bounds the fused kernel's mask.
CHUNK_ROWS = 256
# Uniform groups smaller than this rather join a padded gather.
FEW_REQUESTS = 4
# K and V elements of a contiguous request above which a copy costs more than a call.
GATHER_ELEMENTS = 32768
# Up to this many keys, one call per request for all KV heads beats one per head.
JOINED_KEYS = 48


class TaskPiece(NamedTuple):
    """Part of a task: some of its requests, or some rows and keys of one.

    Attributes:
        first_request: requests ``first_request .. end_request`` of the task.
        end_request: one past the last.
        first_row: rows ``first_row .. end_row`` of each of these requests.
        end_row: one past the last.
        first_key: keys ``first_key .. end_key`` of each of these requests.
        end_key: one past the last.
    """

    first_request: int
    end_request: int
    first_row: int
    end_row: int
    first_key: int
    end_key: int


@dataclass(slots=True)  # never changed, but frozen ones take five times as long to make
class AttentionTask:
    """One attention call: `batch` requests of equally many rows and keys.

    Attributes:
        first_row: rows ``first_row .. first_row + batch * rows`` of the forward, request after
            request.
        batch: requests, B.
        rows: rows of each request, m.
        keys: keys of each request, n.
        start: first slot of the first request, if `index` is None.
        step: slots from one request's first slot to the next one's.
        index: int64 [B * n] slots to gather, for key lists that are not runs; padded with owned
            slots.
        lengths: int64 [B]: only the first so many of a request's keys count; None = all.
        causal: row j reads keys 0 .. n - m + j; else every row reads every key.
        window: with `causal`: only the last `window` of these.
        joined: the fused kernel takes all KV heads in one call, foreign heads masked (one short
            call per request instead of one per request and head).
    """

    first_row: int
    batch: int
    rows: int
    keys: int
    start: int = 0
    step: int = 0
    index: Tensor | None = None
    lengths: Tensor | None = None
    causal: bool = False
    window: int | None = None
    joined: bool = False

    @property
    def end_row(self) -> int:
        """One past the last row."""
        return self.first_row + self.batch * self.rows

    @property
    def square(self) -> bool:
        """Plain causal attention of rows to themselves: the fused kernel needs no mask."""
        return self.batch == 1 and _is_square(self.rows, self.keys, self.causal, self.window)

    @property
    def whole(self) -> TaskPiece:
        """All rows and keys."""
        return TaskPiece(0, self.batch, 0, self.rows, 0, self.keys)

    def pieces(self, most_pairs: int, most_keys: int) -> Iterator[TaskPiece]:
        """Parts that keep within two limits, or of one row or request where that is more.

        In order of their rows; each row is in one piece. Pieces of a causal request leave out keys
        that none of their rows reads: those after the last row's own, and before the first one's
        window.

        Args:
            most_pairs: pairs of a row and a key in a piece.
            most_keys: keys of a piece with several requests, whose matmuls copy them.

        Example:
            Six causal rows after a context of two keys, at most 24 pairs at once:

            >>> task = AttentionTask(first_row=0, batch=1, rows=6, keys=8, causal=True)
            >>> [(piece.first_row, piece.end_row, piece.end_key) for piece in task.pieces(24, 8)]
            [(0, 3, 5), (3, 6, 8)]
        """
        rows = max(1, most_pairs // self.keys)
        requests = max(1, min(rows // self.rows, most_keys // self.keys))
        if self.batch <= requests and self.rows <= rows:
            yield self.whole
        elif self.rows <= rows:
            for first in range(0, self.batch, requests):
                end = min(self.batch, first + requests)
                yield TaskPiece(first, end, 0, self.rows, 0, self.keys)
        else:
            for request in range(self.batch):
                for first in range(0, self.rows, rows):
                    end = min(self.rows, first + rows)
                    begin, keys, before = 0, self.keys, self.keys - self.rows
                    if self.causal:
                        keys = before + end
                    if self.window is not None:
                        begin = max(0, before + first - self.window + 1)
                    yield TaskPiece(request, request + 1, first, end, begin, keys)

    def hidden(
        self, piece: TaskPiece, device: torch.device, lengths: Tensor | None = None
    ) -> Tensor | None:
        """True where a row must not read a key, made on the device from row and key numbers.

        Args:
            piece: of this task.
            device: where the mask is made.
            lengths: `self.lengths` on that device.

        Returns:
            bool [requests or 1, rows or 1, keys] of the piece; None where every row reads every
            key.
        """
        if lengths is None and not self.causal:
            return None
        key = torch.arange(piece.first_key, piece.end_key, device=device)
        if lengths is not None:
            return (key >= lengths[piece.first_request : piece.end_request, None]).unsqueeze(1)
        own = torch.arange(piece.first_row, piece.end_row, device=device).unsqueeze(1)
        own = own + (self.keys - self.rows)
        hidden = key > own
        if self.window is not None:
            hidden |= key <= own - self.window
        return hidden.unsqueeze(0)

    def slots(self, device: torch.device) -> Tensor:
        """int64 [B * n] slots of the keys, request after request."""
        if self.index is not None:
            return self.index.to(device)
        first = self.start + self.step * torch.arange(self.batch, device=device)
        return (first[:, None] + torch.arange(self.keys, device=device)).view(-1)


def level_tasks(level: CascadeLevel, shape: AttentionShape) -> list[AttentionTask]:
    """The calls of one level, in order of their first rows; requests without keys have none.

    Together they compute what `ReferenceAttention` does for the level: each row reads its keys
    once.

    Args:
        level: requests and their key lists.
        shape: of the layers; decides about windows, chunks and joined heads.

    Example:
        Three requests of one row, 4 keys each, 100 slots apart, are one call on a view of the pool:

        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> slots = ints(0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203)
        >>> level = CascadeLevel(ints(0, 1, 2, 3), ints(0, 4, 8, 12), slots, causal=True)
        >>> [task] = level_tasks(level, AttentionShape(8, 2, 64, 64, 0.125))
        >>> (task.batch, task.rows, task.keys, task.start, task.step)
        (3, 1, 4, 0, 100)
    """
    slots: Slots = level.kv_indices.numpy().astype(np.int64)
    if not len(slots):
        return []
    uniform = _uniform_task(level, slots, shape)
    if uniform is not None:
        return [uniform]
    # breaks[i]: places up to key i at which the slots do not go on by one
    breaks = np.zeros(len(slots), dtype=np.int64)
    np.cumsum(slots[1:] - slots[:-1] != 1, out=breaks[1:])
    reads = [
        read
        for request in _key_ranges(level, shape)
        for read in _contiguous_reads(request, slots, breaks)
    ]
    return _gather_ragged(_batched(reads, shape), shape)


class _KeyRange(NamedTuple):
    """Rows, and the stretch of the level's key list that they read."""

    first_row: int
    rows: int
    begin: int
    end: int
    causal: bool
    window: int | None


class _Read(NamedTuple):
    """Rows and keys of one request that lie in a single run of slots, or are gathered."""

    first_row: int
    rows: int
    keys: int
    start: int
    gathered: Tensor | None
    causal: bool
    window: int | None
    extends: bool  # it may join the read before it in one batch


def _is_square(rows: int, keys: int, causal: bool, window: int | None) -> bool:
    return causal and window is None and rows == keys


def _uniform_task(level: CascadeLevel, slots: Slots, shape: AttentionShape) -> AttentionTask | None:
    """A whole level as one call, if its requests are equal and their runs uniformly spaced."""
    rows: list[int] = level.qo_indptr.tolist()
    keys: list[int] = level.kv_indptr.tolist()
    count, m, n = len(rows) - 1, rows[1], keys[1]
    if n == 0 or (level.causal and m > 1):
        return None
    if rows != list(range(0, count * m + 1, m)) or keys != list(range(0, count * n + 1, n)):
        return None
    start = int(slots[0])
    step = int(slots[n]) - start if count > 1 else 0
    expected = np.arange(start, start + n) + step * np.arange(count)[:, None]
    if step < 0 or not np.array_equal(slots.reshape(count, n), expected):
        return None
    cut = max(0, n - shape.window) if level.causal and shape.window is not None else 0
    joined = _joins_heads(m, count, n - cut, shape)
    return AttentionTask(0, count, m, n - cut, start + cut, step, joined=joined)


def _key_ranges(level: CascadeLevel, shape: AttentionShape) -> Iterator[_KeyRange]:
    """Each request cut by causality and window: into its context and own keys, or into chunks."""
    rows: list[int] = level.qo_indptr.tolist()
    keys: list[int] = level.kv_indptr.tolist()
    for (first_row, end_row), (begin, end) in zip(pairwise(rows), pairwise(keys), strict=True):
        m, n = end_row - first_row, end - begin
        if n == 0:
            continue
        window = shape.window if level.causal else None
        if window is not None and n <= window:
            window = None
        if m == 1 or not level.causal:
            begin = begin if window is None else end - window
            yield _KeyRange(first_row, m, begin, end, False, None)
        elif window is None and fusable(shape) and (m == n or m > MASKED_ROWS):
            if n > m:
                yield _KeyRange(first_row, m, begin, end - m, False, None)
            yield _KeyRange(first_row, m, end - m, end, True, None)
        else:
            for chunk in range(0, m, CHUNK_ROWS):
                some = min(CHUNK_ROWS, m - chunk)
                stop = end - m + chunk + some
                start = begin if window is None else max(begin, stop - some - window + 1)
                yield _KeyRange(first_row + chunk, some, start, stop, True, window)


def _contiguous_reads(request: _KeyRange, slots: Slots, breaks: Slots) -> list[_Read]:
    """A stretch of keys as one run, as several long runs, or as one gather."""
    first_row, m, begin, end, causal, window = request
    n, runs = end - begin, int(breaks[end - 1] - breaks[begin]) + 1
    if runs == 1:
        extends = not _is_square(m, n, causal, window)
        return [_Read(first_row, m, n, int(slots[begin]), None, causal, window, extends)]
    if not causal and n >= RUN_TOKENS * runs:
        ends = np.flatnonzero(slots[begin + 1 : end] - slots[begin : end - 1] != 1) + begin + 1
        return [
            _Read(first_row, m, b - a, int(slots[a]), None, False, None, False)
            for a, b in pairwise([begin, *ends.tolist(), end])
        ]
    index = torch.from_numpy(slots[begin:end])
    return [_Read(first_row, m, n, 0, index, causal, window, False)]


def _batched(reads: Sequence[_Read], shape: AttentionShape) -> list[AttentionTask]:
    """One task for each sequence of neighbours of one form whose runs are uniformly spaced."""
    tasks = []
    at = 0
    while at < len(reads):
        first_row, m, n, start, index, causal, window, _ = reads[at]
        batch, step = _batch_at(reads, at)
        joined = batch > 1 and _joins_heads(m, batch, n, shape)
        tasks.append(
            AttentionTask(first_row, batch, m, n, start, step, index, None, causal, window, joined)
        )
        at += batch
    return tasks


def _batch_at(reads: Sequence[_Read], at: int) -> tuple[int, int]:
    """How many reads from `at` on fit into one batch, and the step between their slots."""
    first = reads[at]
    batch, step = 1, 0
    while first.gathered is None and at + batch < len(reads):
        read = reads[at + batch]
        if batch == 1:
            step = max(0, read.start - first.start)
        if not (
            read.extends
            and read.first_row == first.first_row + batch * first.rows
            and read.start == first.start + batch * step
            and (read.rows, read.keys) == (first.rows, first.keys)
            and (read.causal, read.window) == (first.causal, first.window)
        ):
            break
        batch += 1
    return batch, step if batch > 1 else 0


def _gather_ragged(tasks: Sequence[AttentionTask], shape: AttentionShape) -> list[AttentionTask]:
    """Joins neighbouring single-row tasks of unequal length or spacing into padded gathers."""
    width = shape.num_kv_heads * (shape.head_dim_qk + shape.head_dim_vo)
    stretches: list[list[AttentionTask]] = []
    open_row = -1  # where a task has to begin to go on with the last stretch
    for task in tasks:
        # whether a copy of the task's keys costs less than a call of its own
        gathers = task.rows == 1 and (
            task.index is not None
            or (task.batch < FEW_REQUESTS and task.keys * width <= GATHER_ELEMENTS)
        )
        if gathers and task.first_row == open_row:
            stretches[-1].append(task)
        else:
            stretches.append([task])
        open_row = task.end_row if gathers else -1
    return [
        _padded_gather(stretch, shape) if len(stretch) > 1 else stretch[0] for stretch in stretches
    ]


def _padded_gather(tasks: Sequence[AttentionTask], shape: AttentionShape) -> AttentionTask:
    """Neighbouring single-row tasks as one gather; short lists repeat their first slot, unread."""
    lists = [keys for task in tasks for keys in _key_lists(task)]
    lengths = [len(keys) for keys in lists]
    batch, longest = len(lists), max(lengths)
    index = np.empty((batch, longest), np.int64)
    for row, keys in zip(index, lists, strict=True):
        row[: len(keys)] = keys
        row[len(keys) :] = keys[0]
    return AttentionTask(
        tasks[0].first_row,
        batch,
        rows=1,
        keys=longest,
        index=torch.from_numpy(index.reshape(-1)),
        lengths=None if min(lengths) == longest else torch.tensor(lengths),
        joined=_joins_heads(1, batch, longest, shape),
    )


def _key_lists(task: AttentionTask) -> list[Slots]:
    """The slots of each request's keys."""
    if task.index is not None:
        return list(task.index.numpy().reshape(task.batch, task.keys))
    starts = [task.start + request * task.step for request in range(task.batch)]
    return [np.arange(start, start + task.keys) for start in starts]


def fusable(shape: AttentionShape) -> bool:
    """Whether the fused CPU kernel computes this shape: equal head dimensions, no softcap.

    Example:
        >>> fusable(AttentionShape(8, 2, 64, 64, 0.125))
        True
        >>> fusable(AttentionShape(8, 2, 64, 48, 0.125))
        False
    """
    return shape.head_dim_qk == shape.head_dim_vo and shape.softcap is None


def _joins_heads(rows: int, batch: int, keys: int, shape: AttentionShape) -> bool:
    """Whether one call for all heads is faster: the smallest MKL product takes 2-5 us."""
    return (
        rows == 1
        and batch > 1
        and keys <= JOINED_KEYS
        and shape.num_kv_heads > 1
        and (shape.head_dim_qk <= 32 or (shape.head_dim_qk <= 64 and shape.group >= 3))
    )
