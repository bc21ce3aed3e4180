"""The tokens of all blocks compete in one pool: what flat policies do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.keep import ranking, scored
from arbor.retention.ordering import order


@dataclass(frozen=True)
class Pooled:
    """The best tokens stay wherever they lie: protected ones first, then by score, ties by recency, then by node id.

    Source: H2O, TOVA and StreamingLLM rank the tokens of one sequence; here the sequence is the whole tree, each shared
    token once (ArborKV calls this flattening). Differs: a block never falls below its floor.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        if int(blocks.resident.sum()) <= room:
            return blocks.resident.copy()
        left = room - int(blocks.floor.sum())
        assert left >= 0, f"the floors take {room - left} tokens, there is room for {room}"
        counts = blocks.floor.copy()
        if left == 0:
            return counts
        tokens = blocks.tokens
        best = ranking(tokens, scored(scorer, tokens), np.arange(len(tokens.block)))
        # the floor of a block is paid with its own best tokens; the others compete for what is left
        block = tokens.block[best]
        by_block = order(block)
        starts = np.searchsorted(block[by_block], np.arange(len(blocks)))
        place = np.empty(len(best), np.int64)
        place[by_block] = np.arange(len(best)) - starts[block[by_block]]
        free = block[place >= blocks.floor[block]]
        return counts + np.bincount(free[:left], minlength=len(blocks))
