"""The tokens of all blocks compete in one pool: what flat policies do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer, Tokens
from arbor.retention.keep import best, scored
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
        if left == 0:
            return blocks.floor.copy()
        tokens = blocks.tokens
        scores = scored(scorer, tokens)
        free = ~_in_floors(blocks, tokens, scores)
        first = np.flatnonzero(free & tokens.protected)
        if len(first) >= left:
            taken = _newest_best(tokens, scores, first, left)
        else:
            others = np.flatnonzero(free & ~tokens.protected)
            more = _newest_best(tokens, scores, others, left - len(first))
            taken = np.concatenate([first, more])
        counts: Ints = blocks.floor + np.bincount(tokens.block[taken], minlength=len(blocks))
        return counts


def _in_floors(blocks: Blocks, tokens: Tokens, scores: Floats) -> Bools:
    """The tokens that pay the floors, bool [T]: of each block its own best."""
    size = len(blocks)
    protected = np.bincount(tokens.block[tokens.protected], minlength=size)
    paid = tokens.protected.copy()  # where the floor is what is protected, nothing needs ranking
    ranked = np.flatnonzero(protected != blocks.floor)
    if len(ranked):
        row = np.full(size, -1, np.int64)
        row[ranked] = np.arange(len(ranked))
        asked = np.flatnonzero(row[tokens.block] >= 0)
        group = row[tokens.block[asked]]
        paid[asked] = best(tokens, scores, asked, group, blocks.floor[ranked])
    return paid


def _newest_best(tokens: Tokens, scores: Floats, asked: Ints, count: int) -> Ints:
    """The `count` of these tokens with the highest scores; equal ones by later position, then by block. O(T)."""
    score = scores[asked]
    least = np.partition(score, len(score) - count)[len(score) - count]
    above = asked[score > least]
    level = asked[score == least]
    newest = order(-tokens.position[level])[: count - len(above)]
    return np.concatenate([above, level[newest]])
