"""ChunkKV, AdaKV and PyramidKV: whole chunks stay, or KV heads have budgets, by SnapKV's score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.errors import check_settings
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.allocators.segments import Segmented, TokenSequence
from arbor.retention.base import Ints
from arbor.retention.ordering import filled, order
from arbor.retention.policy import Policy
from arbor.retention.scorers import Window


@dataclass(frozen=True)
class Chunks(Segmented):
    """Keep the chunks of `size` positions whose tokens score highest on average.

    Of equal chunks the later one stays. One chunk is kept in part, its best tokens, so that no slot
    stays empty.
    Source: ChunkKV (arXiv 2502.00299). Differs: one set for all heads and layers; the budget is
    exact; chunks are of positions, not of what is left of the sequence, so that a chunk stays the
    same when it has lost tokens.

    Attributes:
        size: positions of a chunk, >= 1; 10 in the paper.
    """

    size: int = 10

    def __post_init__(self) -> None:
        check_settings(self, size=(self.size >= 1, "at least 1"))

    def divide(self, sequence: TokenSequence) -> tuple[Ints, Ints]:
        segment, size = sequence.stretches(self.size)
        mean = np.bincount(segment, sequence.scores) / size
        preferred = order(-mean, -np.arange(len(size)))
        return segment, filled(size, sequence.room, preferred)


CHUNKKV = Policy(
    Chunks(),
    Window(),
    summary="Keeps whole chunks of neighbouring tokens that the last queries attended to (ChunkKV).",
)


ADAKV = Policy(
    Pooled(),
    Window(),
    granularity="head",
    heads="adaptive",
    summary="Keeps the tokens that the last queries attended to; the KV heads of a layer compete for "
    "its room (AdaKV).",
)

PYRAMIDKV = Policy(
    Pooled(),
    Window(),
    granularity="head",
    heads="pyramid",
    summary="Keeps the tokens that the last queries attended to, more of them in lower layers "
    "(PyramidKV).",
)
