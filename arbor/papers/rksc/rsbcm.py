"""RKSC's block cache manager: the blocks of high value and small depth stay, up to a capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from arbor.errors import check_settings
from arbor.retention.base import Blocks, Ints, Scorer
from arbor.retention.ordering import order, whole_blocks
from arbor.retention.policy import Policy

Unit = Literal["blocks", "tokens"]


@dataclass(frozen=True)
class RSBCM:
    """Keep whole blocks of the largest w = value / (depth + 1), at most `capacity` of them.

    Reasoning-selective block cache manager (RKSC, arXiv 2606.09937, section 2.4). Of equal w the
    most recently used block stays, then the smaller node id. The capacity is a limit of its own
    next to the budget: blocks beyond it leave at the next decode step, although there is room.

    Differs from the paper: blocks of running paths are pinned and do not count; a block without a
    value has that of its nearest valued ancestor; at the budget's edge one block may be cut, so
    that no slot stays empty. The released manager holds no tensors, its importance is 1 and its
    depth 1 throughout.

    Attributes:
        capacity: most blocks (or tokens) off the running paths, >= 1; what is protected of a block
            stays beyond it. Of all searches of an engine together, or of each one where the policy
            divides the room among them (`among`).
        unit: what `capacity` counts.
    """

    reads_values: ClassVar[bool] = True  # `Blocks.value`

    capacity: int = 2000
    unit: Unit = "blocks"

    def __post_init__(self) -> None:
        check_settings(self, capacity=(self.capacity >= 1, "at least 1, such as 2000"))

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return self._counts(blocks, room)

    def _counts(self, blocks: Blocks, room: int) -> Ints:
        preferred = order(-blocks.value / (blocks.depth + 1), -blocks.last_used)
        if self.unit == "tokens":
            least = int(blocks.floor.sum())
            return whole_blocks(blocks, min(room, max(self.capacity, least)), preferred)
        counts = whole_blocks(blocks, room, preferred)
        kept = preferred[(blocks.resident > blocks.floor)[preferred]]
        counts[kept[self.capacity :]] = blocks.floor[kept[self.capacity :]]
        return counts

    def excess(self, blocks: Blocks) -> int:
        """Tokens beyond the capacity."""
        held = int(blocks.resident.sum())
        over = len(blocks) > self.capacity if self.unit == "blocks" else held > self.capacity
        if not over:
            return 0
        return held - int(self._counts(blocks, held).sum())


POLICY = Policy(
    RSBCM(),
    spares_paths=True,
    summary="Keeps blocks of high value and small depth, up to a capacity in blocks (RSBCM of RKSC).",
)
