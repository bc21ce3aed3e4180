"""ArborKV's tree-aware eviction: a ratio for each block, from its score and place in the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arbor.errors import UsageError
from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers.heavy_hitters import HeavyHitters


@dataclass(frozen=True)
class Ratio:
    """Tree-Aware Eviction (TAE), ArborKV Eqs. 2-3.

        r = clip(alpha eta^[off path] s^gamma e^(-lambda_d d) e^(-lambda_Delta Delta), ratio_min, 1)
        k = min(n, max(floor, r n)), at most what is resident

    Differs from the paper: Algorithm 1 leaves out eta, this follows Eq. 2; alpha is solved, not
    set, so that the counts meet the room in one pass (Pressure is the same call with less room);
    integers go by largest remainder, ties by node id, where the paper rounds every block down;
    where `ratio_min` needs more than the room, every block gets the same part of its need above its
    floor.

    Attributes:
        eta: factor of a block off the running paths, in (0, 1]; 1 = no sibling coordination.
        gamma: weight of the score, > 0.
        lambda_depth: decay per edge from the root; any sign.
        lambda_distance: decay per edge from the nearest running leaf, >= 0.
        ratio_min: least ratio, in [0, 1].
    """

    reads_values: ClassVar[bool] = True  # `Blocks.score`

    eta: float = 0.5
    gamma: float = 2.0
    lambda_depth: float = 0.0
    lambda_distance: float = 0.5
    ratio_min: float = 0.0

    def __post_init__(self) -> None:
        check_decay(self.gamma, self.lambda_depth, self.lambda_distance)
        if not 0 < self.eta <= 1:
            raise UsageError(
                "setting-range", f"eta={self.eta}: it must be above 0 and at most 1, such as 0.5."
            )
        if not 0 <= self.ratio_min <= 1:
            raise UsageError(
                "setting-range", f"ratio_min={self.ratio_min}: it must be from 0 to 1."
            )

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = log_weights(blocks, self.gamma, self.lambda_depth, self.lambda_distance)
        level = np.where(blocks.active, level, level + math.log(self.eta))
        level += np.log(np.maximum(blocks.length, 1))
        least = self._least(blocks, room)
        kept = waterfill(level, least, blocks.resident, room)
        return rounded(kept, blocks.floor, blocks.resident, room)

    def _least(self, blocks: Blocks, room: int) -> Floats:
        """max(floor, ratio_min n), or the largest even part of it above the floors that fits."""
        floor = blocks.floor.astype(np.float64)
        wanted: Floats = np.minimum(
            np.maximum(self.ratio_min * blocks.length, floor), blocks.resident
        )
        more = float(wanted.sum() - floor.sum())
        left = room - float(floor.sum())
        if more <= max(left, 0.0):
            return wanted
        return floor + (wanted - floor) * (left / more)


def log_weights(
    blocks: Blocks, gamma: float, lambda_depth: float, lambda_distance: float
) -> Floats:
    """ln w = gamma ln s - lambda_d d - lambda_Delta Delta, float64 [M]."""
    score = np.log(np.maximum(blocks.score, 1e-300))
    weight: Floats = gamma * score - lambda_depth * blocks.depth - lambda_distance * blocks.distance
    return weight


def check_decay(gamma: float, lambda_depth: float, lambda_distance: float) -> None:
    """Check the ranges of the three parameters.

    Raises:
        UsageError: a parameter out of range.
    """
    for name, value, low in (
        ("gamma", gamma, 0.0),
        ("lambda_depth", lambda_depth, -np.inf),
        ("lambda_distance", lambda_distance, 0.0),
    ):
        if not (np.isfinite(value) and value >= low) or (name == "gamma" and value == 0):
            wanted = {"gamma": "above 0", "lambda_distance": "0 or above"}.get(name, "finite")
            raise UsageError("setting-range", f"{name}={value}: it must be {wanted}.")


# ArborKV's L_tail and K_min, which its two forms protect as published
PROTECT = Protect(tail=8, floor=4)

POLICY = Policy(
    Ratio(),
    HeavyHitters(),
    PROTECT,
    spares_paths=True,
    summary="ArborKV as published: tree-aware ratios (TAE), heavy hitters within a block, tails and "
    "sinks protected.",
)
