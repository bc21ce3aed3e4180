"""What single KV heads keep when slots leave, by a native kernel."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from .native import HeadSelectJob, native_library

Places = NDArray[np.int32]
_LAST, _FIRST = 1, 2  # `HeadSelectJob::Guard` of native.h


def head_moves(
    scores: NDArray[np.floating],
    protected: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    lose: NDArray[np.int64],
) -> tuple[Places, Places, Places, NDArray[np.bool_]] | None:
    """`moves_of` what is `given_up` (arbor/retention/head_selection.py), the same places.

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
    if scores.strides[1] != scores.itemsize or scores.strides[0] % scores.itemsize:
        scores = np.ascontiguousarray(scores)
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
