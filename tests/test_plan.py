"""From segments to a cascade: every row reads exactly its own keys, whatever is shared."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arbor.kernels.attention.base import CascadeLayout
from arbor.model.level_rule import LevelRule
from arbor.model.plan import (
    ForwardPlan,
    Piece,
    Segment,
    plan_forward,
)
from arbor.model.sharing import Sharing


def keys_of_rows(layout: CascadeLayout, window: int | None) -> list[list[int]]:
    """The slots every row reads, by what `CascadeLevel` documents."""
    keys: list[list[int]] = [[] for _ in range(layout.rows)]
    for level in layout.levels:
        qo, kv = level.qo_indptr.tolist(), level.kv_indptr.tolist()
        assert qo[0] == kv[0] == 0
        assert qo[-1] == layout.rows
        assert all(a < b for a, b in pairwise(qo))
        assert all(a <= b for a, b in pairwise(kv))
        slots = level.kv_indices.tolist()
        assert len(slots) == kv[-1]
        for request in range(len(qo) - 1):
            own = slots[kv[request] : kv[request + 1]]
            rows = qo[request + 1] - qo[request]
            for row in range(rows):
                seen = own
                if level.causal:
                    assert len(own) >= rows
                    end = len(own) - rows + row + 1
                    seen = own[max(0, end - (window or end)) : end]
                keys[qo[request] + row] += seen
    return keys


def by_hand(segments: Sequence[Segment], window: int | None) -> list[list[int]]:
    """The slots every row should read, from the meaning of a segment, in order of position."""
    keys = []
    for segment in segments:
        slots = [slot for piece in segment.context for slot in piece.slots.tolist()]
        places = [place for piece in segment.context for place in piece.positions.tolist()]
        last = int(segment.positions[-1])
        slots += segment.tail.tolist()
        places += range(last + 1 - len(segment.tail), last + 1)
        for place in segment.positions.tolist():
            first = -1 if window is None else place - window
            keys.append([s for s, p in zip(slots, places, strict=True) if first < p <= place])
    return keys


@dataclass
class Block:
    """A block of a random tree: parent, first position, a slot per token (-1: not resident)."""

    number: int
    parent: Block | None
    start: int
    slots: np.ndarray

    @property
    def path(self) -> list[Block]:
        return [*self.parent.path, self] if self.parent else [self]

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(block.number for block in self.path)

    def piece(self, end: int) -> list[Piece]:
        offsets = np.flatnonzero(self.slots[:end] >= 0)
        places = (self.start + offsets).astype(np.int32)
        return [Piece((self.number, end), self.slots[offsets], places)] if len(offsets) else []


@st.composite
def batches(draw: st.DrawFn) -> list[Segment]:
    """Segments over a random tree, depth first: new tokens, holes in blocks, questions."""
    count = draw(st.integers(1, 8))
    order = iter(np.random.default_rng(draw(st.integers(0, 99))).permutation(200).astype(np.int32))
    blocks: list[Block] = []
    for number in range(count):
        parent = blocks[draw(st.integers(0, number - 1))] if number else None
        start = parent.start + len(parent.slots) if parent else 0
        slots = np.array([next(order) for _ in range(draw(st.integers(1, 6)))], np.int32)
        if draw(st.booleans()):
            slots[draw(st.integers(0, len(slots) - 1))] = -1
        blocks.append(Block(number, parent, start, slots))
    segments = []
    for block in sorted(blocks, key=lambda block: block.key):
        own = []
        for _ in range(draw(st.integers(0, 2))):
            new = draw(st.integers(1, 4))
            fresh = np.array([next(order) for _ in range(new)], np.int32)
            inside = draw(st.booleans())
            at = draw(st.integers(0, len(block.slots) - 1)) if inside else len(block.slots)
            earlier = [p for b in block.path[:-1] for p in b.piece(len(b.slots))]
            head = block.piece(at)
            whole = not inside and (block.slots >= 0).all() and draw(st.booleans())
            # the tokens of an open block may stand in the tail instead of the context
            tail = np.concatenate([block.slots, fresh]) if whole else fresh
            context = tuple(earlier if whole else earlier + head)
            first = block.start + at
            positions = np.arange(first, first + new)
            own.append(
                (
                    len(context) > len(earlier),
                    at,
                    Segment(context, [1] * new, positions, tail, fresh, new),
                )
            )
        segments += [segment for *_, segment in sorted(own, key=lambda part: part[:2])]
    return segments or [
        Segment((), [1], np.arange(1), np.zeros(1, np.int32), np.zeros(1, np.int32))
    ]


windows = st.one_of(st.none(), st.integers(1, 12))


@given(segments=batches(), window=windows, min_saved=st.sampled_from([0, 3, 10**6]))
def test_every_row_reads_exactly_its_own_keys(
    segments: list[Segment], window: int | None, min_saved: int
) -> None:
    plan = plan_forward(segments, min_saved_reads=min_saved)

    keys = keys_of_rows(plan.layout(window), window)

    assert keys == by_hand(segments, window)
    if window is not None or min_saved == 10**6:
        assert len(plan.layout(window).levels) == 1


@given(segments=batches(), data=st.data())
def test_any_order_of_segments_is_correct_only_shares_less(
    segments: list[Segment], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(segments))

    plan = plan_forward(shuffled)

    assert keys_of_rows(plan.layout(None), None) == by_hand(shuffled, None)
    assert plan.unique_reads.sum() >= plan_forward(segments).unique_reads.sum()


def chain(*lengths: int) -> tuple[Piece, ...]:
    """Pieces 0, 1, 2 … of these lengths, one after the other."""
    ends = np.cumsum(lengths)
    return tuple(
        Piece(i, np.arange(end - n, end, dtype=np.int32), np.arange(end - n, end, dtype=np.int32))
        for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    )


def leaf(context: tuple[Piece, ...], slot: int) -> Segment:
    """One token after a context."""
    at = int(context[-1].positions[-1]) + 1 if context else 0
    own = np.array([slot], np.int32)
    return Segment(context, [7], np.array([at]), own, own, 1)


def sizes(plan: ForwardPlan) -> list[list[int]]:
    return [np.diff(level.kv_indptr.numpy()).tolist() for level in plan.layout(None).levels]


def test_blocks_that_the_same_leaves_share_are_one_span() -> None:
    prompt = chain(10, 5, 3)

    plan = plan_forward([leaf(prompt, 50), leaf(prompt, 51)])

    assert sizes(plan) == [[18], [1, 1]]
    assert (plan.reads.sum(), plan.unique_reads.sum()) == (38, 20)


def test_sharing_found_once_serves_the_next_step() -> None:
    prompt = chain(6)
    first = plan_forward([leaf(prompt, 50), leaf(prompt, 51)])
    grown = [
        Segment(prompt, [8], np.array([7]), np.array([old, new], np.int32), np.array([new]), 1)
        for old, new in ((50, 52), (51, 53))
    ]

    plan = plan_forward(grown, shared=first.shared)

    assert plan.shared is first.shared
    assert keys_of_rows(plan.layout(None), None) == by_hand(grown, None)


def test_a_window_by_index_is_used_only_where_no_position_is_missing() -> None:
    (root,) = chain(8)
    holed = Piece(0, root.slots[[0, 1, 2, 6, 7]], root.positions[[0, 1, 2, 6, 7]])
    own = np.array([50, 51, 52], np.int32)
    places = np.arange(8, 11)

    segments = [Segment((holed,), [1] * 3, places, own, own)]
    near = plan_forward(segments).layout(3)
    wide = plan_forward(segments).layout(5)
    wider = plan_forward(segments).layout(7)

    assert near.levels[0].qo_indptr.tolist() == [0, 3]
    assert near.levels[0].kv_indices.tolist() == [6, 7, 50, 51, 52]
    assert keys_of_rows(wide, 5) == [[6, 7, 50], [6, 7, 50, 51], [6, 7, 50, 51, 52]]
    assert keys_of_rows(wider, 7)[0] == [2, 6, 7, 50]
    assert wider.levels[0].qo_indptr.tolist() == [0, 1, 2, 3]


def test_sharing_leaves_nothing_to_the_garbage_collector() -> None:
    contexts = [(*chain(4, 5), *chain(9, 1)[1:]), (*chain(4, 5), *chain(12, 2)[1:]), chain(4)]
    gc.collect()
    gc.disable()
    try:
        Sharing(LevelRule()).of(contexts, [1, 1, 1])
        assert gc.collect() == 0
    finally:
        gc.enable()
