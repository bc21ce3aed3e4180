"""Likelihood: log probabilities of given tokens after given tokens, common beginnings once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arbor.engine.sampling import likelihoods
from arbor.engine.scheduler import MOST_NEW
from arbor.errors import logits_not_finite
from arbor.memory.pool import KVPool
from arbor.model.plan import Segment, plan_forward, usual_levels
from arbor.model.runner import ModelRunner
from arbor.model.sharing import Piece

MOST_LOGITS = 2**26  # of one forward, float32: 256 MiB


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Tokens to score and the tokens before them, at least one of each."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """The tokens that the model reads: all but the last."""
        return (*self.before, *self.tokens[:-1])


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of given tokens.

    Attributes:
        logprobs: natural logarithm of each token's probability in the model's own distribution.
        greedy: whether each is the most probable one there.
    """

    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]

    @property
    def total(self) -> float:
        """The log probability of all tokens together."""
        return float(sum(self.logprobs))


@dataclass(slots=True, eq=False)
class _Edge:
    """Tokens that all texts of a branch of the radix tree have in common.

    Attributes:
        above: the edge before it; None at a root.
        start: position of its first token.
        tokens: at least one.
        wanted: offset of the first row whose logits are wanted; its length where none are.
        slots: int32, of its tokens.
    """

    above: _Edge | None
    start: int
    tokens: tuple[int, ...]
    wanted: int = 0
    slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list[_Edge]:
        """The edges up to this one, root first."""
        edges: list[_Edge] = []
        edge: _Edge | None = self
        while edge is not None:
            edges.append(edge)
            edge = edge.above
        return edges[::-1]


def score_tokens(
    runner: ModelRunner, given: Sequence[GivenTokens], slots: int
) -> Iterator[list[tuple[int, TokenScores]]]:
    """Score tokens, batch by batch; what texts of a batch begin with alike is computed once.

    Texts are taken in the order of their tokens, so that those which begin alike come together. A
    batch is a radix tree whose tokens have a slot each; its edges run in forwards of at most
    `MOST_NEW` rows, an edge after or together with those above it.

    Args:
        given: what to score.
        slots: tokens of KV at a time; a longer text has as many as it needs.

    Yields:
        (place in `given`, its scores) of each text of a batch.
    """
    order = sorted(range(len(given)), key=lambda place: given[place].read)
    while order:
        tree = _RadixTree()
        count = 0
        for place in order:
            if count and tree.size_with(given[place].read) > slots:
                break
            tree.add(given[place].read)
            count += 1
        batch, order = order[:count], order[count:]
        yield _score_batch(runner, [(place, given[place]) for place in batch], tree)


class _RadixTree:
    """Texts, of which each beginning is there once; they come in the order of their tokens."""

    def __init__(self) -> None:
        self.size = 0
        self.leaves: dict[tuple[int, ...], _Edge] = {}
        self._last: tuple[int, ...] = ()
        self._path: list[_Edge] = []

    def size_with(self, text: tuple[int, ...]) -> int:
        """Tokens with one more text."""
        return self.size + len(text) - _common(self._last, text)

    def add(self, text: tuple[int, ...]) -> None:
        """One more text, not before the last one."""
        common = _common(self._last, text)
        while self._path and self._path[-1].start >= common:
            self._path.pop()
        if self._path and self._path[-1].end > common:
            lower = self._path.pop()  # keeps those below it
            cut = common - lower.start
            upper = _Edge(lower.above, lower.start, lower.tokens[:cut])
            lower.above, lower.start, lower.tokens = upper, common, lower.tokens[cut:]
            self._path.append(upper)
        if common < len(text):
            above = self._path[-1] if self._path else None
            self._path.append(_Edge(above, common, text[common:]))
        self.size += len(text) - common
        self._last = text
        self.leaves[text] = self._path[-1]


def _score_batch(
    runner: ModelRunner, batch: Sequence[tuple[int, GivenTokens]], tree: _RadixTree
) -> list[tuple[int, TokenScores]]:
    """The scores of a batch; its texts are those of the tree."""
    paths = [tree.leaves[text.read].path() for _, text in batch]
    edges = list(dict.fromkeys(edge for path in paths for edge in path))
    free = np.arange(tree.size, dtype=np.int32)
    for edge in edges:
        edge.slots, free = free[: len(edge.tokens)], free[len(edge.tokens) :]
        edge.wanted = len(edge.tokens)
    asking: dict[tuple[_Edge, int], list[tuple[int, int]]] = {}  # row -> (text, place of a token)
    for number, ((_, text), path) in enumerate(zip(batch, paths, strict=True)):
        first = len(text.before) - 1
        for edge in path:
            for position in range(max(first, edge.start), min(edge.end, len(text.read))):
                offset = position - edge.start
                edge.wanted = min(edge.wanted, offset)
                asking.setdefault((edge, offset), []).append((number, position - first))
    found = [[(0.0, False)] * len(text.tokens) for _, text in batch]
    pool = KVPool(runner.layer_kv, tree.size, runner.kv_dtype, runner.device)
    most_logits = max(1, MOST_LOGITS // runner.vocabulary)
    for parts in _forwards(edges, most_logits):
        plan = plan_forward(
            [_segment(*part) for part in parts],
            levels=usual_levels(runner.device, runner.backend),
        )
        logits = runner.forward(plan, pool).logits
        rows, targets, places = [], [], []
        wanted = ((edge, at) for edge, begin, end in parts for at in _wanted(edge, begin, end))
        for row, key in enumerate(wanted):
            for number, at in asking.get(key, ()):
                rows.append(row)
                targets.append(batch[number][1].tokens[at])
                places.append((number, at))
        if rows:
            values, best = likelihoods(logits, rows, targets)
            if any(map(math.isnan, values)):
                raise logits_not_finite()
            for (number, at), value, is_best in zip(places, values, best, strict=True):
                found[number][at] = (value, is_best)
    return [
        (place, TokenScores(tuple(v for v, _ in scores), tuple(b for _, b in scores)))
        for (place, _), scores in zip(batch, found, strict=True)
    ]


_Part = tuple[_Edge, int, int]  # rows of an edge: from, to


def _forwards(edges: Sequence[_Edge], most_logits: int) -> Iterator[list[_Part]]:
    """The rows of edges in their order, forward by forward.

    Args:
        edges: each after those above it.
        most_logits: rows of one forward whose logits are kept.
    """
    parts: list[_Part] = []
    rows = logits = 0
    for edge in edges:
        begin = 0
        while begin < len(edge.tokens):
            room = min(MOST_NEW - rows, len(edge.tokens) - begin)
            free = max(0, edge.wanted - begin)  # rows before the first wanted one
            end = begin + min(room, free + most_logits - logits)
            if end > begin:
                parts.append((edge, begin, end))
                rows += end - begin
                logits += len(_wanted(edge, begin, end))
            if end < len(edge.tokens):
                yield parts
                parts, rows, logits = [], 0, 0
            begin = end
    if parts:
        yield parts


def _wanted(edge: _Edge, begin: int, end: int) -> range:
    """Rows among these whose logits a forward gives."""
    return range(min(max(begin, edge.wanted), end), end)


def _segment(edge: _Edge, begin: int, end: int) -> Segment:
    above = edge.path()[:-1]
    context = tuple(
        Piece(id(each), each.slots, np.arange(each.start, each.end, dtype=np.int32))
        for each in above
    )
    return Segment(
        context,
        edge.tokens[begin:end],
        np.arange(edge.start + begin, edge.start + end),
        edge.slots[:end],
        edge.slots[begin:end],
        len(_wanted(edge, begin, end)),
    )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens with which two texts begin alike."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
