"""The same ratio for all blocks: the control that sees no tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import Blocks, Ints, Scorer


@dataclass(frozen=True)
class Uniform:
    """Every block keeps the same part of its length: k = clip(r n, floor, resident), one r for all.

    r is solved so that the sum meets the room; integers by largest remainder, ties by node id.
    Source: the control of ArborKV's comparison; the same as a pool-wide compression ratio.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        level = np.log(np.maximum(blocks.length, 1))
        kept = waterfill(level, blocks.floor, blocks.resident, room)
        return rounded(kept, blocks.floor, blocks.resident, room)
