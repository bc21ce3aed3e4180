"""What a retention policy decides: how many tokens each evictable block keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arbor.tree import Node


@dataclass(frozen=True, slots=True)
class Block:
    """A block a policy may take tokens from: it lies on no running path.

    Attributes:
        node: the block.
        resident: its tokens on the device.
        last_used: clock of the last forward that read it; larger is later.
    """

    node: Node
    resident: int
    last_used: int


@runtime_checkable
class Allocator(Protocol):
    """How many tokens each block keeps. What is protected, and when a policy is asked, belong to the engine."""

    def counts(self, blocks: Sequence[Block], room: int) -> list[int]:
        """Tokens each block keeps.

        Args:
            blocks: evictable blocks, by node id.
            room: slots they may keep together, >= 0.

        Returns:
            0 <= k_i <= resident_i for each block, in order; the sum is at most `room`.
        """
        ...
