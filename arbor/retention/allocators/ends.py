"""Running paths whole first, then the same part of every idle block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.allocators.lru import LRU
from arbor.retention.allocators.uniform import Uniform
from arbor.retention.base import Blocks, Ints, Scorer


@dataclass(frozen=True)
class Ends:
    """Blocks of running paths keep all they hold, idle ones share what is left as `Uniform` says;
    where not even the paths fit, their first blocks stay whole as `LRU` says.

    Source: ours, from what lost fewest answers in trees (`uniform`) and on single paths (`lru`).
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        on, off = np.flatnonzero(blocks.active), np.flatnonzero(~blocks.active)
        counts = np.zeros(len(blocks), np.int64)
        for_paths = room - int(blocks.floor[off].sum())
        for_paths = min(for_paths, int(blocks.resident[on].sum()))
        counts[on] = LRU().counts(blocks.only(on), for_paths, scorer)
        counts[off] = Uniform().counts(blocks.only(off), room - for_paths, scorer)
        return counts
