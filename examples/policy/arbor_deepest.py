"""A retention policy that keeps the deepest blocks and gives up the others first."""

from dataclasses import dataclass

from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks
from arbor.retention.policy import Policy


@dataclass(frozen=True)
class Deepest:
    """Keeps whole blocks, the deepest first."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return whole_blocks(blocks, room, order(-blocks.depth))


DEEPEST = Policy(Deepest(), summary="Keeps the deepest blocks.")
