"""The blocks the search is most likely to read again stay: the optimum where nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks


@dataclass(frozen=True)
class Reentry:
    """Keep whole blocks in the order of need: the operation in progress, then by probability.

    In lossless mode a block costs P(it is read again) times the tokens it lacks: linear, so the
    cheapest choice fills blocks completely by descending probability, and which tokens of the last
    one stay is irrelevant. All missing blocks of a path are computed together, so a transition that
    lacks anything costs one forward; that charge is left out, and it is the most the choice can
    lose.

    Order: smallest `scheduled` (certain), blocks that may be read again, those of trees opened
    earlier, largest `reentry`, ancestors first, last used, node id; whole blocks, at most one in
    part. Earlier trees come first because their searches end first, and then free all they hold.
    Probability does not grow from the root to a leaf, so leaves go first without a rule of their
    own.
    Replaces ArborKV's log utility and its decay with distance, which are for lossy mode.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        keys = (
            blocks.scheduled,
            (blocks.reentry <= 0).astype(np.int64),
            blocks.turn,
            -blocks.reentry,
            blocks.depth,
            -blocks.last_used,
        )
        return whole_blocks(blocks, room, order(*keys))
