"""The tokens of all blocks compete in one pool: what flat policies do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import order
from arbor.retention.selection import best, scored, without

_SAMPLE = 2048


@dataclass(frozen=True)
class Pooled:
    """The best tokens stay wherever they lie: protected ones first, then by score, ties by recency, then by node id.

    Source: H2O, TOVA and StreamingLLM rank the tokens of one sequence; here the sequence is the whole tree, each shared
    token once (ArborKV calls this flattening). Differs: a block never falls below its floor.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return without(blocks, self.leaving(blocks, room, scorer))[0]

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Indices of the tokens that leave, int64, distinct."""
        excess = int(blocks.resident.sum()) - room
        if excess <= 0:
            return np.empty(0, np.int64)
        floors = int(blocks.floor.sum())
        assert floors <= room, f"the floors take {floors} tokens, there is room for {room}"
        tokens = blocks.tokens
        scores = scored(scorer, tokens)
        if floors == 0 and not tokens.protected.any():
            return _oldest_worst(tokens, scores, None, excess)
        free = ~_in_floors(blocks, tokens, scores)
        plain = np.flatnonzero(free & ~tokens.protected)
        if len(plain) >= excess:
            return _oldest_worst(tokens, scores, plain, excess)
        guarded = np.flatnonzero(free & tokens.protected)
        more = _oldest_worst(tokens, scores, guarded, excess - len(plain))
        return np.concatenate([plain, more])


def _in_floors(blocks: Blocks, tokens: Tokens, scores: Floats) -> Bools:
    """The tokens that pay the floors, bool [T]: of each block its own best."""
    if not blocks.floor.any() and not tokens.protected.any():
        return tokens.protected
    size = len(blocks)
    protected = np.bincount(tokens.block[tokens.protected], minlength=size)
    paid = tokens.protected.copy()  # where the floor is what is protected, nothing needs ranking
    ranked = np.flatnonzero(protected != blocks.floor)
    if len(ranked):
        unpaid = protected != blocks.floor
        asked = np.flatnonzero(unpaid[tokens.block])
        sizes, floor = blocks.resident[ranked], blocks.floor[ranked]
        paid[asked] = best(tokens.protected[asked], scores[asked], sizes, floor)
    return paid


def _oldest_worst(tokens: Tokens, scores: Floats, asked: Ints | None, count: int) -> Ints:
    """The `count` of these tokens (None: of all) with the lowest scores; of equals the earlier position, then the later
    block. O(T)."""
    score = scores if asked is None else scores[asked]
    low = _low(score, count)
    asked, score = low if asked is None else asked[low], score[low]
    most = np.partition(score, count - 1)[count - 1]
    below = asked[score < most]
    level = asked[score == most][::-1]
    if len(below) + len(level) > count:  # places are looked up only where they decide
        level = level[order(tokens.position[level])[: count - len(below)]]
    return np.concatenate([below, level])


def _low(score: Floats, count: int) -> Ints:
    """Indices of the lowest scores, at least `count`, all that are equal to the highest of them included.

    A sample says where about the limit lies, so that few have to be told apart: a third of the time.
    """
    stride = len(score) // _SAMPLE
    if stride > 1:
        sample = np.sort(score[::stride])
        place = len(sample) * count // len(score)
        guess = sample[min(len(sample) - 1, place + place // 4 + 16)]
        low = np.flatnonzero(score <= guess)
        if len(low) >= count:
            return low
    return np.arange(len(score))
