"""The tokens of all blocks compete in one pool: the allocator of flat policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arbor.retention.base import Blocks, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import order
from arbor.retention.selection import checked_scores, filled_floors, select_all_but

_SAMPLE = 2048


@dataclass(frozen=True)
class Pooled:
    """Keep the best tokens of all blocks: protected ones, then by score, position and node id.

    Of equal scores the later position stays, of equal positions the smaller node id.
    Source: H2O, TOVA and StreamingLLM rank the tokens of one sequence; here the sequence is the
    whole tree, each shared token once (ArborKV calls this flattening). Differs: a block never falls
    below its floor.
    """

    by_score: ClassVar[bool] = True

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return select_all_but(blocks, self.leaving(blocks, room, scorer))[0]

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Indices of the tokens that leave, int64, distinct."""
        excess = int(blocks.resident.sum()) - room
        if excess <= 0:
            return np.empty(0, np.int64)
        floors = int(blocks.floor.sum())
        assert floors <= room, f"the floors take {floors} of {room} slots"
        tokens = blocks.tokens
        scores = checked_scores(scorer, tokens)
        if floors == 0 and not tokens.protected.any():
            return _oldest_worst(tokens, scores, None, excess)
        free = ~filled_floors(blocks, tokens, scores)
        plain = np.flatnonzero(free & ~tokens.protected)
        if len(plain) >= excess:
            return _oldest_worst(tokens, scores, plain, excess)
        guarded = np.flatnonzero(free & tokens.protected)
        more = _oldest_worst(tokens, scores, guarded, excess - len(plain))
        return np.concatenate([plain, more])


def _oldest_worst(tokens: Tokens, scores: Floats, asked: Ints | None, count: int) -> Ints:
    """The `count` of these tokens (None: of all) with the lowest scores, O(T).

    Of equal scores the earlier position, of equal positions the later block.
    """
    score = scores if asked is None else scores[asked]
    low = _low(score, count)
    asked, score = low if asked is None else asked[low], score[low]
    most = np.partition(score, count - 1)[count - 1]
    below = asked[score < most]
    level = asked[score == most][::-1]
    # positions are read only where they decide
    if len(below) + len(level) > count:
        level = level[order(tokens.position[level])[: count - len(below)]]
    return np.concatenate([below, level])


def _low(score: Floats, count: int) -> Ints:
    """Indices of the lowest scores, at least `count`, with all equals of the highest of them.

    A sample estimates the limit, so that few scores remain to be compared: a third of the time.
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
