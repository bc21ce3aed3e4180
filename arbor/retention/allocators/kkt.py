"""Exact water-filling of ArborKV's optimisation view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.errors import UsageError
from arbor.retention.allocators.waterfill import relative, rounded, waterfill
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.ordering import order


@dataclass(frozen=True)
class KKT:
    """Maximise sum(w ln k) within the room: k = clip(w / mu, floor, resident), ArborKV section 4.

        w = s^gamma e^(-lambda_d d - lambda_Delta Delta)

    mu is solved exactly by sorted breakpoints, O(N log N); integers by largest remainder, ties by node id, and then by
    moving single tokens for as long as that gains: the optimum over whole tokens.
    Differs from the paper: its text draws the conclusion r proportional to w; the solution is k proportional to w
    (`Ratio` is the former). Its Pressure loop takes tokens one by one by an undefined priority and never ends once the
    block it picks is at its minimum; with the utility a token is worth, and blocks at their minimum left out, it arrives
    at these counts.

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
        shares = waterfill(level, blocks.floor, blocks.resident, room)
        counts = rounded(shares, blocks.floor, blocks.resident, room)
        return _exchanged(counts, relative(level), blocks.floor, blocks.resident)


def _exchanged(counts: Ints, weight: Floats, floor: Ints, cap: Ints) -> Ints:
    """Move tokens to where they are worth more, sum(w ln k), until none is.

    Rounding leaves few to move, and every pass gains. A block cannot both win and lose in a pass: what its next token is
    worth to it is less than what its last one is.
    """
    while len(counts):
        with np.errstate(divide="ignore"):
            gain = np.where(counts < cap, weight * np.log1p(1 / counts), -np.inf)
            loss = np.where(counts > floor, -weight * np.log1p(-1 / np.maximum(counts, 1)), np.inf)
        slack = 1 + 1e-12  # equals are not exchanged for ever
        winners = np.flatnonzero(gain > loss.min() * slack)
        losers = np.flatnonzero(gain.max() > loss * slack)[::-1]  # of equals the later one loses
        winners = winners[order(-gain[winners], -weight[winners])][: len(losers)]
        losers = losers[order(loss[losers])][: len(winners)]
        moves = gain[winners] > loss[losers] * slack
        if not moves.any():
            break
        counts[winners[moves]] += 1
        counts[losers[moves]] -= 1
    return counts


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
