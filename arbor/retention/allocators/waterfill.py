"""Water-filling: shares in proportion to weights, between a floor and a cap each, that meet a sum exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Floats, Ints
from arbor.retention.ordering import first as lowest

# e^-600: a weight that is less than this part of the largest counts as this, so that no product overflows
_FAINTEST = -600.0


def waterfill(
    log_weight: Floats, floor: NDArray[np.number], cap: NDArray[np.number], room: float
) -> Floats:
    """k = clip(t w, floor, cap) with the one t for which the sum is the room.

    The sum rises with t, linearly between the breakpoints floor / w and cap / w. They are sorted, the piece is found by
    halving, and t follows in closed form from the blocks that are between their bounds there: O(N log N), exact.
    This is the optimum of: maximise sum(w ln k) subject to sum(k) <= room and floor <= k <= cap; t is 1 / mu.

    Args:
        log_weight: ln w, [N]; logarithms, because weights fall off exponentially with distance.
        floor: least shares, [N]; their sum is at most `room`.
        cap: largest shares, [N], not below the floors.
        room: what the shares may sum to.

    Returns:
        float64 [N], summing to min(room, sum(cap)).
    """
    low, high = floor.astype(np.float64), cap.astype(np.float64)
    least = float(low.sum())
    assert least <= room + 1e-6, f"the floors take {least:g}, there is room for {room:g}"
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
    kept: Floats = np.minimum(np.maximum(scale * weight, low), high)
    return kept


def relative(log_weight: Floats) -> Floats:
    """Weights [N] relative to the largest, all above 0."""
    if len(log_weight) == 0:
        return log_weight
    weight: Floats = np.exp(np.maximum(log_weight - log_weight.max(), _FAINTEST))
    return weight


def rounded(shares: Floats, floor: Ints, cap: Ints, room: int) -> Ints:
    """Whole tokens by largest remainder; equal remainders by index, the first one up.

    Args:
        shares: float64 [N], floor <= share <= cap, summing to at most `room`.

    Returns:
        int64 [N], each less than one away from its share, summing to min(room, sum(cap)) where the shares do.
    """
    counts = np.clip(np.floor(shares + 1e-9).astype(np.int64), floor, cap)
    left = min(room, round(float(shares.sum()))) - int(counts.sum())
    if left > 0:
        # to a billionth: shares that are equal on paper differ in their last bits
        remainder = np.where(counts < cap, np.round(shares - counts, 9), -1.0)
        counts[lowest(-remainder, left)] += 1
    return np.minimum(counts, cap)
