"""Interleaved timings, and which differences exceed the noise."""

from __future__ import annotations

import itertools

import pytest

from arbor.measure.timing import Timing, differs, interleaved, regressed, turned


def test_median_and_quartiles_are_of_the_timings() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))

    assert (timing.quartiles, timing.median, timing.spread) == ((2.0, 3.0, 4.0), 3.0, 2.0)


def test_a_spread_needs_three_timings() -> None:
    with pytest.raises(AssertionError, match="3 timings"):
        Timing((1.0, 1.0))


@pytest.mark.parametrize(
    ("one", "other", "different"),
    [
        ((10, 10, 10), (10, 10, 10), False),
        ((10, 10, 10), (11, 11, 11), True),
        ((8, 10, 12), (9, 11, 13), False),
        ((8, 10, 12), (18, 20, 22), True),
        ((10, 10, 10), (5, 12, 19), False),  # the noise of either counts
    ],
)
def test_less_than_the_noise_is_no_difference(
    one: tuple[float, ...], other: tuple[float, ...], different: bool
) -> None:
    assert differs(Timing(one), Timing(other)) is different
    assert differs(Timing(other), Timing(one)) is different


def test_a_regression_is_more_than_allowed_and_more_than_the_noise() -> None:
    before = Timing((1.0, 1.0, 1.0))

    assert regressed(Timing((1.1, 1.1, 1.1)), before, 0.05)
    assert not regressed(Timing((1.1, 1.1, 1.1)), before, 0.2)
    assert not regressed(Timing((0.9, 1.1, 1.4)), before, 0.05)
    assert not regressed(Timing((0.5, 0.5, 0.5)), before, 0.05), "faster is not a regression"


def test_each_round_begins_with_another_and_warming_up_is_not_timed() -> None:
    called: list[str] = []
    contestants = {name: lambda name=name: called.append(name) or name for name in "abc"}
    cpu, wall = itertools.count(0, 2), itertools.count(0, 5)

    laps = list(interleaved(contestants, 1, 3, lambda: next(cpu), lambda: next(wall)))

    assert "".join(called) == "abcbcacababc"
    assert "".join(lap.name for lap in laps) == "bcacababc"
    assert {(lap.cpu_s, lap.wall_s) for lap in laps} == {(2, 5)}
    assert [lap.result for lap in laps] == [lap.name for lap in laps]


def test_nothing_turned_is_nothing() -> None:
    assert turned([], 3) == []
