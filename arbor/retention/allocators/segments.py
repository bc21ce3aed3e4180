"""Segments of a sequence: which tokens may leave, how many each segment keeps, and which ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from arbor.retention.allocators.waterfill import rounded, waterfill
from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import lowest, order, ranks_within
from arbor.retention.selection import checked_scores, filled_floors, select_all_but

_FAINT = 1e-12  # weight of a segment that received nothing, relative to the sum


class TokenSequence:
    """The tokens that may leave, of all blocks offered, in the order of their positions.

    Branches of a tree lie one over the other: tokens of one position are neighbours.

    Args:
        blocks: the offer.
        room: tokens that may stay, those that cannot leave included.
        scorer: which tokens matter.

    Attributes:
        room: tokens of these that may stay.
        whole: int64 [T], places of all tokens in `blocks.tokens`, those that cannot leave included,
            by position.
        free: bool [T], which of `whole` may leave.
        at: int64 [N], their places in `blocks.tokens`.
        positions: int64 [N], increasing.
        scores: float64 [N].
    """

    def __init__(self, blocks: Blocks, room: int, scorer: Scorer) -> None:
        self.tokens: Tokens = blocks.tokens
        scores = checked_scores(scorer, self.tokens)
        stays = filled_floors(blocks, self.tokens, scores)
        self.whole: Ints = order(self.tokens.position, self.tokens.block)
        self.free: Bools = ~stays[self.whole]
        self.at: Ints = self.whole[self.free]
        self.positions: Ints = self.tokens.position[self.at]
        self.scores: Floats = scores[self.at]
        self.room = max(0, room - int(stays.sum()))

    def __len__(self) -> int:
        return len(self.at)

    def stretches(self, width: int) -> tuple[Ints, Ints]:
        """Stretches of `width` positions that hold some: int64 [N], of each token, non-decreasing
        from 0, and int64 [S], their tokens."""
        _, stretch, sizes = np.unique(
            self.positions // width, return_inverse=True, return_counts=True
        )
        return stretch, sizes

    def leaving(self, segment: Ints, quotas: Ints) -> Ints:
        """The tokens beyond each segment's quota: the lowest scores, of equals the earlier ones.

        Args:
            segment: int64 [N], of each token; non-decreasing from 0.
            quotas: int64 [S], tokens each segment keeps.

        Returns:
            int64, places in `blocks.tokens`.
        """
        rank = ranks_within(segment, -self.scores, -self.positions)
        return self.at[rank >= quotas[segment]]


class Segmented(ABC):
    """An allocator that divides the sequence into segments and keeps the best tokens of each."""

    @abstractmethod
    def divide(self, sequence: TokenSequence) -> tuple[Ints, Ints]:
        """The segments, and how many tokens each keeps.

        Args:
            sequence: the tokens that may leave, N of them; `TokenSequence.room` of these stay.

        Returns:
            int64 [N], each token's segment, non-decreasing from 0, and int64 [S], the quotas,
            summing to at most that room.
        """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return select_all_but(blocks, self.leaving(blocks, room, scorer))[0]

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Places of the tokens that leave in `blocks.tokens`, int64, distinct."""
        if int(blocks.resident.sum()) <= room:
            return np.empty(0, np.int64)
        sequence = TokenSequence(blocks, room, scorer)
        return sequence.leaving(*self.divide(sequence))

    def segment_of(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """The segment of each of `blocks.tokens`, int64 [T]; -1 where it stays in any case."""
        sequence = TokenSequence(blocks, room, scorer)
        found = np.full(len(sequence.tokens.block), -1, np.int64)
        found[sequence.at] = self.divide(sequence)[0]
        return found


def quotas_of(weight: Floats, size: Ints, least: int, room: int) -> Ints:
    """How many tokens each segment keeps: `least` of each, the rest in proportion to its weight.

    No segment keeps more than it has; what one cannot take goes to the others in proportion.
    Integers by largest remainder, ties by index. Where there is no room for `least` of each, every
    segment keeps the same number, and where there is none for one of each, the heaviest keep one.

    Args:
        weight: float64 [S], >= 0.
        size: int64 [S], tokens of each segment, >= 1.
        least: of each segment, >= 0.
        room: tokens all of them may keep.

    Returns:
        int64 [S], summing to min(room, sum(size)).
    """
    if not len(size):
        return size
    if len(size) > room:
        quotas = np.zeros(len(size), np.int64)
        quotas[lowest(-weight, room)] = 1
        return quotas
    floor = np.minimum(size, min(least, room // len(size)))
    rest = room - int(floor.sum())
    share = weight / weight.sum() if weight.sum() > 0 else np.ones(len(size))
    none, cap = np.zeros(len(size), np.int64), size - floor
    more = waterfill(np.log(np.maximum(share, _FAINT)), none, cap, min(rest, int(cap.sum())))
    return floor + rounded(more, none, cap, rest)
