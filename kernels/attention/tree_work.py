"""Work items of tree attention: a block of keys and the rows that share it, balanced by bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout
from arbor.kernels.attention.work_items import FAR, Numbers, level_items, repeated

# Pairs of a row and a query head in a tile: for rows that share keys, and for a leaf's own keys.
WIDE, NARROW = 64, 16
WIDEST_HEAD = 256  # wider ones take narrow tiles alone
# Programs that keys are cut for: four on each multiprocessor of an H100, so that the last ones to
# end are short.
PROGRAMS = 528
COLUMNS = 7  # numbers of an item
STEP_KEYS = 64  # an item's keys are a multiple, but for the last of a list


@dataclass(frozen=True, slots=True)
class TreeWork:
    """Items of one layout and shape.

    Attributes:
        items: int32 [W, 7]: the numbers of `level_items`, and where its rows' places begin.
        places: int32, of each item and each of its rows: the part it writes.
        ends: int32 [T + 1]: row r's parts are ``ends[r] <= part < ends[r + 1]``.
        slots: int32, the keys of all levels.
    """

    items: Tensor
    places: Tensor
    ends: Tensor
    slots: Tensor

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """Its tensors, in order."""
        return self.items, self.places, self.ends, self.slots


def wide_tile(shape: AttentionShape) -> int:
    """Pairs of a row and a query head in the tile of rows that share keys; a power of two."""
    group = 1 << (shape.group - 1).bit_length()
    widest = max(shape.head_dim_qk, shape.head_dim_vo)
    return max(group, WIDE if widest <= WIDEST_HEAD else NARROW)


def most_work(shape: AttentionShape, rows: int, levels: int, requests: int) -> tuple[int, int]:
    """Items and parts of a decode step, at most.

    Args:
        shape: of the layers.
        rows: of the step, each with a request of its own on the last level.
        levels: the last one included.
        requests: of each shared level.
    """
    tile_rows = wide_tile(shape) // shape.group
    cuts = PROGRAMS // shape.num_kv_heads
    more = 0 if shape.window is None else rows  # a window may begin between two cuts
    shared = (levels - 1) * (requests + -(-rows // tile_rows))
    return rows + more + shared + cuts, levels * rows + more + cuts * tile_rows


def tree_work(layout: CascadeLayout, shape: AttentionShape) -> TreeWork:
    """The items of a layout, on the CPU.

    All keys, cut into `PROGRAMS` equal items, give the most keys of an item; the longest items come
    first. So a GPU's multiprocessors, which take one after another, end together. Rows of one block
    of keys that do not fit a tile are neighbours: the second reads keys from the cache.

    Example:
        Two rows share two keys, and each has one of its own:

        >>> from arbor.kernels.attention.base import CascadeLevel
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> shared = CascadeLevel(ints(0, 2), ints(0, 2), ints(8, 9), causal=False)
        >>> own = CascadeLevel(ints(0, 1, 2), ints(0, 1, 2), ints(3, 4), causal=True)
        >>> work = tree_work(CascadeLayout(2, (shared, own)), AttentionShape(1, 1, 64, 64, 0.1))
        >>> work.items[:, :4].tolist()
        [[0, 2, 0, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
        >>> work.places.tolist(), work.ends.tolist()  # row 0 has parts 0 and 1
        ([0, 2, 1, 3], [0, 2, 4])
    """
    most_rows = wide_tile(shape) // shape.group
    whole = _items(layout, shape, FAR, most_rows)
    keys = int((whole[:, 3] - whole[:, 2]).sum()) * shape.num_kv_heads
    most_keys = max(STEP_KEYS, -(-keys // PROGRAMS // STEP_KEYS) * STEP_KEYS)
    items = _items(layout, shape, most_keys, most_rows)
    items = items[np.argsort(items[:, 2] - items[:, 3], kind="stable")]  # the longest first
    counts = items[:, 1] - items[:, 0]
    item, number = repeated(counts)
    rows = items[item, 0] + number
    places = np.empty_like(rows)
    places[np.argsort(rows, kind="stable")] = np.arange(len(rows))
    ends = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=layout.rows))))
    first_place = np.cumsum(counts) - counts
    return TreeWork(
        _int32(np.concatenate((items, first_place[:, None]), axis=1)),
        _int32(places),
        _int32(ends),
        torch.cat([level.kv_indices for level in layout.levels]),
    )


def _items(layout: CascadeLayout, shape: AttentionShape, most_keys: int, rows: int) -> Numbers:
    """Items of all levels, without keys that none of an item's rows reads."""
    parts, before = [], 0
    for level in layout.levels:
        parts.append(level_items(level, shape, before, most_keys, rows))
        before += len(level.kv_indices)
    items = np.concatenate(parts)
    first_row, end_row, first_key, end_key, offset, span = items.T
    items[:, 2] = np.maximum(first_key, first_row + offset - span + 1)
    items[:, 3] = np.minimum(end_key, end_row + offset)
    return items


def _int32(numbers: Numbers) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers.astype(np.int32)))
