"""What single KV heads keep when slots leave, by native kernels."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from arbor.kernels.native import HeadSelectJob, HeadShareJob, native_library

Places = NDArray[np.int32]
_LAST, _FIRST = 1, 2  # `HeadSelectJob::Guard` of native.h


def head_moves(
    scores: NDArray[np.floating],
    protected: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    lose: NDArray[np.int64],
) -> tuple[Places, Places, Places, NDArray[np.bool_]] | None:
    """What heads move that keep equally many tokens, as `HeadScorer.moves` of
    arbor/heads/selection.py says it in numpy, the same places.

    Args:
        scores: float32 [C, T], finite, block after block.
        protected: bool [T].
        sizes: int64 [P], tokens of each block, >= 1; summing to T.
        lose: int64 [P], how many each gives up, 1 to its size.

    Returns:
        the heads, sources and targets of the moves, int32 [m], by head; the slots that leave, bool
        [T]. None: there is no library, or the scores have another dtype.
    """
    library = native_library()
    if library is None or scores.dtype != np.float32 or not scores.size:
        return None
    scores = _by_rows(scores)
    heads, count = scores.shape
    words = -(-count // 64)
    guard = _guard(protected, sizes, lose)
    sizes, lose = (np.ascontiguousarray(each, np.int64) for each in (sizes, lose))
    gone, left = np.empty((heads, words), np.uint64), np.empty(words, np.uint64)
    leaving, moved = np.empty(count, np.bool_), np.empty(1, np.int64)
    job = HeadSelectJob(
        *(_address(each) for each in (scores, guard, sizes, lose, gone, left, leaving, moved)),
        row=scores.strides[0] // scores.itemsize,
        heads=heads,
        tokens=count,
        blocks=len(sizes),
        words=words,
    )
    library.select_heads(ctypes.addressof(job))
    moves = np.empty((3, int(moved[0])), np.int32)
    job.head, job.source, job.target = (_address(each) for each in moves)
    library.list_moves(ctypes.addressof(job))
    return moves[0], moves[1], moves[2], leaving


def held_by_head(holder: NDArray[np.integer], sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Tokens that each KV head holds of each block, int64 [C, P].

    Args:
        holder: int16 or int32 [C, T], the KV head whose token lies in each cell; 0 to C - 1.
        sizes: int64 [P], tokens of each block; summing to T.

    Returns:
        None: there is no library, or `holder` has another dtype.
    """
    library = native_library()
    if library is None or not _has_holders(holder):
        return None
    holder = np.ascontiguousarray(holder)
    sizes = np.ascontiguousarray(sizes, np.int64)
    held = np.empty((len(holder), len(sizes)), np.int64)
    job = HeadShareJob(
        holders=_address(holder),
        sizes=_address(sizes),
        held=_address(held),
        heads=len(holder),
        tokens=holder.shape[1],
        blocks=len(sizes),
        wide=holder.itemsize == 4,
    )
    library.count_held(ctypes.addressof(job))
    return held


def shared_moves(
    scores: NDArray[np.floating],
    holder: NDArray[np.integer] | None,
    protected: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    keep: NDArray[np.int64],
    counts: NDArray[np.int64],
    held: NDArray[np.int64],
    layers: int,
    pools: int,
    competes: bool,
) -> tuple[Places, Places, Places, Places, NDArray[np.bool_]] | None:
    """`vacated` what `Cells.stays` leaves (arbor/retention/head_budgets.py), the same places.

    Args:
        scores: float32 [C, T], finite, block after block.
        holder: int16 or int32 [C, T]; None: each cell holds a token of its own head.
        protected: bool [T].
        sizes: int64 [P], slots of each block, >= 1; summing to T.
        keep: int64 [P], slots that each keeps, 1 to its size.
        counts: int64 [C, P], at most `held`.
        held: int64 [C, P], tokens that each head holds of each block.
        layers, pools: of equally many neighbouring heads each.
        competes: whether the heads of a layer compete for what `counts` leaves.

    Returns:
        cells and slots of the sources, cells and slots of the targets, int32 [m]; the slots that
        leave, bool [T]. None: there is no library, or an array has another dtype.
    """
    library = native_library()
    if library is None or scores.dtype != np.float32 or not scores.size:
        return None
    if holder is not None and not _has_holders(holder):
        return None
    scores = _by_rows(scores)
    if holder is not None:
        holder = np.ascontiguousarray(holder)
    heads, count = scores.shape
    words = -(-count // 64)
    lose = sizes - keep
    guard = _guard(protected, sizes, lose)
    sizes, lose, counts, held = (
        np.ascontiguousarray(each, np.int64) for each in (sizes, lose, counts, held)
    )
    longest, each = int(sizes.max()), heads // layers
    keys = np.empty((heads, words * 64 + 16), np.uint32)
    listed = np.empty(longest * (each if holder is None else heads) + 16, np.uint32)
    most = max(int(held.max()), longest * each * competes)
    rest = np.empty(most + 16, np.uint32)
    gone, left = np.empty((heads, words), np.uint64), np.empty(words, np.uint64)
    leaving, moved = np.empty(count, np.bool_), np.empty(1, np.int64)
    job = HeadShareJob(
        scores=_address(scores),
        guard=_address(guard),
        holders=None if holder is None else _address(holder),
        sizes=_address(sizes),
        lose=_address(lose),
        counts=_address(counts),
        held=_address(held),
        keys=_address(keys),
        listed=_address(listed),
        rest=_address(rest),
        gone=_address(gone),
        left=_address(left),
        leaving=_address(leaving),
        moved=_address(moved),
        row=scores.strides[0] // scores.itemsize,
        heads=heads,
        tokens=count,
        blocks=len(sizes),
        words=words,
        layers=layers,
        pools=pools,
        competes=competes,
        wide=holder is not None and holder.itemsize == 4,
    )
    library.share_cells(ctypes.addressof(job))
    moves = np.empty((4, int(moved[0]) + 8), np.int32)
    job.cell, job.source, job.into, job.target = (_address(each) for each in moves)
    library.list_shared(ctypes.addressof(job))
    cell, source, into, target = moves[:, : int(moved[0])]
    return cell, source, into, target, leaving


def _has_holders(holder: NDArray[np.integer]) -> bool:
    """Whether the kernels read an array of KV heads."""
    return holder.dtype in (np.int16, np.int32) and bool(holder.size)


def _by_rows(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scores whose rows are contiguous."""
    row, column = scores.strides
    fits = column == scores.itemsize and row % scores.itemsize == 0
    return scores if fits else np.ascontiguousarray(scores)


def _guard(
    protected: NDArray[np.bool_], sizes: NDArray[np.int64], lose: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Protected tokens leave last; where only they are left, the others leave first."""
    if not protected.any():
        return np.zeros(len(protected), np.uint8)
    ends = np.cumsum(sizes)
    guarded = np.add.reduceat(protected, ends - sizes, dtype=np.int64)
    tight = np.repeat(guarded > sizes - lose, sizes)
    guard: NDArray[np.uint8] = np.where(
        protected, np.where(tight, 0, _LAST), np.where(tight, _FIRST, 0)
    ).astype(np.uint8)
    return guard


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data
