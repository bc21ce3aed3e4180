"""Block weights from score and place in the tree, for the allocators of ArborKV."""

from __future__ import annotations

import numpy as np

from arbor.errors import UsageError
from arbor.retention.base import Blocks, Floats


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
