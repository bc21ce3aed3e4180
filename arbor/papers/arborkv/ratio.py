"""ArborKV's tree-aware eviction: a ratio for each block, from its score and place in the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from arbor.components import ONLY_IF_SET
from arbor.errors import check_settings
from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers import HeavyHitters

_MOST = 1_000_000  # of an exponent's factor, so that no weight overflows


@dataclass(frozen=True)
class BlockWeights:
    """w = s^gamma e^(-lambda_d d - lambda_Delta Delta), by which both forms of ArborKV go.

    Attributes:
        gamma: weight of the score, > 0.
        lambda_depth: decay per edge from the root; any sign.
        lambda_distance: decay per edge from the nearest running leaf, >= 0.
        value: v of the score. ``verifier``: the value of a block; ``controller``: the figure by
            which the search chooses (ArborKV section 4), where that is another (`mcts`, `dpts`).
    """

    reads_values: ClassVar[bool] = True  # `Blocks.score`

    gamma: float = 2.0
    lambda_depth: float = 0.0
    lambda_distance: float = 0.5
    value: Literal["verifier", "controller"] = field(default="verifier", metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        check_settings(
            self,
            gamma=(0 < self.gamma <= _MOST, f"above 0 and at most {_MOST:,}"),
            lambda_depth=(abs(self.lambda_depth) <= _MOST, f"from -{_MOST:,} to {_MOST:,}"),
            lambda_distance=(0 <= self.lambda_distance <= _MOST, f"from 0 to {_MOST:,}"),
            value=(self.value in ("verifier", "controller"), "verifier or controller"),
        )

    def log_weights(self, blocks: Blocks) -> Floats:
        """ln w, float64 [M]."""
        score = np.log(np.maximum(blocks.score, 1e-300))
        far = self.lambda_depth * blocks.depth
        weight: Floats = self.gamma * score - far - self.lambda_distance * blocks.distance
        return weight


@dataclass(frozen=True)
class Ratio(BlockWeights):
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
        ratio_min: least ratio, in [0, 1].
    """

    eta: float = 0.5
    ratio_min: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(
            self,
            eta=(0 < self.eta <= 1, "above 0 and at most 1, such as 0.5"),
            ratio_min=(0 <= self.ratio_min <= 1, "from 0 to 1"),
        )

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = self.log_weights(blocks)
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
