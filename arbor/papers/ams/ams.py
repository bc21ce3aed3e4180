"""AMS: segments by attention mass, and a quota for each; and its control, equal stretches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from arbor.components import ONLY_IF_SET
from arbor.errors import check_settings
from arbor.retention.allocators.segments import Segmented, TokenSequence, quotas_of
from arbor.retention.base import Blocks, Floats, Ints, Scorer
from arbor.retention.policy import Policy, Trigger
from arbor.retention.scorers import TOVA, Window
from arbor.retention.token_kv import LATELY, Observation

_FAINT = 1e-9  # epsilon of the normalisation, relative to the largest

Cut = Literal["mass", "length"]
Quotas = Literal["mass", "equal"]
Mass = Literal["fixed", "paper"]


@dataclass(frozen=True)
class AMS(Segmented):
    """Adaptive mass segmentation: segments that received equal attention, and a quota for each.

        m = normalise(max(pool(u), 0) + eps)
        c <- decay c + (1 - decay) m
        m' = normalise(blend m + (1 - blend) normalise(c))

    u is the attention of about the last `queries` (`Tokens.lately`; of a shorter path, of all),
    pooled over `pool` neighbours. The sequence is cut where the cumulated m' passes a multiple of
    `delta`; segments longer than `longest` are split evenly, those shorter than `shortest` join the
    smaller neighbour, or share evenly with it where both are more than `longest`. A segment keeps
    at least `least` tokens, and the rest of the room goes by m'; within it the best tokens by the
    policy's scorer stay. The scorer ``window`` is then of as many queries as the mass.

    Source: AMS (arXiv 2605.23200), section 4, with Table 15's values. Policy ``ams`` is its
    AMS-TOVA with its interval: 512 tokens leave at once, but at most half of what may stay, so that
    a budget below 1,024 is halved each time. Differs, as its text and its released code contradict
    each other: protected tokens are neither segmented nor given a quota (the code cuts most finely
    in the window it keeps anyway; ``mass=paper`` does so too); the minimum holds, since quotas are
    of what may leave; more segments than room end with one token for the heaviest (the code never
    ends); largest remainders, not round-robin from the first segment; merging never exceeds
    `longest`; the credit c of a new token begins with its first m, not with 0, and follows the
    events at which slots run out, of which only tokens that stay take it along. With
    ``granularity=head`` each KV head of each layer has mass, credit, segments and quotas of its
    own, as in the paper, and a block keeps equally many tokens in all heads, the mean of what they
    would keep; otherwise one set serves all, by the mean over heads. The sequence is the tree's:
    tokens of one position are neighbours.

    Attributes:
        delta: mass of a segment, in (0, 1].
        shortest, longest: tokens of a segment.
        least: tokens each segment keeps.
        decay: of the credit, in [0, 1).
        blend: part of the present attention in the mass, in [0, 1]; the rest is credit.
        pool: neighbours, odd.
        queries: about how many of the last ones the mass is of (W).
        cut: where segments end. ``mass``: at equal m'; ``length``: after equal numbers of tokens
            (the paper's ablation).
        quotas: what the rest of the room goes by. ``mass``: m'; ``equal``: as many tokens for each
            segment (the paper's ablation).
        mass: of which tokens. ``fixed``: of those that may leave; ``paper``: of all, the last
            `padded` positions with the largest value of any, as published.
        padded: with ``mass=paper``, positions at the end, the queries' window of the released code.
    """

    own_segments: ClassVar[bool] = True

    delta: float = 0.1
    shortest: int = 16
    longest: int = 256
    least: int = 1
    decay: float = 0.9
    blend: float = 0.9
    pool: int = 5
    queries: int = 128
    cut: Cut = field(default="mass", metadata=ONLY_IF_SET)
    quotas: Quotas = field(default="mass", metadata=ONLY_IF_SET)
    mass: Mass = field(default="fixed", metadata=ONLY_IF_SET)
    padded: int = field(default=32, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        check_settings(
            self,
            delta=(0 < self.delta <= 1, "above 0, at most 1"),
            shortest=(1 <= self.shortest <= self.longest, "from 1 to longest"),
            least=(self.least >= 0, "0 or more"),
            decay=(0 <= self.decay < 1, "from 0, below 1"),
            blend=(0 <= self.blend <= 1, "from 0 to 1"),
            pool=(self.pool >= 1 and self.pool % 2 == 1, "odd, such as 5"),
            queries=(self.queries >= LATELY, f"{LATELY} or more"),
            padded=(self.padded >= 0, "0 or more"),
        )

    @property
    def observes(self) -> bool:
        """Attention, whatever the scorer reads."""
        return True

    @property
    def observation(self) -> Observation:
        """The attention of the last `queries`."""
        return Observation(lately=self.queries)

    def divide(self, sequence: TokenSequence) -> tuple[Ints, Ints]:
        return self._divided(sequence, *self._mass(sequence))

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """What leaves, as `leaving` says, and the credit c of each token after this event.

        Returns:
            int64, places in `blocks.tokens`, distinct, and float64 [T].
        """
        sequence = TokenSequence(blocks, room, scorer)
        present, earned = self._mass(sequence)
        credit = sequence.tokens.credit.copy()
        credit[self._segmented(sequence)] = earned
        return sequence.leaving(*self._divided(sequence, present, earned)), credit

    def _segmented(self, sequence: TokenSequence) -> Ints:
        """Places of the n tokens whose mass counts, by position."""
        return sequence.at if self.mass == "fixed" else sequence.whole

    def _mass(self, sequence: TokenSequence) -> tuple[Floats, Floats]:
        """m and c, float64 [n] each."""
        at = self._segmented(sequence)
        received = pooled(sequence.tokens.lately[at], self.pool)
        if self.mass == "paper" and self.padded and len(at):
            received[-self.padded :] = received.max()
        present = _normalised(np.maximum(received, 0))
        before = sequence.tokens.credit[at]
        followed = self.decay * before + (1 - self.decay) * present
        return present, np.where(before > 0, followed, present)

    def _divided(
        self, sequence: TokenSequence, present: Floats, credit: Floats
    ) -> tuple[Ints, Ints]:
        """Segments, and their quotas, of the tokens that may leave."""
        mass = _normalised(self.blend * present + (1 - self.blend) * _normalised(credit))
        cut = mass if self.cut == "mass" else np.full(len(mass), 1 / max(1, len(mass)))
        size = segments(cut, self.delta, self.shortest, self.longest)
        segment = np.repeat(np.arange(len(size)), size)
        if self.quotas == "mass":
            weight = np.bincount(segment, mass, len(size)).astype(np.float64)
        else:
            weight = np.ones(len(size))
        if self.mass == "paper":  # segments of which nothing may leave need no quota
            left, segment, size = np.unique(
                segment[sequence.free], return_inverse=True, return_counts=True
            )
            weight = weight[left]
        return segment, quotas_of(weight, size, self.least, sequence.room)


def pooled(values: Floats, width: int) -> Floats:
    """The mean of each value and its neighbours, `width` in all; fewer at the ends."""
    if not len(values):
        return values
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    first, last = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    mean: Floats = (total[last] - total[first]) / (last - first)
    return mean


def segments(mass: Floats, delta: float, shortest: int, longest: int) -> Ints:
    """Sizes of segments of about equal mass, int64 [S]; they sum to the number of tokens.

    Args:
        mass: float64 [N], summing to 1.
        delta: mass of a segment.
        shortest, longest: tokens of a segment; a single one may be shorter, and one that shares
            evenly with its neighbour where `longest` is less than twice `shortest`.
    """
    count = len(mass)
    if not count:
        return np.empty(0, np.int64)
    before = np.cumsum(mass) - mass / 2  # a token belongs where its middle lies
    _, size = np.unique(np.floor(before / delta), return_counts=True)
    parts: list[int] = []
    for each in size.tolist():  # too long ones, evenly
        pieces = -(-each // longest)
        parts += [each // pieces + (place < each % pieces) for place in range(pieces)]
    at = 0
    while at < len(parts):
        if parts[at] >= shortest or len(parts) == 1:
            at += 1
            continue
        sides = [side for side in (at - 1, at + 1) if 0 <= side < len(parts)]
        side = min(sides, key=lambda side: parts[side])
        first, both = min(at, side), parts[at] + parts[side]
        if both <= longest:
            parts[first : first + 2] = [both]
            at = first
        else:  # two of about the same size
            parts[first : first + 2] = [both - both // 2, both // 2]
            at += 1
    return np.array(parts, np.int64)


def _normalised(values: Floats) -> Floats:
    """Values >= 0 that sum to 1; none of them 0."""
    if not len(values):
        return values
    raised: Floats = values + max(float(values.max()), 1.0) * _FAINT
    raised /= raised.sum()
    return raised


POLICY = Policy(
    AMS(),
    TOVA(),
    trigger=Trigger(spare=512),
    summary="Cuts the sequence into segments of equal attention mass and keeps the best tokens of "
    "each (AMS).",
)


@dataclass(frozen=True)
class Strata(Segmented):
    """Keep equally many tokens of each stretch of `size` positions, the best ones of each.

    The control for methods that spread what they keep over the sequence (AMS): it spreads without
    looking at attention.

    Attributes:
        size: positions of a stretch, >= 1.
    """

    size: int = 32

    def __post_init__(self) -> None:
        check_settings(self, size=(self.size >= 1, "at least 1"))

    def divide(self, sequence: TokenSequence) -> tuple[Ints, Ints]:
        segment, size = sequence.stretches(self.size)
        return segment, quotas_of(np.ones(len(size)), size, 0, sequence.room)


STRATA = Policy(
    Strata(),
    Window(),
    summary="Keeps equally many tokens of every stretch of the sequence: the control for AMS.",
)
