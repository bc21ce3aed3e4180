"""Segments lie in few bits by their types: the bits of ThinKV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from arbor.errors import check_settings
from arbor.papers.related.thinkv import Segments, ThinKV, Thought, credit_of, remembered
from arbor.retention.base import Blocks, Bools, Floats, Ints, Scorer
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.selection import filled_floors

Packed = Literal["reasoning", "execution", "transition"]
_TYPES: dict[Packed, Thought] = {
    "reasoning": Thought.REASONING,
    "execution": Thought.EXECUTION,
    "transition": Thought.TRANSITION,
}


@dataclass(frozen=True)
class ThinKVBits(ThinKV):
    """As `ThinKV`, at the policy's times: what transitions step down is destroyed, and segments of
    the types `packed` lie in host memory in few bits.

    Source: ThinKV, section 4.2: a segment is quantised once its type is known, with bits by its
    type (R4E4T2). Differs: the store has one number of bits, so a type is packed or exact, and none
    can have 2 where others have 4 (records are counted, and are of one size); 32 tokens are
    quantised together instead of 16. A segment is packed at the first time after it closed. Room
    destroys nothing: what has no room on the device is read in host memory. Keys are read on the
    device only: a type is measured over the tokens that it still has, and of a segment in host
    memory the later tokens stay instead of those near the centres.

    Attributes:
        packed: the types in few bits.
    """

    packed: tuple[Packed, ...] = ("reasoning", "execution", "transition")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(
            self,
            packed=(
                bool(self.packed)
                and set(self.packed) <= set(_TYPES)
                and (bool(self.valleys) or "reasoning" in self.packed),
                "some of reasoning, execution, transition, with reasoning where there are no valleys",
            ),
        )

    @property
    def destroys(self) -> bool:
        """What leaves is gone for good: only where nothing is computed again."""
        return True

    def excess(self, blocks: Blocks) -> int:
        """See `CappedAllocator`: what the transitions so far have asked of the segments before."""
        segments, thought = self._typed(blocks)
        tokens = blocks.tokens
        fixed = filled_floors(blocks, tokens, np.zeros(len(tokens.block)))
        least = np.bincount(segments.of[fixed], minlength=len(segments))
        limits = self.limits(segments.length)
        steps = np.minimum(self.turns(segments, thought), limits.shape[1] - 1)
        limit = limits[np.arange(len(segments)), steps]
        return int(np.maximum(segments.held - np.maximum(limit, least), 0).sum())

    def packing(self, blocks: Blocks, done: Bools, scorer: Scorer) -> Ints:
        """See `PackingAllocator`: the tokens of closed segments of the types `packed`."""
        segments, thought = self._typed(blocks)
        wanted = np.isin(thought, [int(_TYPES[each]) for each in self.packed])
        chosen: Ints = np.flatnonzero(wanted[segments.of] & ~blocks.tokens.protected & ~done)
        return chosen

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """As `ThinKV.credited`; what leaves the device for want of room has made no step."""
        leaving, credit = super().credited(blocks, room, scorer)
        steps, sparsity = remembered(credit)
        return leaving, credit_of(np.zeros_like(steps), sparsity)

    def _typed(self, blocks: Blocks) -> tuple[Segments, Ints]:
        """The segments offered, and the `Thought` of each."""
        segments = Segments(blocks, self.segment)
        _, known = remembered(blocks.tokens.credit)
        _, mean = self._measured(segments, blocks.tokens, known)
        return segments, self._thoughts(segments, mean)


POLICY = Policy(
    ThinKVBits(),
    protect=Protect(prompt=True),
    trigger=Trigger(every=32),
    summary="Keeps fewer and fewer tokens of each thought at each change of direction, and thoughts of "
    "some types in few bits of host memory (ThinKV).",
)
