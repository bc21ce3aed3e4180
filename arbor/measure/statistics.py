"""Confidence intervals of shares, means, medians and paired differences, and McNemar's test.

The computations are SciPy's. It is imported where it is used, and `scipy.stats`, which takes half a
second to import, only by the bootstrap; exact intervals and tests need `scipy.special` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

RESAMPLES = 10_000
GROUPED = 1000  # resamples of groups, whose statistics are slow
BATCH_VALUES = 1 << 22  # values resampled at once


def clopper_pearson(right: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share (Clopper and Pearson 1934).

    Args:
        right: successes, in [0, n]; not whole where each is a mean of several runs.
        n: trials; without any the interval is [0, 1].
        level: lower bound of the probability that the interval covers the share.
    """
    from scipy.special import betaincinv  # quantiles of the beta distribution

    assert 0 <= right <= n, f"{right} successes in {n} trials"
    if n == 0:
        return 0.0, 1.0
    tail = (1 - level) / 2
    low = betaincinv(right, n - right + 1, tail) if right else 0.0
    high = betaincinv(right + 1, n - right, 1 - tail) if right < n else 1.0
    return float(low), float(high)


def bootstrap(
    values: Sequence[float] | np.ndarray[Any, Any],
    statistic: Literal["mean", "median"] = "mean",
) -> tuple[float, float]:
    """Percentile interval (95 %) of a statistic over `RESAMPLES` resamples; deterministic.

    Args:
        values: at least one.
        statistic: of a resample.
    """
    data = np.asarray(values, dtype=float)
    assert data.ndim == 1 and len(data), "no values to resample"
    of = np.mean if statistic == "mean" else np.median
    return _percentile_interval(data, of, RESAMPLES, vectorized=True)


def bootstrap_groups(
    groups: np.ndarray[Any, Any], statistic: Callable[[np.ndarray[Any, Any]], float]
) -> tuple[float, float]:
    """Percentile interval (95 %) of any statistic of grouped values; whole groups are resampled.

    Args:
        groups: [N], the group of each value.
        statistic: of the values at these indices, int64 [M].
    """
    members = [np.flatnonzero(groups == each) for each in np.unique(groups)]

    def of_groups(drawn: np.ndarray[Any, Any]) -> float:
        return statistic(np.concatenate([members[each] for each in drawn]))

    return _percentile_interval(np.arange(len(members)), of_groups, GROUPED, vectorized=False)


def _percentile_interval(
    data: np.ndarray[Any, Any], statistic: Callable[..., Any], resamples: int, vectorized: bool
) -> tuple[float, float]:
    """Percentile bootstrap; `statistic` takes an `axis` if it is vectorized."""
    from scipy.stats import bootstrap as resampled

    if len(data) == 1:  # SciPy wants two; all resamples are alike
        only = float(statistic(data))
        return only, only
    interval = resampled(
        (data,),
        statistic,
        n_resamples=resamples,
        batch=max(1, BATCH_VALUES // len(data)),
        vectorized=vectorized,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of paired outcomes: a fair coin for the pairs that differ.

    Args:
        only_first, only_second: pairs in which only that one succeeded.
    """
    from scipy.special import bdtr

    differing = only_first + only_second
    return min(1.0, 2 * float(bdtr(min(only_first, only_second), differing, 0.5)))


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs on the same problems.

    Attributes:
        n: pairs.
        both, only_first, only_second, neither: pairs by the runs that succeeded.
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
    """Compare two runs pair by pair.

    Args:
        first, second: successes, in the same order; at least one pair.
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
