"""FetchCosts: whether missing KV is copied back from a lower tier or computed again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Self

from arbor.errors import UsageError
from arbor.support.setting import setting

FORM = "host=120+0.5;disk=200+4;key=0.01;forward=1:900,64:3000"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive missing tokens of a block.

    Attributes:
        tokens: how many.
        context: tokens before them on the path.
        tier: name of the tier that holds them: ``host``, ``compressed`` or ``disk``.
    """

    tokens: int
    context: int
    tier: str


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What a fetch and a recomputation take, in microseconds, on one machine for one model.

    A fetch of n tokens takes `event + token * n` of its tier. Recomputed tokens ride along in a
    forward that runs anyway: n tokens after c others next to B rows take
    `forward(B + n) - forward(B) + key * n * c`, where `forward` is measured at a few numbers of
    rows, linear between them, and starts at 0.

    Attributes:
        tiers: (name, event, token) of each tier.
        key: per recomputed token and token before it.
        forward: (rows, time of a forward with as many), rows increasing.
    """

    tiers: tuple[tuple[str, float, float], ...]
    key: float
    forward: tuple[tuple[int, float], ...]

    def of_forward(self, rows: int) -> float:
        """Microseconds of a forward with so many rows and little context."""
        if rows <= 0:
            return 0.0
        points = self.forward
        if rows <= points[0][0]:
            return points[0][1]
        at = next((i for i, (most, _) in enumerate(points) if rows <= most), len(points) - 1)
        if at == 0:
            return points[0][1]
        (low, below), (high, above) = points[at - 1], points[at]
        return below + (above - below) * (rows - low) / (high - low)

    def of_fetch(self, runs: Sequence[Run]) -> float:
        """Microseconds to fetch runs in one event."""
        total = 0.0
        for name, event, token in self.tiers:
            tokens = sum(run.tokens for run in runs if run.tier == name)
            total += event + token * tokens if tokens else 0.0
        return total

    def of_recompute(self, runs: Sequence[Run], rows: int) -> float:
        """Microseconds that runs add to a forward with other rows."""
        tokens = sum(run.tokens for run in runs)
        keys = sum(run.tokens * run.context for run in runs)
        return self.of_forward(rows + tokens) - self.of_forward(rows) + self.key * keys

    def fetched(self, runs: Sequence[Run], rows: int) -> list[bool]:
        """Which runs are fetched; the others, the shortest, are recomputed.

        Args:
            runs: all that a forward misses and lower tiers hold.
            rows: other rows of the forward.
        """
        order = sorted(range(len(runs)), key=lambda place: runs[place].tokens)
        best, least = 0, math.inf
        for count in range(len(order) + 1):
            again = [runs[place] for place in order[:count]]
            back = [runs[place] for place in order[count:]]
            cost = self.of_recompute(again, rows) + self.of_fetch(back)
            if cost < least:
                best, least = count, cost
        recomputed = set(order[:best])
        return [place not in recomputed for place in range(len(runs))]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Costs as `str` writes them.

        Raises:
            UsageError: anything else.
        """
        try:
            parts = {part.split("=")[0]: part.split("=")[1] for part in text.split(";")}
            key, forward = float(parts.pop("key")), parts.pop("forward")
            points = [point.split(":") for point in forward.split(",")]
            tiers = {name: cost.split("+") for name, cost in parts.items()}
            costs = cls(
                tuple((name, float(event), float(token)) for name, (event, token) in tiers.items()),
                key,
                tuple((int(rows), float(time)) for rows, time in points),
            )
        except (IndexError, KeyError, ValueError):
            costs = None
        if costs is None or not costs._is_sound():
            raise UsageError(
                "fetch",
                f"unknown rule for fetching '{text}'.",
                f"Known: auto, always, or costs in microseconds, as in '{FORM}'.",
            )
        return costs

    def _is_sound(self) -> bool:
        numbers = [self.key, *(time for _, time in self.forward)]
        numbers += [number for _, *costs in self.tiers for number in costs]
        rows = [rows for rows, _ in self.forward]
        known = {name for name, *_ in self.tiers} <= {"host", "compressed", "disk"}
        rising = rows == sorted(set(rows)) and min(rows) > 0
        return known and rising and all(0 <= number < math.inf for number in numbers)

    def __str__(self) -> str:
        tiers = [f"{name}={_short(event)}+{_short(token)}" for name, event, token in self.tiers]
        forward = ",".join(f"{rows}:{_short(time)}" for rows, time in self.forward)
        return ";".join([*tiers, f"key={_short(self.key)}", f"forward={forward}"])


def _short(number: float) -> str:
    """Four digits that count, without an exponent."""
    return format(Decimal(f"{number:.4g}"), "f")


def check_fetch(text: str) -> str:
    """A way to choose between a copy and a recomputation.

    Raises:
        UsageError: neither one of the words nor costs.
    """
    if text not in ("auto", "always"):
        FetchCosts.parse(text)
    return text


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """When KV in a lower tier is copied back.

    Attributes:
        fetch: ``auto``, where that is faster than computing it, as measured once for this model on
            this machine; ``always``; or the numbers of a measurement.
    """

    HEADING = "KV budget"

    fetch: str = setting(
        "auto",
        "Copy KV back where that is faster than computing it (auto), or always.",
        shown="set",
        read=check_fetch,
    )
