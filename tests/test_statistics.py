"""Intervals and p-values against values from the literature and against their definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.measure.statistics import clopper_pearson, mcnemar


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


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (10, 2, 0.038574), (6, 7, 1.0)],
)
def test_mcnemar_is_a_fair_coin(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, abs=1e-6)
    assert mcnemar(only_second, only_first) == mcnemar(only_first, only_second)
