"""Which tokens stay: protected ones first, then by score, the newer of equals."""

from __future__ import annotations

import numpy as np

from arbor.retention.base import Blocks, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import order


def kept(blocks: Blocks, counts: Ints, scorer: Scorer) -> list[Ints]:
    """Tokens each block keeps on the device.

    The token view is not made where no block is in part: all of its tokens stay, or none.

    Args:
        blocks: what was offered.
        counts: int64 [M], how many each keeps, 0 <= count <= resident.
        scorer: which tokens matter.

    Returns:
        for each block int64 [count], sorted offsets.
    """
    part = (counts > 0) & (counts < blocks.length)
    if not part.any():
        return [np.arange(count) for count in counts.tolist()]
    tokens = blocks.tokens
    asked = np.flatnonzero(part[tokens.block])
    block = tokens.block[asked]
    first = ranking(tokens, scored(scorer, tokens), asked, block)
    # `first` runs block by block, best token first:  | b0: best ... worst | b1: best ... worst | ...
    grouped = block[first]
    parted = np.flatnonzero(part)
    starts = np.searchsorted(grouped, parted)
    place = np.arange(len(grouped)) - np.repeat(starts, np.diff(starts, append=len(grouped)))
    chosen = np.zeros(len(asked), np.bool_)
    chosen[first[place < counts[grouped]]] = True
    pieces = np.split(tokens.offset[asked][chosen], np.cumsum(counts[parted])[:-1])
    result = [np.arange(count) for count in np.where(part, 0, counts).tolist()]
    for index, piece in zip(parted.tolist(), pieces, strict=True):
        result[index] = piece
    return result


def scored(scorer: Scorer, tokens: Tokens) -> Floats:
    """A scorer's answer, checked: one finite number a token."""
    scores = scorer.scores(tokens)
    assert scores.shape == tokens.block.shape, f"{scorer} scored {scores.shape}, not every token"
    assert np.isfinite(scores).all(), f"{scorer} gave a score that is not finite"
    return scores


def ranking(tokens: Tokens, scores: Floats, asked: Ints, group: Ints | None = None) -> Ints:
    """Order in which tokens are kept: protected, then the higher score, then the later position, then the first block.

    Args:
        asked: int64 [S], indices of the tokens to rank.
        group: int64 [S], rank within these groups, one group after the other; all together if None.

    Returns:
        int64 [S], indices into `asked`.
    """
    keys = (~tokens.protected[asked], -scores[asked], -tokens.position[asked])
    return order(*keys) if group is None else order(group, *keys)
