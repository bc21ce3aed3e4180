"""Exact water-filling of ArborKV's optimisation view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.papers.arborkv.ratio import PROTECT, BlockWeights
from arbor.retention.allocators.waterfill import relative, rounded, waterfill
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.ordering import order
from arbor.retention.policy import Policy
from arbor.retention.scorers import HeavyHitters


@dataclass(frozen=True)
class KKT(BlockWeights):
    """Maximise sum(w ln k) within the room: k = clip(w / mu, floor, resident), ArborKV section 4.

    mu is solved exactly by sorted breakpoints, O(N log N); integers by largest remainder, ties by
    node id, and then by moving single tokens for as long as that gains: the optimum over whole
    tokens.
    Differs from the paper: its text concludes r proportional to w; the solution is k proportional
    to w (`Ratio` is the former). Its Pressure loop takes tokens one by one by an undefined priority
    and never ends once the block it picks is at its minimum; with a token's utility as the
    priority, and blocks at their minimum left out, it arrives at these counts.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = self.log_weights(blocks)
        shares = waterfill(level, blocks.floor, blocks.resident, room)
        counts = rounded(shares, blocks.floor, blocks.resident, room)
        return _exchanged(counts, relative(level), blocks.floor, blocks.resident)


def _exchanged(counts: Ints, weight: Floats, floor: Ints, cap: Ints) -> Ints:
    """Move single tokens between blocks for as long as that raises sum(w ln k).

    Rounding leaves few to move, and every pass gains. A block cannot both win and lose in a pass:
    its next token is worth less to it than its last one.
    """
    while len(counts):
        with np.errstate(divide="ignore"):
            gain = np.where(counts < cap, weight * np.log1p(1 / counts), -np.inf)
            loss = np.where(counts > floor, -weight * np.log1p(-1 / np.maximum(counts, 1)), np.inf)
        # without slack equals would be exchanged for ever
        slack = 1 + 1e-12
        winners = np.flatnonzero(gain > loss.min() * slack)
        # of equals the later one loses
        losers = np.flatnonzero(gain.max() > loss * slack)[::-1]
        winners = winners[order(-gain[winners], -weight[winners])][: len(losers)]
        losers = losers[order(loss[losers])][: len(winners)]
        moves = gain[winners] > loss[losers] * slack
        if not moves.any():
            break
        counts[winners[moves]] += 1
        counts[losers[moves]] -= 1
    return counts


POLICY = Policy(
    KKT(),
    HeavyHitters(),
    PROTECT,
    spares_paths=True,
    summary="ArborKV's optimisation view solved exactly, by water-filling; heavy hitters within a "
    "block.",
)
