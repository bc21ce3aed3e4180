"""Interleaved timings, and whether two of them differ by more than the noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

FEWEST = 3  # repetitions; a spread of fewer is meaningless


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated timings of one contestant.

    Attributes:
        seconds: one for each repetition, in their order; at least `FEWEST`.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.seconds) >= FEWEST, f"a spread needs {FEWEST} timings"

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile, interpolated."""
        low, middle, high = (float(q) for q in np.percentile(self.seconds, (25, 50, 75)))
        return low, middle, high

    @property
    def median(self) -> float:
        """Half of the timings are longer."""
        return self.quartiles[1]

    @property
    def spread(self) -> float:
        """Interquartile range: the middle half of the timings lies within."""
        low, _, high = self.quartiles
        return high - low


def differs(one: Timing, other: Timing) -> bool:
    """Whether the medians are further apart than the larger of the two spreads."""
    return abs(one.median - other.median) > max(one.spread, other.spread)


def regressed(now: Timing, before: Timing, most: float) -> bool:
    """Whether the median grew by more than `most` (0.05 is 5 %), and by more than the noise."""
    return now.median > before.median * (1 + most) and differs(now, before)


@dataclass(frozen=True, slots=True)
class Lap:
    """One timed call: the contestant, its processor and wall seconds, and its result."""

    name: str
    cpu_s: float
    wall_s: float
    result: object


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    warmup: int,
    repeat: int,
    cpu: Callable[[], float] = time.process_time,
    wall: Callable[[], float] = time.perf_counter,
) -> Iterator[Lap]:
    """Call every contestant once a round, each round starting with the next one.

    A drift of the machine's speed then affects all alike.

    Args:
        contestants: by name.
        warmup: rounds before the timed ones.
        repeat: timed rounds.
        cpu, wall: clocks; processor time is that of all threads of the process.

    Yields:
        The timed calls, as they happen.
    """
    names = list(contestants)
    for round_ in range(warmup + repeat):
        for name in turned(names, round_):
            began_cpu, began = cpu(), wall()
            result = contestants[name]()
            lap = Lap(name, cpu() - began_cpu, wall() - began, result)
            if round_ >= warmup:
                yield lap


def turned(names: Sequence[T], by: int) -> list[T]:
    """The names rotated left by `by` places."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]
