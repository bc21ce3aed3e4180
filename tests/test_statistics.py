"""Intervals and p-values against values from the literature and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.measure.statistics import bootstrap, bootstrap_groups, clopper_pearson, mcnemar, paired


@pytest.mark.parametrize(
    ("right", "n", "expected"),
    [
        (0, 10, (0.0, 0.308497)),  # 1 - 0.025 ** (1 / 10)
        (10, 10, (0.691503, 1.0)),
        (5, 10, (0.187086, 0.812914)),
        (1, 20, (0.001265, 0.248733)),
    ],
)
def test_the_interval_of_a_share_is_the_published_one(
    right: int, n: int, expected: tuple[float, float]
) -> None:
    assert clopper_pearson(right, n) == pytest.approx(expected, abs=5e-6)


def test_the_interval_of_no_trial_is_everything() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_the_interval_are_where_the_tails_are_a_fortieth(pair: tuple[int, int]) -> None:
    right, n = pair
    lower, upper = clopper_pearson(right, n)

    def tail(p: float, ks: range) -> float:
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in ks)

    assert lower <= right / n <= upper
    if right > 0:
        assert tail(lower, range(right, n + 1)) == pytest.approx(0.025, rel=1e-6)
    if right < n:
        assert tail(upper, range(right + 1)) == pytest.approx(0.025, rel=1e-6)


def test_a_wider_level_is_a_wider_interval() -> None:
    narrow, wide = clopper_pearson(30, 50, 0.8), clopper_pearson(30, 50, 0.99)

    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (10, 2, 0.038574), (6, 7, 1.0)],
)
def test_mcnemar_is_a_fair_coin(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, abs=1e-6)
    assert mcnemar(only_second, only_first) == mcnemar(only_first, only_second)


def test_thousands_of_pairs_are_no_overflow() -> None:
    assert 0 < mcnemar(2600, 2400) < 0.01


def test_the_bootstrap_of_a_mean_is_the_normal_interval_where_there_is_much() -> None:
    values = np.random.default_rng(1).normal(3, 2, 4000)

    low, high = bootstrap(values)

    half = 1.96 * values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    assert bootstrap(values) == (low, high), "the same values give the same interval"


def test_the_bootstrap_of_a_median_is_of_the_median() -> None:
    values = [1.0] * 9 + [1000.0]

    assert bootstrap(values, "median") == (1.0, 1.0)
    assert bootstrap(values, "mean")[1] > 100


def test_the_interval_of_one_value_or_one_group_is_that_value() -> None:
    assert bootstrap([2.5]) == (2.5, 2.5)
    assert bootstrap_groups(np.zeros(4, int), lambda at: float(len(at))) == (4.0, 4.0)


def test_a_pair_counts_once() -> None:
    first = [True] * 6 + [False] * 4
    second = [True] * 2 + [False] * 4 + [True] + [False] * 3

    found = paired(first, second)

    assert (found.n, found.both, found.only_first, found.only_second, found.neither) == (
        *(10, 2, 4, 1, 3),
    )
    assert found.difference == pytest.approx(0.3)
    assert found.interval[0] < 0.3 < found.interval[1]
    assert found.p == mcnemar(4, 1)


def test_groups_are_drawn_whole() -> None:
    groups, values = np.repeat(np.arange(20), 5), np.repeat(np.linspace(0, 1, 20), 5)

    def mean(at: np.ndarray) -> float:
        assert (np.bincount(groups[at], minlength=20) % 5 == 0).all()
        return float(values[at].mean())

    low, high = bootstrap_groups(groups, mean)
    alone = bootstrap(values)
    assert low < 0.5 < high
    assert high - low > 1.5 * (alone[1] - alone[0]), "equal values in a group add nothing"
    assert bootstrap_groups(groups, mean) == (low, high)
