"""Measurements: contestants in turn, ratios of their times, shares solved, and areas (AUC)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from arbor.measure.statistics import bootstrap, clopper_pearson, paired
from arbor.measure.timing import interleaved

Values = Sequence[float] | np.ndarray[Any, Any]


def in_turn(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm: int = 1,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each contestant's call, round by round; the first `warm` rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for lap in interleaved(contestants, warm, rounds, cpu=clock):
        seconds[lap.name].append(lap.cpu_s)
    return {name: np.array(each) for name, each in seconds.items()}


def interval(ratios: Values) -> tuple[float, float, float]:
    """Median and bootstrap 95 % interval (10,000 resamples)."""
    return (float(np.median(ratios)), *bootstrap(ratios, "median"))


def ratio_columns(ratios: Values, names: Sequence[str], digits: int = 3) -> dict[str, float]:
    """The median of ratios and its interval, by the names of three columns."""
    return {name: round(value, digits) for name, value in zip(names, interval(ratios), strict=True)}


RATIO = ("ratio", "ratio_low", "ratio_high")


def auc(values: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """The probability that a right one has the higher value than a wrong one; ties count a half.

    NaN where all are of one kind.
    """
    from scipy.stats import rankdata

    count = int(right.sum())
    pairs = count * (len(right) - count)
    if not pairs:
        return math.nan
    return float(rankdata(values)[right].sum() - count * (count + 1) / 2) / pairs


def solved_columns(right: Sequence[bool], exact: Sequence[bool]) -> dict[str, float]:
    """Percent solved with its Clopper-Pearson interval, and the paired difference in points."""
    against = paired(right, exact)
    low, high = clopper_pearson(sum(right), len(right))
    shares = {
        "solved": sum(right) / len(right),
        "solved_low": low,
        "solved_high": high,
        "points": against.difference,
        "points_low": against.interval[0],
        "points_high": against.interval[1],
    }
    return {name: round(100 * share, 2) for name, share in shares.items()}
