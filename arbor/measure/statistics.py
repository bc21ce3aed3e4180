"""What a sample tells: the interval of a share, of a mean or a median, and of a difference between paired outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

RESAMPLES = 10_000
AT_ONCE = 1 << 22  # numbers that are resampled together


def clopper_pearson(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share, by bisection on the binomial tails (Clopper and Pearson 1934).

    Args:
        right: successes, in [0, n].
        n: trials; without any the interval is [0, 1].
        level: how often such an interval holds the share, at least.
    """
    assert 0 <= right <= n, f"{right} successes in {n} trials"
    ks = np.arange(n + 1)
    of_all = math.lgamma(n + 1)
    ways = np.array([of_all - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)])

    def tail(p: float, first: int, last: int) -> float:
        """P(first <= successes <= last), 0 < p < 1."""
        part = slice(first, last + 1)
        logs = ways[part] + ks[part] * math.log(p) + (n - ks[part]) * math.log1p(-p)
        return float(np.exp(logs).sum())

    def where(grows: bool, first: int, last: int) -> float:
        """The share at which that tail is half of what the interval leaves out."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            below = tail(middle, first, last) < (1 - level) / 2
            low, high = (middle, high) if below == grows else (low, middle)
        return (low + high) / 2

    lower = 0.0 if right == 0 else where(True, right, n)
    upper = 1.0 if right == n else where(False, 0, right)
    return lower, upper


def bootstrap(
    values: Sequence[float] | np.ndarray[Any, Any],
    statistic: Literal["mean", "median"] = "mean",
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of a mean or a median over `RESAMPLES` resamples; the same values give the same interval.

    Args:
        values: at least one.
        statistic: what the interval is of.
        level: the part of the resamples inside.
    """
    data = np.asarray(values, dtype=float)
    assert data.ndim == 1 and len(data), "there is nothing to resample"
    rng = np.random.default_rng(0)
    rows = max(1, AT_ONCE // len(data))
    reduce: Any = np.mean if statistic == "mean" else np.median
    found = np.concatenate(
        [
            reduce(rng.choice(data, (min(rows, RESAMPLES - done), len(data))), axis=1)
            for done in range(0, RESAMPLES, rows)
        ]
    )
    half = 50 * (1 - level)
    low, high = np.percentile(found, [half, 100 - half])
    return float(low), float(high)


def bootstrap_groups(
    groups: np.ndarray[Any, Any],
    statistic: Callable[[np.ndarray[Any, Any]], float],
    level: float = 0.95,
    resamples: int = 1000,
) -> tuple[float, float]:
    """Percentile interval of any statistic of values that belong together in groups: whole groups are drawn.

    Args:
        groups: [N], the group of each value.
        statistic: of the values at these indices, int64 [M].
        level: the part of the resamples inside.
        resamples: how often groups are drawn; the same groups give the same draws.
    """
    members = [np.flatnonzero(groups == each) for each in np.unique(groups)]
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(members), (resamples, len(members)))
    found = [statistic(np.concatenate([members[i] for i in row])) for row in drawn]
    half = 50 * (1 - level)
    low, high = np.percentile(found, [half, 100 - half])
    return float(low), float(high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of paired outcomes: could a fair coin have shared out the pairs that differ like this?

    Args:
        only_first, only_second: pairs in which only the one of the two succeeded.
    """
    total, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, 2 * tail / (1 << total))


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs on the same problems.

    Attributes:
        n: pairs.
        both, only_first, only_second, neither: pairs by who succeeded.
        difference: share of the first minus share of the second.
        interval: bootstrap 95 % interval of the difference.
        p: exact McNemar p-value.
    """

    n: int
    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    interval: tuple[float, float]
    p: float


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Compares two runs, pair by pair.

    Args:
        first, second: who succeeded, in the same order; at least one pair.
    """
    one, other = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    assert one.shape == other.shape and len(one), "outcomes come in pairs"
    only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
    difference = one.astype(float) - other
    return Paired(
        n=len(one),
        both=int((one & other).sum()),
        only_first=only_first,
        only_second=only_second,
        neither=int((~one & ~other).sum()),
        difference=float(difference.mean()),
        interval=bootstrap(difference),
        p=mcnemar(only_first, only_second),
    )
