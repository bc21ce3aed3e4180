"""Sharing: the spans of context that neighbouring segments of a batch have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import CascadeLayout, CascadeLevel
from arbor.model.level_rule import LevelRule

Slots = NDArray[np.int32]
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of context: the resident tokens of one block (or of its beginning).

    Attributes:
        key: pieces with equal keys in one batch name the same slots; what is shared is found by it.
        slots: int32 [c], in order of position; addresses beyond the pool's slots are records in
            host memory (`StagingBuffer`).
        positions: int32 [c], increasing; gaps where tokens are not resident.
    """

    key: Hashable
    slots: Slots
    positions: NDArray[np.int32]


Context = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What the n segments of a batch share, found once and used while the same segments decode.

    Attributes:
        rows: int32 [n + 1], CPU, the first row of each segment, and T.
        levels: shared spans, one level per depth of sharing.
        private: int32 [*] per segment, the context that no level holds, in order of position.
        private_lengths: int64 [n], tokens of these.
        unique: int64 [n], context tokens read once each; those of a shared span count for the first
            segment that reads it.
    """

    rows: Tensor
    levels: tuple[CascadeLevel, ...]
    private: tuple[Slots, ...]
    private_lengths: NDArray[np.int64]
    unique: NDArray[np.int64]

    def layout(self, tails: Sequence[Slots], tail_lengths: NDArray[np.int64]) -> CascadeLayout:
        """Full-attention layout: shared levels, then private contexts and own tokens.

        Args:
            tails: int32 [*] per segment, see `Segment.tail`.
            tail_lengths: int64 [n], tokens of these.
        """
        lists = list(tails)
        if self.private_lengths.any():
            lists = [part for pair in zip(self.private, tails, strict=True) for part in pair]
        lengths = self.private_lengths + tail_lengths
        last = CascadeLevel(self.rows, indptr_of(lengths), flat_of(lists), causal=True)
        return CascadeLayout(rows=int(self.rows[-1]), levels=(*self.levels, last))


class Sharing:
    """Finds the spans that neighbouring segments share.

    A span that the same run of segments shares is one level entry, however many blocks it covers;
    its level is the number of shared spans above it. Spans that do not pay stay private.

    What was found for one batch is kept for the next one, where most contexts are the same objects
    in the same order: only pairs of neighbours that are new are compared.

    Args:
        rule: which spans pay.
    """

    def __init__(self, rule: LevelRule) -> None:
        self._rule = rule
        self._contexts: Sequence[Context] = ()  # keeps the ids below unique
        self._common: dict[tuple[int, int], int] = {}
        self._slots: dict[tuple[int, _Ranges], Slots] = {}

    def of(self, contexts: Sequence[Context], rows: Sequence[int]) -> SharedPrefix:
        """What these segments share.

        Args:
            contexts: of each segment.
            rows: of each segment.
        """
        begins = np.concatenate(([0], np.cumsum(rows)))
        known, self._slots = self._slots, {}
        spans, inner = self._spans(contexts, begins.tolist(), known)
        private = tuple(
            self._taken(context, _with(run.private, run.depth, len(context)), known)
            for context, run in zip(contexts, inner, strict=True)
        )
        self._contexts = contexts
        lengths = np.array([len(slots) for slots in private], np.int64)
        unique = lengths.copy()
        for span in (each for level in spans for each in level):
            unique[span.first] += len(span.slots)
        return SharedPrefix(
            rows=torch.from_numpy(begins.astype(np.int32)),
            levels=tuple(_level(begins, level) for level in spans),
            private=private,
            private_lengths=lengths,
            unique=unique,
        )

    def _spans(
        self, contexts: Sequence[Context], begins: Sequence[int], known: _Known
    ) -> tuple[list[list[_Span]], list[_Run]]:
        """Shared spans by level, and the innermost run that each segment is in."""
        whole = _Run(len(contexts), 0, 0, ())
        inner = [whole] * len(contexts)
        around = [whole]
        spans: list[list[_Span]] = []
        for first, end, depth in runs_of(self._neighbours(contexts)):
            while around[-1].end <= first:
                around.pop()
            outer = around[-1]
            slots = self._taken(contexts[first], ((outer.depth, depth),), known)
            level, private = outer.level, outer.private
            if len(slots) and self._rule.pays(begins[end] - begins[first], len(slots), level):
                if level == len(spans):
                    spans.append([])
                spans[level].append(_Span(first, end, slots))
                level += 1
            else:
                private = _with(private, outer.depth, depth)
            run = _Run(end, depth, level, private)
            around.append(run)
            inner[first:end] = [run] * (end - first)
        return spans, inner

    def _neighbours(self, contexts: Sequence[Context]) -> list[int]:
        """How many pieces each context has in common with the one before it."""
        known, self._common = self._common, {}
        common = []
        for one, other in pairwise(contexts):
            pair = (id(one), id(other))
            count = known.get(pair)
            if count is None:
                count = common_pieces(one, other)
            self._common[pair] = count
            common.append(count)
        return common

    def _taken(self, context: Context, ranges: _Ranges, known: _Known) -> Slots:
        """The slots of some pieces of a context, one after the other.

        Args:
            context: the context.
            ranges: of its pieces.
            known: what was found for the last batch.
        """
        name = (id(context), ranges)
        slots = known.get(name)
        if slots is None:
            slots = flat([piece for begin, end in ranges for piece in context[begin:end]])
        self._slots[name] = slots
        return slots


_Ranges = tuple[tuple[int, int], ...]  # half-open ranges of pieces
_Known = Mapping[tuple[int, _Ranges], Slots]


class _Span(NamedTuple):
    """Slots that the segments from `first` to `end` read."""

    first: int
    end: int
    slots: Slots


class _Run(NamedTuple):
    """Segments up to `end` that agree on their first `depth` pieces.

    Attributes:
        level: shared spans among these pieces.
        private: the pieces among them that are not shared.
    """

    end: int
    depth: int
    level: int
    private: _Ranges


def runs_of(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of segments that agree on more pieces than with their neighbours.

    Args:
        common: how many pieces each segment but the first has in common with the one before it.

    Returns:
        first segment, end segment, and the pieces they agree on; outer runs before inner ones.
    """
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # first segment and depth of the runs around the present one
    for segment, depth in enumerate([*common, 0], 1):
        first = segment - 1
        while open_ and open_[-1][1] > depth:
            first, deeper = open_.pop()
            found.append((first, segment, deeper))
        if depth and not (open_ and open_[-1][1] == depth):
            open_.append((first, depth))
    return sorted(found, key=lambda run: (run[0], -run[1]))


def common_pieces(one: Context, other: Context) -> int:
    """How many pieces two contexts have in common, from the first one on."""
    if one is other:
        return len(one)
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine is not yours and mine.key != yours.key:
            break
        count += 1
    return count


def _with(ranges: _Ranges, begin: int, end: int) -> _Ranges:
    """Ranges with one more, which may continue the last one."""
    if begin == end:
        return ranges
    if ranges and ranges[-1][1] == begin:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (begin, end))


def flat(pieces: Sequence[Piece]) -> Slots:
    """The slots of pieces one after the other."""
    if len(pieces) == 1:
        return pieces[0].slots
    return np.concatenate([piece.slots for piece in pieces]) if pieces else _NOTHING


def _level(begins: NDArray[np.int64], spans: Sequence[_Span]) -> CascadeLevel:
    """A level of shared spans; segments between them read nothing on it."""
    starts: list[int] = []
    lists: list[Slots] = []
    segment = 0
    for span in spans:
        if span.first > segment:
            starts.append(segment)
            lists.append(_NOTHING)
        starts.append(span.first)
        lists.append(span.slots)
        segment = span.end
    if segment < len(begins) - 1:
        starts.append(segment)
        lists.append(_NOTHING)
    rows = begins[[*starts, len(begins) - 1]].astype(np.int32)
    lengths = [len(slots) for slots in lists]
    return CascadeLevel(torch.from_numpy(rows), indptr_of(lengths), flat_of(lists), causal=False)


def level_of(rows: Sequence[int], lists: Sequence[Slots], *, causal: bool) -> CascadeLevel:
    """A level of requests with so many rows and these slots each."""
    lengths = [len(slots) for slots in lists]
    return CascadeLevel(indptr_of(rows), indptr_of(lengths), flat_of(lists), causal=causal)


def indptr_of(counts: Sequence[int] | NDArray[np.int64]) -> Tensor:
    """Where each of several stretches begins, and where the last one ends; int32 [n + 1], CPU."""
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return torch.from_numpy(indptr)


def flat_of(lists: Iterable[Slots]) -> Tensor:
    """Lists of slots one after the other, int32, CPU."""
    return torch.from_numpy(np.concatenate(list(lists)).astype(np.int32, copy=False))
