"""Sorting by several keys with declared ties, and filling whole blocks in such an order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Blocks, Ints

_KEY_LIMIT = 1 << 62  # packed keys stay below: no overflow


def order(*keys: NDArray[Any]) -> Ints:
    """Indices that sort by the first key, then by the second, and so on; equal ones by index.

    The keys are packed into one integer with the index in its last digits: one sort of distinct
    numbers, in which no sort's order of equal numbers can show.

    Args:
        keys: each [N], integers or floats without NaN; ascending.

    Returns:
        int64 [N].
    """
    count = len(keys[0])
    if count == 0:
        return np.empty(0, np.int64)
    packed, width = np.zeros(count, np.int64), 1
    for key in keys:
        digits, base = _digits(key)
        if base == 1:
            continue
        if width * base * count >= _KEY_LIMIT:
            digits, base = ranks(key)
        if width * base * count >= _KEY_LIMIT:
            packed, width = ranks(packed)
        packed = packed * base + digits
        width *= base
    packed = np.sort(packed * count + np.arange(count))
    return packed % count


def lowest(key: NDArray[Any], count: int) -> Ints:
    """Indices of the `count` lowest numbers of a key [N], in no order; of equal ones the first."""
    if not 0 < count < len(key):
        return np.arange(min(max(count, 0), len(key)))
    # a partition is slower where many are equal
    most = np.sort(key)[count - 1]
    below, level = np.flatnonzero(key < most), np.flatnonzero(key == most)
    return np.concatenate([below, level[: count - len(below)]])


def ranks(key: NDArray[Any]) -> tuple[Ints, int]:
    """Dense ranks [N] of a key, equal for equal values, and the number of ranks."""
    by_value = np.argsort(key)
    ascending = key[by_value]
    steps = np.zeros(len(key), np.int64)
    np.cumsum(ascending[1:] != ascending[:-1], out=steps[1:])
    result = np.empty(len(key), np.int64)
    result[by_value] = steps
    return result, int(steps[-1]) + 1


def ranks_within(group: Ints, *keys: NDArray[Any]) -> Ints:
    """The place of each in its group, int64 [N], from 0; sorted as `order` does.

    Args:
        group: int64 [N], numbers from 0.
        keys: each [N].
    """
    preferred = order(group, *keys)
    sizes = np.bincount(group)
    places = np.empty(len(group), np.int64)
    places[preferred] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def filled(spare: Ints, room: int, preferred: Ints) -> Ints:
    """How much of a room each takes, int64 [N]: one after the other all that it can.

    Args:
        spare: int64 [N], the most each takes, >= 0.
        room: in all.
        preferred: int64 [N], the order.
    """
    most = spare[preferred]
    taken = np.empty_like(spare)
    taken[preferred] = np.clip(room - (np.cumsum(most) - most), 0, most)
    return taken


def whole_blocks(blocks: Blocks, room: int, preferred: Ints) -> Ints:
    """Fill blocks one after the other, above their floors, until the room is used up.

    Args:
        blocks: the blocks that may lose tokens.
        room: slots they may keep together.
        preferred: int64 [M], the order to fill them in.

    Returns:
        int64 [M]: whole blocks, then at most one in part, then blocks at their floors.
    """
    left = room - int(blocks.floor.sum())
    assert left >= 0, f"the floors take {room - left} of {room} slots"
    return blocks.floor + filled(blocks.resident - blocks.floor, left, preferred)


def _digits(key: NDArray[Any]) -> tuple[Ints, int]:
    """A key as integers from 0, and an upper limit for them; above int64's they have wrapped."""
    if key.dtype.kind == "f":
        assert not np.isnan(key).any(), "a key is not a number"
        return ranks(key)
    low, high = int(key.min()), int(key.max())
    digits = key.astype(np.int64) - low
    return digits, high - low + 1
