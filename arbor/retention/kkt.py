"""Exact water-filling of ArborKV's optimisation view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.waterfill import rounded, waterfill


@dataclass(frozen=True)
class KKT:
    """Maximise sum(w ln k) within the room: k = clip(w / mu, floor, resident), ArborKV section 4.

        w = s^gamma e^(-lambda_d d - lambda_Delta Delta)

    mu is solved exactly by sorted breakpoints, O(N log N); integers by largest remainder, ties by node id.
    Differs from the paper: its text draws the conclusion r proportional to w; the solution is k proportional to w
    (`Ratio` is the former). Its Pressure loop takes tokens one by one with an undefined priority and never ends once the
    block it picks is at its minimum; with priority w / k it arrives at these counts, up to one token a block.

    Attributes:
        gamma: weight of the score, > 0.
        lambda_depth: decay per edge from the root; any sign.
        lambda_distance: decay per edge from the nearest running leaf, >= 0.
    """

    gamma: float = 2.0
    lambda_depth: float = 0.0
    lambda_distance: float = 0.5

    def __post_init__(self) -> None:
        check_decay(self.gamma, self.lambda_depth, self.lambda_distance)

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = log_weight(blocks, self.gamma, self.lambda_depth, self.lambda_distance)
        kept = waterfill(level, blocks.floor, blocks.resident, room)
        return rounded(kept, blocks.floor, blocks.resident, room)


def log_weight(blocks: Blocks, gamma: float, lambda_depth: float, lambda_distance: float) -> Floats:
    """ln w = gamma ln s - lambda_d d - lambda_Delta Delta, [M]."""
    score = np.log(np.maximum(blocks.score, 1e-300))
    weight: Floats = gamma * score - lambda_depth * blocks.depth - lambda_distance * blocks.distance
    return weight


def check_decay(gamma: float, lambda_depth: float, lambda_distance: float) -> None:
    """The ranges of the three parameters.

    Raises:
        UsageError: one is out of range.
    """
    for name, value, low in (
        ("gamma", gamma, 0.0),
        ("lambda_depth", lambda_depth, -np.inf),
        ("lambda_distance", lambda_distance, 0.0),
    ):
        if not (np.isfinite(value) and value >= low) or (name == "gamma" and value == 0):
            wanted = {"gamma": "above 0", "lambda_distance": "0 or above"}.get(name, "finite")
            raise UsageError("setting-range", f"{name}={value}: it must be {wanted}.")
