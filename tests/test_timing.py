"""Interleaved timings, and which differences exceed the noise."""

from __future__ import annotations

import itertools

from arbor.measure.timing import Timing, interleaved, regressed


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
