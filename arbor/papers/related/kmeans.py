"""K-means over few points, and the real point nearest to each centre."""

from __future__ import annotations

import numpy as np

from arbor.retention.base import Floats, Ints

_ROUNDS = 20  # of Lloyd's algorithm; most sets settle in fewer
_EQUAL = 1e-5  # squared distances closer than this part of the mean square are equal


def representatives(products: Floats, count: int) -> Ints:
    """The points nearest to the centres of K-means with k = `count`.

    Nothing is drawn: the first centre is the point nearest to the mean, each further one the point
    farthest from those before, then Lloyd's algorithm runs until no point changes its centre, or
    for 20 rounds. A centre is represented by the nearest of its own points. Centres without points
    vanish; in their place stand the points farthest from all representatives. Of equal distances
    the later point counts, and a point between centres belongs to the earlier one; distances are
    equal up to the rounding of float32.

    Args:
        products: float64 [n, n], inner products of the points.
        count: how many, 0 <= count <= n.

    Returns:
        int64 [count], increasing.
    """
    size = len(products)
    if count in (0, size):
        return np.arange(count)
    square = products.diagonal()
    equal = _EQUAL * max(float(square.mean() - products.mean()), 0.0)
    apart = np.maximum(square[:, None] + square - 2 * products, 0)
    seeds = _spread(apart, [_last(2 * products.mean(0) - square, equal)], count, equal)
    centres = np.zeros((count, size))  # weights of the points in each centre
    centres[np.arange(count), seeds] = 1
    owner = np.full(size, -1)
    for _ in range(_ROUNDS):
        away = _distances(products, centres)
        nearest = (away <= away.min(0) + equal).argmax(0)
        if (nearest == owner).all():
            break
        owner = nearest
        centres = (owner == np.unique(owner)[:, None]).astype(np.float64)
        centres /= centres.sum(1, keepdims=True)
        owner = centres.argmax(0)  # numbered without the centres that vanished
    near = np.where(centres > 0, -_distances(products, centres) - square, -np.inf)
    found = [_last(each, equal) for each in near]
    return np.sort(_spread(apart, found, count, equal))


def _distances(products: Floats, centres: Floats) -> Floats:
    """Squared distances of points to centres [k, n], less each point's own square."""
    along: Floats = centres @ products
    distances: Floats = (along * centres).sum(1, keepdims=True) - 2 * along
    return distances


def _spread(apart: Floats, chosen: list[int], count: int, equal: float) -> Ints:
    """Points and more of them, `count` in all: each the farthest from those before.

    Args:
        apart: float64 [n, n], squared distances.
        chosen: the first ones.
        count: at most n.
        equal: largest difference of equal distances.
    """
    chosen = list(chosen)
    near = apart[chosen].min(0)
    near[chosen] = -np.inf
    while len(chosen) < count:
        chosen.append(_last(near, equal))
        near = np.minimum(near, apart[chosen[-1]])
        near[chosen[-1]] = -np.inf
    return np.array(chosen, np.int64)


def _last(values: Floats, equal: float) -> int:
    """The last index of the greatest of values, which may differ by `equal`."""
    return int(np.flatnonzero(values >= values.max() - equal)[-1])
