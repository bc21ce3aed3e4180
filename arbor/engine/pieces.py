"""Blocks of a tree as pieces of context to read and segments of new tokens to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arbor.model.plan import Piece, Segment
from arbor.model.sharing import Context
from arbor.tree import Node


def contexts_of(
    nodes: Sequence[Node | None], hidden: AbstractSet[int] = frozenset()
) -> list[Context]:
    """The context that each of several paths is, by the block it ends with (None: no path).

    It consists of the resident tokens of the blocks that are not hidden, by row. Paths that
    share blocks share their pieces.
    """
    heads: dict[int, list[Piece]] = {}
    contexts: list[Context] = []
    for node in nodes:
        path = node.path if node is not None else []
        for each in path:
            if each.row not in heads:
                heads[each.row] = [] if each.row in hidden else head(each, len(each.tokens))
        contexts.append(tuple(piece for each in path for piece in heads[each.row]))
    return contexts


def head(node: Node, end: int) -> list[Piece]:
    """The resident ones of a block's first `end` tokens, and those that attention reads in host
    memory.

    They are one piece (or none); those of a prompt end where what it shares with other prompts
    ends, and the pieces of such prompts that name the same slots have equal keys.
    """
    slots = node.span.address[:end]
    offsets = np.flatnonzero(slots >= 0)
    if len(offsets) == 0:
        return []
    positions = (node.start + offsets).astype(np.int32)
    forest = node.tree.forest
    cuts = forest.cuts.get(node.row, ()) if forest is not None and forest.cuts else ()
    if not cuts:
        return [Piece((node.row, end), slots[offsets], positions)]
    ends = np.searchsorted(offsets, [0, *(cut for cut in cuts if cut < end), end])
    pieces = []
    for first, last in pairwise(ends.tolist()):
        if first < last:
            part = slots[offsets[first:last]]
            # a slot holds one token at one position, so equal ends mean equal K/V between them
            key = (int(part[0]), int(part[-1]), last - first)
            pieces.append(Piece(key, part, positions[first:last]))
    return pieces


def segments_of(
    ordered: Sequence[Node],
    holes: Mapping[int, NDArray[np.int64]],
    wanted: AbstractSet[int],
    trash: int,
    *,
    hidden: AbstractSet[int],
    before: AbstractSet[int],
    computed: AbstractSet[int],
) -> tuple[list[Segment], list[Node], list[int]]:
    """The runs of tokens to compute; a run's context ends where it begins.

    Args:
        ordered: blocks whose tokens have slots, depth first.
        holes: offsets of the tokens to compute, increasing, by row.
        wanted: rows of blocks whose logits after the last token are needed.
        trash: the slot for K/V that are there already.
        hidden: rows of blocks that nothing attends to.
        before: rows of blocks that were computed before these were hidden: their K/V attend to them
            all the same.
        computed: rows of blocks computed at least once.

    Returns:
        the segments, the block of each, and the rows of the blocks whose logits they give, in
        order.
    """
    nowhere = np.full(1, trash, np.int32)
    segments: list[Segment] = []
    owners: list[Node] = []
    order: list[int] = []
    for node in ordered:
        masked = frozenset() if node.row in before else hidden
        runs = runs_of(holes[node.row])
        last = len(node.tokens) - 1
        if node.row in wanted:
            order.append(node.row)
        # the last token runs once more, for its logits only: it is resident, or its K/V attend to
        # more than they do
        again = node.row in wanted and (not runs or runs[-1][1] != last + 1 or masked != hidden)
        for begin, end in runs:
            slots = node.span.slot[begin:end]
            owners.append(node)
            segments.append(
                Segment(
                    context=(*contexts_of([node.parent], masked)[0], *head(node, begin)),
                    tokens=node.tokens[begin:end],
                    positions=np.arange(node.start + begin, node.start + end),
                    tail=slots,
                    write=slots,
                    logits=int(node.row in wanted and end == last + 1 and not again),
                    again=node.row in computed,
                )
            )
        if again:
            owners.append(node)
            segments.append(
                Segment(
                    context=(*contexts_of([node.parent], hidden)[0], *head(node, last)),
                    tokens=node.tokens[last:],
                    positions=np.arange(node.start + last, node.end),
                    tail=node.span.slot[last:],
                    write=nowhere,
                    logits=1,
                    again=True,
                )
            )
    return segments, owners, order


def runs_of(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Increasing offsets as half-open runs of consecutive ones: 0 1 2 5 -> (0, 3), (5, 6)."""
    if len(offsets) == 0:
        return []
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    begins = offsets[np.concatenate(([0], breaks))]
    ends = offsets[np.concatenate((breaks - 1, [len(offsets) - 1]))] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
