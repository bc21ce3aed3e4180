"""Water-filling: shares in proportion to weights, between floors and caps, that meet a sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Floats, Ints
from arbor.retention.ordering import lowest

# ln of the least weight, relative to the largest; smaller ones are raised: no product overflows
_FAINTEST = -600.0


def waterfill(
    log_weight: Floats, floor: NDArray[np.number], cap: NDArray[np.number], room: float
) -> Floats:
    """k = clip(t w, floor, cap) with the one t for which the sum is the room.

    The sum rises with t, linearly between the breakpoints floor / w and cap / w. They are sorted,
    the piece is found by bisection, and t follows in closed form from the blocks between their
    bounds: O(N log N), exact.
    It maximises sum(w ln k) subject to sum(k) <= room and floor <= k <= cap, where t is 1 / mu.

    Args:
        log_weight: ln w, [N]; logarithms, because weights fall off exponentially with distance.
        floor: least shares, [N]; their sum is at most `room`.
        cap: largest shares, [N], not below the floors.
        room: largest sum of the shares.

    Returns:
        float64 [N], summing to min(room, sum(cap)).
    """
    low, high = floor.astype(np.float64), cap.astype(np.float64)
    least = float(low.sum())
    assert least <= room + 1e-6, f"the floors take {least:g} of {room:g} slots"
    if least >= room:
        return low
    if high.sum() <= room:
        return high
    weight = relative(log_weight)
    rises, ends = low / weight, high / weight
    turns = np.sort(np.concatenate([rises, ends]))
    # the sum at turns[first] is within the room, at turns[last] above it
    first, last = 0, len(turns) - 1
    shares = np.empty_like(weight)
    while last - first > 1:
        middle = (first + last) // 2
        np.multiply(turns[middle], weight, out=shares)
        np.maximum(shares, low, out=shares)
        np.minimum(shares, high, out=shares)
        if shares.sum() <= room:
            first = middle
        else:
            last = middle
    # turns are compared with turns, so that no rounding puts a block on the wrong side of its bound
    full = ends <= turns[first]
    rising = (rises < turns[last]) & ~full
    fixed = high[full].sum() + low[~full & ~rising].sum()
    scale = (room - fixed) / weight[rising].sum() if rising.any() else turns[first]
    # the piece says which are at a bound; rounding may put their products on its other side
    kept: Floats = np.where(full, high, low)
    kept[rising] = np.minimum(np.maximum(scale * weight[rising], low[rising]), high[rising])
    return kept


def relative(log_weight: Floats) -> Floats:
    """Weights [N] relative to the largest, all above 0."""
    if len(log_weight) == 0:
        return log_weight
    weight: Floats = np.exp(np.maximum(log_weight - log_weight.max(), _FAINTEST))
    return weight


def rounded(shares: Floats, floor: Ints, cap: Ints, room: int) -> Ints:
    """Whole tokens by largest remainder; of equal remainders the first index is rounded up.

    Args:
        shares: float64 [N], floor <= share <= cap, summing to at most `room`.

    Returns:
        int64 [N], each less than one from its share, summing to min(room, sum(cap)) where the
        shares do.
    """
    counts = np.clip(np.floor(shares + 1e-9).astype(np.int64), floor, cap)
    left = min(room, round(float(shares.sum()))) - int(counts.sum())
    if left > 0:
        # to 1e-9: shares equal on paper differ in their last bits
        remainder = np.where(counts < cap, np.round(shares - counts, 9), -1.0)
        counts[lowest(-remainder, left)] += 1
    return np.minimum(counts, cap)
