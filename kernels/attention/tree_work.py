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
COLUMNS = 8  # numbers of an item
STEP_KEYS = 64  # an item's keys are a multiple, but for the last of a list
ROOM = 64  # keys that a row's own list may grow by before all is planned anew


@dataclass(frozen=True, slots=True)
class TreeWork:
    """Items of one layout and shape.

    Attributes:
        items: int32 [W, 8]: the numbers of `level_items`, where its rows' places begin, and 1 if it
            ends a list that grows.
        places: int32, of each item and each of its rows: the part it writes.
        ends: int32 [T + 1]: row r's parts are ``ends[r] <= part < ends[r + 1]``.
        slots: int32, the keys of all levels, and room after each list that grows.
        grown: int32 [1], keys that each of these lists was given since.
        next: int64, CPU, the place in `slots` of the next key of each.
    """

    items: Tensor
    places: Tensor
    ends: Tensor
    slots: Tensor
    grown: Tensor
    next: Tensor

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """What the kernel reads, in order."""
        return self.items, self.places, self.ends, self.slots, self.grown


def wide_tile(shape: AttentionShape) -> int:
    """Pairs of a row and a query head in the tile of rows that share keys; a power of two."""
    group = 1 << (shape.group - 1).bit_length()
    widest = max(shape.head_dim_qk, shape.head_dim_vo)
    return max(group, WIDE if widest <= WIDEST_HEAD else NARROW)


def most_work(shape: AttentionShape, rows: int, levels: int) -> tuple[int, int]:
    """Items and parts of a step, at most.

    Spans that are nested in each other, no two of them of the same rows, are fewer than the rows.

    Args:
        shape: of the layers.
        rows: of the step.
        levels: the last one included.
    """
    tile_rows = wide_tile(shape) // shape.group
    cuts = PROGRAMS // shape.num_kv_heads
    more = 0 if shape.window is None else rows  # a window may begin between two cuts
    shared = rows + (levels - 1) * -(-rows // tile_rows) if levels > 1 else 0
    return rows + more + shared + cuts, levels * rows + more + cuts * tile_rows


def appends(before: CascadeLayout, now: CascadeLayout) -> bool:
    """Whether a layout is an earlier one with one more key at the end of each row's own list.

    Args:
        before: of a step with one token a row.
        now: of a step; shared levels that stay are the same objects.
    """
    (*shared, last), (*others, own) = before.levels, now.levels
    if before.rows != now.rows or len(shared) != len(others):
        return False
    if len(own.kv_indptr) != len(last.kv_indptr):
        return False
    if any(one is not other for one, other in zip(shared, others, strict=True)):
        return False
    ends = own.kv_indptr.numpy()
    if not np.array_equal(ends, last.kv_indptr.numpy() + np.arange(len(ends))):
        return False
    kept = np.delete(own.kv_indices.numpy(), ends[1:] - 1)
    return np.array_equal(kept, last.kv_indices.numpy())


def tree_work(layout: CascadeLayout, shape: AttentionShape, growing: int = 0) -> TreeWork:
    """The items of a layout, on the CPU.

    All keys, cut into `PROGRAMS` equal items, give the most keys of an item; the longest items come
    first. So a GPU's multiprocessors, which take one after another, end together. Rows of one block
    of keys that do not fit a tile are neighbours: the second reads keys from the cache.

    Args:
        layout: of the forward.
        shape: of the layers; without a window if lists grow.
        growing: the first so many rows have lists of their own on the last level that may grow by
            `ROOM` keys.

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
    grows, slots, following = _with_room(items, layout, growing)
    return TreeWork(
        _int32(np.column_stack((items, first_place, grows))),
        _int32(places),
        _int32(ends),
        slots,
        torch.zeros(1, dtype=torch.int32),
        torch.from_numpy(following),
    )


def _with_room(
    items: Numbers, layout: CascadeLayout, growing: int
) -> tuple[Numbers, Tensor, Numbers]:
    """Move the keys of the lists that grow apart, in place.

    Returns:
        [W]: 1 where an item ends such a list; `TreeWork.slots`; `TreeWork.next`.
    """
    slots = torch.cat([level.kv_indices for level in layout.levels])
    grows = np.zeros(len(items), np.int64)
    if not growing:
        return grows, slots, np.empty(0, np.int64)
    last = layout.levels[-1]
    first = len(slots) - len(last.kv_indices)
    ends = first + last.kv_indptr.numpy().astype(np.int64)
    before = ROOM * np.minimum(np.arange(len(ends)), growing)  # each row's list
    own = np.flatnonzero(items[:, 2] >= first)
    row = items[own, 0]
    grows[own] = (row < growing) & (items[own, 3] == ends[row + 1])
    items[own, 2:5] += before[row, None]
    spread = torch.zeros(len(slots) + int(before[-1]), dtype=torch.int32)
    spread[:first] = slots[:first]
    spread[first + np.arange(len(slots) - first) + np.repeat(before[:-1], np.diff(ends))] = slots[
        first:
    ]
    return grows, spread, (ends[1:] + before[:-1])[:growing]


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
