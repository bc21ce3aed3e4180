"""Work items of a kernel over slots: which rows meet which block of keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from arbor.kernels.attention.base import AttentionShape, CascadeLevel

Numbers = npt.NDArray[np.int64]

# Larger than any distance of a row and a key.
FAR = 1 << 30


def level_items(
    level: CascadeLevel, shape: AttentionShape, before: int, most_keys: int, most_rows: int
) -> Numbers:
    """Items of one level: each row meets each key it reads in exactly one, and reads one in each.

    Row r of an item reads key k iff ``0 <= r + offset - k < span``.

    Args:
        level: its requests.
        shape: of the layers.
        before: keys of the levels before it.
        most_keys, most_rows: of an item.

    Returns:
        [W, 6]: first_row, end_row, first_key, end_key, offset, span; those of the same keys side by
        side.
    """
    rows = level.qo_indptr.numpy().astype(np.int64)
    keys = level.kv_indptr.numpy().astype(np.int64) + before
    blocks = -(-np.diff(keys) // most_keys)
    request, block = repeated(blocks)
    first_row, end_row = rows[request], rows[request + 1]
    first_key = keys[request] + block * most_keys
    end_key = np.minimum(first_key + most_keys, keys[request + 1])
    if level.causal:
        span = FAR if shape.window is None else min(FAR, shape.window)
        offset = keys[request + 1] - end_row  # row r's own key is r + offset
        # rows that read any of these keys: from the first key's own on, until the last key is too
        # far back
        first_row = np.maximum(first_row, first_key - offset)
        end_row = np.minimum(end_row, end_key - 1 - offset + span)
    else:
        span, offset = 2 * FAR - 1, np.full_like(first_key, FAR)
    chunks = -(-np.maximum(0, end_row - first_row) // most_rows)
    item, chunk = repeated(chunks)
    first_row = first_row[item] + chunk * most_rows
    end_row = np.minimum(first_row + most_rows, end_row[item])
    parts = (first_row, end_row, first_key[item], end_key[item], offset[item])
    return np.stack([*parts, np.full_like(first_row, span)], axis=1)


def repeated(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Each index as often as its count, and the number of each repetition.

    Example:
        >>> [numbers.tolist() for numbers in repeated(np.array([2, 0, 3]))]
        [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
