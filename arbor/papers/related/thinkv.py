"""Segments of a chain of thought step down by their types: ThinKV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from arbor.errors import check_settings
from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import filled, order, ranks_within
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.selection import checked_scores, filled_floors, select_all_but
from arbor.retention.token_kv import KVSequence, Observation, TokenKV, attention_of

if TYPE_CHECKING:
    from torch import Tensor

Choose = Literal["cluster", "score"]
_PIECES = 1 << 20  # sparsity is remembered as a multiple of 1 / _PIECES, so that sums are exact
_UNKNOWN = 1.5  # stands for a sparsity that was not measured, in a figure that is remembered


class Thought(IntEnum):
    """What a segment is, the least important first."""

    TRANSITION = 0  # doubts and turns back
    EXECUTION = 1  # calculates, or writes code
    REASONING = 2
    OPEN = 3  # still being written
    PROMPT = 4


@dataclass(frozen=True)
class ThinKV:
    """Segments step down to fewer tokens, at each transition and where room is short; within a
    segment K-means over the keys says which stay.

    A segment is a thought (a block), longer ones cut after every `segment` tokens. Its type follows
    from its sparsity, the mean over its tokens of the part of the keys that receive less than 1 %
    of their query's largest attention: below the first of `valleys` execution, from the second on
    transition, between them reasoning. A segment that has stepped n times may keep
    `schedule`[n - 1] of its tokens, and `least` in any case. It steps

    1. once for each transition that has closed after it;
    2. where that is not enough, on and on until it keeps `least`, the oldest segment of the least
       important type first (transition, execution, reasoning; then those still being written, then
       the prompt).

    Only as many tokens leave as have to: those above what a segment may keep leave first, in the
    order of 2, and the last step is taken in part. Where all keep `least` and there is still no
    room, they all keep half as many, in the same order, then a quarter, down to none; what is
    protected stays, and counts among the tokens a segment keeps. Of equally old segments the one of
    the smaller depth goes first, then that of the smaller node id. The tokens of a segment that
    stay are the real ones nearest to the centres of K-means (`representatives`), of their
    position-encoded keys in all KV heads of the observed layers.

    Source: ThinKV (arXiv 2510.01290), section 4 and appendix C.2, of which there is no public code;
    its details are read from the paper's summaries. With 128 tokens a segment, the default schedule
    is the published one, 64, 32, 16, 8, 4. That transitions are the sparsest and executions the
    densest is the paper's. Differs: it acts whenever room runs out, and as much as that needs,
    where the paper steps down as soon as a transition appears (`Trigger.above` acts earlier); its
    segments are 128 tokens, its type is measured once in each; its schedule counts tokens, here it
    is a part, since thoughts differ in length; a segment whose queries were not kept counts as
    reasoning; one set for all heads and layers; sparsity is measured over the tokens on the device
    when the policy is asked, of queries of one layer in four, where the paper chooses four layers
    by their distributions (`layers`); what the paper leaves open is the share of a step, and what
    follows when all keep the least. In a tree, transitions of one depth are one, in whichever
    branches, and what lies nearer to the root is earlier.
    The other half of ThinKV, fewer bits for less important types, is `ThinKVBits`.

    ``arbor calibrate thoughts`` finds `valleys` and `layers` of a model, or that there are none.
    By default there are none, so all thoughts are of one type, as in the paper for models whose
    sparsity has no three modes (appendix E.10): nothing is measured, and the oldest segment steps
    first.

    Attributes:
        segment: most tokens of a segment, >= 1.
        schedule: parts of a segment, each in (0, 1] and less than the one before.
        least: tokens each segment keeps.
        valleys: two sparsities between the types, increasing, in [0, 1]; or none.
        lookback: last queries of each path that are kept to be measured, >= 1.
        layers: whose queries and keys are read; none: one in four.
        choose: which tokens of a segment stay: ``cluster``, or ``score``, the best by the policy's
            scorer.
    """

    segment: int = 128
    schedule: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625, 0.03125)
    least: int = 4
    valleys: tuple[float, ...] = ()
    lookback: int = 128
    layers: tuple[int, ...] = ()
    choose: Choose = "cluster"

    def __post_init__(self) -> None:
        parts, valleys = self.schedule, self.valleys
        falls = all(0 < after < before for before, after in pairwise(self.schedule))
        rises = len(valleys) == 2 and 0 <= valleys[0] < valleys[1] <= 1
        check_settings(
            self,
            segment=(self.segment >= 1, "1 or more, such as 128"),
            schedule=(
                bool(parts) and parts[-1] > 0 and parts[0] <= 1 and falls,
                "parts in (0, 1] that fall, such as 0.5,0.25,0.125",
            ),
            least=(self.least >= 0, "0 or more, such as 4"),
            valleys=(not valleys or rises, "two numbers in [0, 1] that rise, such as 0.6,0.8"),
            lookback=(self.lookback >= 1, "1 or more, such as 128"),
            layers=(all(layer >= 0 for layer in self.layers), "numbers from 0, such as 3,7"),
        )

    @property
    def observation(self) -> Observation:
        """Keys where these choose, and queries where there are types."""
        return Observation(
            keys=self.choose == "cluster" or bool(self.valleys),
            window=self.lookback if self.valleys else 0,
            layers=self.layers or None,
        )

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return select_all_but(blocks, self.leaving(blocks, room, scorer))[0]

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Places of the tokens that leave in `blocks.tokens`, int64, distinct."""
        if int(blocks.resident.sum()) <= room:
            return np.empty(0, np.int64)
        return self.credited(blocks, room, scorer)[0]

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """What leaves, as `leaving` says, and what is remembered of each token: the steps of its
        segment that room has asked for, and a sparsity, its own until the segment closes, then the
        segment's."""
        tokens = blocks.tokens
        segments = Segments(blocks, self.segment)
        scores = checked_scores(scorer, tokens)
        fixed = filled_floors(blocks, tokens, scores)
        steps, sparsity = remembered(tokens.credit)
        asked = segments.largest(steps)
        sparsity, mean = self._measured(segments, tokens, sparsity)
        thought = self._thoughts(segments, mean)
        least = np.bincount(segments.of[fixed], minlength=len(segments))
        gone, more = self._steps(segments, thought, asked, least, room)
        leaving = self._chosen(segments, tokens, scores, ~fixed, gone)
        return leaving, credit_of((asked + more)[segments.of], sparsity)

    def limits(self, length: Ints) -> Ints:
        """Tokens that segments may keep after 0, 1, 2, ... steps, int64 [S, steps + 1].

        Args:
            length: int64 [S], tokens of each segment, those that have left too.
        """
        parts = np.ceil(length[:, None] * np.array(self.schedule) - 1e-9).astype(np.int64)
        kept = np.maximum(parts, np.minimum(self.least, length)[:, None])
        return np.concatenate([length[:, None], kept], axis=1)

    def turns(self, segments: Segments, thought: Ints) -> Ints:
        """How many steps the transitions so far have asked of each segment, int64 [S].

        Args:
            thought: int64 [S], the `Thought` of each.
        """
        after = segments.later(thought == Thought.TRANSITION)
        after[(thought == Thought.OPEN) | (thought == Thought.PROMPT)] = 0
        return after

    def _measured(self, segments: Segments, tokens: Tokens, known: Floats) -> tuple[Floats, Floats]:
        """The sparsity to remember of each token, [T], and that of each segment, [S]; nan: unknown.

        Args:
            known: float64 [T], what is remembered; nan: nothing.
        """
        if not self.valleys:
            return np.full(len(known), np.nan), np.full(len(segments), np.nan)
        own = np.where(np.isnan(known), _rounded(token_sparsity(tokens.kv)), known)
        measured = ~np.isnan(own)
        count = np.bincount(segments.of[measured], minlength=len(segments))
        total = np.bincount(segments.of[measured], own[measured], len(segments))
        mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        closed = ~segments.open
        mean[closed] = _rounded(mean[closed])
        return np.where(closed[segments.of], mean[segments.of], own), mean

    def _thoughts(self, segments: Segments, sparsity: Floats) -> Ints:
        """The `Thought` of each segment, int64 [S]."""
        thought = np.full(len(segments), int(Thought.REASONING))
        if self.valleys:
            # a comparison with nan is false
            thought[sparsity < self.valleys[0]] = Thought.EXECUTION
            thought[sparsity >= self.valleys[1]] = Thought.TRANSITION
        thought[segments.open] = Thought.OPEN
        thought[segments.prompt] = Thought.PROMPT
        return thought

    def _steps(
        self, segments: Segments, thought: Ints, asked: Ints, fixed: Ints, room: int
    ) -> tuple[Ints, Ints]:
        """How many tokens each segment loses, and how many more steps room has asked of it,
        int64 [S] each.

        Args:
            segments: S of them.
            thought: int64 [S].
            asked: int64 [S], steps that room has asked of it before.
            fixed: int64 [S], tokens of each that cannot leave.
            room: tokens that may stay.
        """
        limits, every = self.limits(segments.length), np.arange(len(segments))
        last = limits.shape[1] - 1
        taken = np.minimum(asked + self.turns(segments, thought), last)
        preferred = order(thought, segments.start, segments.depth, segments.number)
        gone = np.zeros(len(segments), np.int64)
        need = int(segments.held.sum()) - room

        def step_down(limit: Ints) -> None:
            spare = np.maximum(segments.held - gone - np.maximum(limit, fixed), 0)
            gone[:] += filled(spare, need - int(gone.sum()), preferred)

        step_down(limits[every, taken])
        entitled = gone.copy()
        step_down(limits[:, last])
        kept = segments.held - gone
        below = limits <= kept[:, None]
        reached = np.where(below.any(1), below.argmax(1), last)
        # what is still being written grows, and begins anew when it closes
        stepped = (gone > entitled) & (thought != Thought.OPEN)
        more = np.where(stepped, np.maximum(reached - taken, 0), 0)
        least = self.least
        while int(gone.sum()) < need and least:
            least //= 2
            step_down(np.minimum(limits[:, last], least))
        if int(gone.sum()) < need:
            step_down(np.zeros_like(fixed))
        return gone, more

    def _chosen(
        self, segments: Segments, tokens: Tokens, scores: Floats, free: Bools, gone: Ints
    ) -> Ints:
        """Places of the tokens that leave, int64: of each segment so many of its free ones."""
        at = np.flatnonzero(free & (gone[segments.of] > 0))
        if not len(at):
            return at
        segment = segments.of[at]
        if self.choose == "score":
            rank = ranks_within(segment, scores[at], tokens.position[at])
            leave: Ints = at[rank < gone[segment]]
            return leave
        losing, begins = np.unique(segment, return_index=True)
        members = np.split(at, begins[1:])
        keep = [len(some) - count for some, count in zip(members, gone[losing], strict=True)]
        return np.setdiff1d(at, np.concatenate(clustered(tokens.kv, members, keep)))


class Segments:
    """The segments of the blocks offered that have tokens on the device, S in all.

    Args:
        blocks: the offer.
        longest: most tokens of a segment.

    Attributes:
        of: int64 [T], of each of `blocks.tokens`; non-decreasing.
        number: int64 [S], its place in its block.
        length: int64 [S], tokens, those that have left too.
        held: int64 [S], of these on the device.
        start: int64 [S], the first position that is.
        depth: int64 [S], of its block.
        open: bool [S], still being written.
        prompt: bool [S].
    """

    def __init__(self, blocks: Blocks, longest: int) -> None:
        tokens = blocks.tokens
        number = tokens.offset // longest
        most = int(number.max(initial=0)) + 1
        codes, begins, self.of, self.held = np.unique(
            tokens.block * most + number,
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        self._begins = begins
        block, self.number = codes // most, codes % most
        self.length = np.minimum(longest, blocks.length[block] - self.number * longest)
        self.start = self._reduced(np.minimum, tokens.position)
        self.depth = blocks.depth[block]
        self.open = (blocks.scheduled[block] == 0) & (self.length < longest)
        self.prompt = self.depth == 0
        self._turn = blocks.turn[block]

    def __len__(self) -> int:
        return len(self.held)

    def largest(self, values: Ints) -> Ints:
        """The largest value of each segment's tokens, int64 [S]."""
        return self._reduced(np.maximum, values)

    def later(self, some: Bools) -> Ints:
        """How many of these segments lie after each one in its tree, int64 [S]; those of one depth,
        and place in their blocks, count once.

        Args:
            some: bool [S].
        """
        if not len(self):
            return np.zeros(0, np.int64)
        across = int(self.number.max()) + 1
        down = (int(self.depth.max()) + 1) * across
        code = self._turn * down + self.depth * across + self.number
        found = np.unique(code[some])
        ends = np.searchsorted(found, (self._turn + 1) * down)
        count: Ints = ends - np.searchsorted(found, code, side="right")
        return count

    def _reduced(self, function: np.ufunc, values: Ints) -> Ints:
        """A function of the values of each segment's tokens, int64 [S]."""
        if not len(values):
            return np.zeros(0, np.int64)
        reduced: Ints = function.reduceat(values, self._begins)
        return reduced


def clustered(kv: TokenKV, members: Sequence[Ints], keep: Sequence[int]) -> list[Ints]:
    """The tokens of each segment that stand for the others, by K-means over their keys.

    Those that are not on the device stay last, the later ones first.

    Args:
        kv: of the tokens.
        members: of each segment, int64, places of its tokens in `kv`, increasing.
        keep: how many stay of each.

    Returns:
        of each segment, the places of those that stay.
    """
    places = [kv.places[some] for some in members]
    products = [np.zeros((count, count)) for count in map(len, places)]
    first = 0
    for sequence in kv.sequences:
        end = first + len(sequence)
        mine = [each for each, at in enumerate(places) if first <= at.max(initial=-1) < end]
        for layer in sequence.layers if mine else ():
            keys = sequence.keys(layer).flatten(1)
            for each in mine:
                here = places[each] >= 0
                points = keys[(places[each][here] - first).tolist()]
                points = points - points.mean(0)
                products[each][np.ix_(here, here)] += (points @ points.T).double().cpu().numpy()
        first = end
    stays = []
    for some, at, inner, count in zip(members, places, products, keep, strict=True):
        found, lost = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        from_keys = min(count, len(found))
        chosen = found[representatives(inner[np.ix_(found, found)], from_keys)]
        rest = lost[len(lost) - (count - from_keys) :]
        stays.append(some[np.concatenate([chosen, rest])])
    return stays


def credit_of(steps: Ints, sparsity: Floats) -> Floats:
    """Steps, at least 0, and sparsities in [0, 1], nan where unknown, as one figure >= 2 each."""
    rest = np.where(np.isnan(sparsity), _UNKNOWN, sparsity).astype(np.float64)
    figure: Floats = rest + 2.0 * (steps + 1)
    return figure


def remembered(credit: Floats) -> tuple[Ints, Floats]:
    """What `credit_of` made a figure of: steps, int64 [T], and sparsities, float64 [T]; 0 and nan
    where it made none."""
    pairs: Floats = np.floor(credit / 2)
    steps = np.maximum(pairs - 1, 0).astype(np.int64)
    rest = credit - 2 * pairs
    return steps, np.where((pairs > 0) & (rest <= 1), rest, np.nan)


def _rounded(sparsity: Floats) -> Floats:
    rounded: Floats = np.round(sparsity * _PIECES) / _PIECES
    return rounded


POLICY = Policy(
    ThinKV(),
    protect=Protect(prompt=True),
    trigger=Trigger(spare=16),
    summary="Keeps the prompt, and of each thought fewer and fewer tokens that stand for the "
    "others: at each change of direction, the oldest and least important first (ThinKV).",
)


_ROUNDS = 20  # of Lloyd's algorithm; most sets settle in fewer
_EQUAL = 1e-5  # squared distances closer than this part of the mean square are equal


def representatives(products: Floats, count: int) -> Ints:
    """The points nearest to the centres of K-means with k = `count`.

    Nothing is drawn: the first centre is the point nearest to the mean, each further one the point
    farthest from those before, then Lloyd's algorithm runs until no point changes its centre, or
    for 20 rounds. A centre is represented by the nearest of its own points. Centres without points
    vanish; in their place stand the points farthest from all representatives. Of equal distances
    the later point counts, and a point between centres belongs to the earlier one; distances are
    equal up to the rounding of float32.

    Args:
        products: float64 [n, n], inner products of the points.
        count: how many, 0 <= count <= n.

    Returns:
        int64 [count], increasing.
    """
    size = len(products)
    if count in (0, size):
        return np.arange(count)
    square = products.diagonal()
    equal = _EQUAL * max(float(square.mean() - products.mean()), 0.0)
    apart = np.maximum(square[:, None] + square - 2 * products, 0)
    seeds = _spread(apart, [_last(2 * products.mean(0) - square, equal)], count, equal)
    centres = np.zeros((count, size))  # weights of the points in each centre
    centres[np.arange(count), seeds] = 1
    owner = np.full(size, -1)
    for _ in range(_ROUNDS):
        away = _distances(products, centres)
        nearest = (away <= away.min(0) + equal).argmax(0)
        if (nearest == owner).all():
            break
        owner = nearest
        centres = (owner == np.unique(owner)[:, None]).astype(np.float64)
        centres /= centres.sum(1, keepdims=True)
        owner = centres.argmax(0)  # numbered without the centres that vanished
    near = np.where(centres > 0, -_distances(products, centres) - square, -np.inf)
    found = [_last(each, equal) for each in near]
    return np.sort(_spread(apart, found, count, equal))


def _distances(products: Floats, centres: Floats) -> Floats:
    """Squared distances of points to centres [k, n], less each point's own square."""
    along: Floats = centres @ products
    distances: Floats = (along * centres).sum(1, keepdims=True) - 2 * along
    return distances


def _spread(apart: Floats, chosen: list[int], count: int, equal: float) -> Ints:
    """Points and more of them, `count` in all: each the farthest from those before.

    Args:
        apart: float64 [n, n], squared distances.
        chosen: the first ones.
        count: at most n.
        equal: largest difference of equal distances.
    """
    chosen = list(chosen)
    near = apart[chosen].min(0)
    near[chosen] = -np.inf
    while len(chosen) < count:
        chosen.append(_last(near, equal))
        near = np.minimum(near, apart[chosen[-1]])
        near[chosen[-1]] = -np.inf
    return np.array(chosen, np.int64)


def _last(values: Floats, equal: float) -> int:
    """The last index of the greatest of values, which may differ by `equal`."""
    return int(np.flatnonzero(values >= values.max() - equal)[-1])


FAINT = 0.01  # of a row's largest attention: what receives less counts as zero


def token_sparsity(kv: TokenKV) -> NDArray[np.float64]:
    """The sparsity of each token's own query, float64 [T]; nan where it is not kept any more.

    A query is measured over the tokens it sees that are on the device now.

    Args:
        kv: of T tokens, with queries.
    """
    found = [np.zeros(0)]
    for sequence in kv.sequences:
        each = np.full(len(sequence), np.nan)
        here = sequence.wrote >= 0
        if here.any():
            each[sequence.wrote[here]] = query_sparsity(sequence)[here]
        found.append(each)
    # the last number is of the tokens at place -1
    every = np.append(np.concatenate(found), np.nan)
    sparsity: NDArray[np.float64] = every[kv.places]
    return sparsity


def query_sparsity(sequence: KVSequence) -> NDArray[np.float64]:
    """The sparsity of each query of a sequence, the mean over the observed layers, float64 [w]."""
    mean: NDArray[np.float64] = layer_sparsity(sequence).mean(0)
    return mean


def layer_sparsity(sequence: KVSequence) -> NDArray[np.float64]:
    """The sparsity of each query of a sequence in each observed layer, float64 [layers, w]."""
    return np.array(
        [
            np.concatenate(
                [
                    row_sparsity(logits, sequence.keys(layer).shape[1]).double().cpu().numpy()
                    for logits in sequence.whole(layer)
                ][::-1]
            )
            for layer in sequence.layers
        ]
    )


def row_sparsity(logits: Tensor, heads: int) -> Tensor:
    """The part of the tokens each query sees that receive less than `FAINT` of the row's largest
    attention, [w].

    Of the query heads that read one KV head the largest logit counts; a row is the mean over the KV
    heads of their softmax.

    Args:
        logits: [w, H_q, n], -inf where a query does not see a token.
        heads: KV heads, H_kv.
    """
    grouped = logits.view(len(logits), heads, -1, logits.shape[-1]).amax(2)
    attention = attention_of(grouped).mean(1)
    seen = logits[:, 0] > -np.inf
    faint = seen & (attention < FAINT * attention.amax(-1, keepdim=True))
    return faint.sum(-1) / seen.sum(-1).clamp_min(1)
