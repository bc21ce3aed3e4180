"""Expansions that overlap in time, and the order in which they end: a logical clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from arbor.controllers.base import Expansion
from arbor.run.searches import Awaited, Steps
from arbor.tree import Node

if TYPE_CHECKING:
    from arbor.engine.operation import Growing

# the children with a value, and whether their verification asked the model
Grown = tuple[list[Node], bool]


class Overlapping:
    """One expansion while it grows and while its children are verified.

    Its time is logical, so that the order of ends depends on the blocks alone: not on which rows
    had to wait, nor on how many steps the engine took. It ends after as many ticks as its longest
    block has sampled tokens, and one more if the verification asks the model.

    Args:
        expansion: what grows.
        start: when it begins, ticks.
        steps: decodes and verifies the children; yields the `Growing` first.

    Attributes:
        question: asks the model for its children; None: they are sampled.
        children: all of its children so far, those that an interruption gave up included.
        awaited: what it waits for; None once it has ended.
        end: when it ended, ticks; None before that.
        reported: the children given to `tell`.
    """

    def __init__(self, expansion: Expansion, start: int, steps: Steps[Grown]) -> None:
        self.expansion = expansion
        self.start = start
        self._steps = steps
        self.awaited: Awaited | None = next(steps)
        first: Sequence[Node] = cast("Growing", self.awaited).children
        self.question = first[0] if expansion.generate == "propose" else None
        self.children: Sequence[Node] = [] if self.question else first
        self.end: int | None = None
        self.reported: list[Node] = []
        self._asks = False  # its verification has asked the model

    @property
    def ready(self) -> bool:
        """Whether it can go on."""
        return self.awaited is not None and self.awaited.done

    @property
    def earliest(self) -> int:
        """The earliest time at which it can end, ticks."""
        if self.end is not None:
            return self.end
        return self.start + max(1, self._longest) + self._asks

    @property
    def _longest(self) -> int:
        """Sampled tokens of its longest block so far."""
        blocks = self.children if self.question is None else [self.question]
        return max(len(block.tokens) - block.given for block in blocks)

    def go_on(self) -> None:
        """Continue as far as possible.

        Raises:
            Exception: what ended the operation it waited for, or what the verifier raised.
        """
        while self.awaited is not None and self.awaited.done:
            try:
                self.awaited = next(self._steps)
                if self.question is not None and not self.children:
                    self.children = getattr(self.awaited, "children", [])
                    continue
                self._asks = self._asks or getattr(self.awaited, "counts", True)
            except StopIteration as stopped:
                self.reported, asked = stopped.value
                self.end = self.start + self._longest + (self._asks or asked)
                self.awaited = None

    def close(self) -> None:
        """Give up what it was about to do."""
        self._steps.close()


class AnyEnded:
    """Wait until an expansion can go on, or can be reported.

    Args:
        overlapping: those in progress, in the order asked.
    """

    def __init__(self, overlapping: Sequence[Overlapping]) -> None:
        self._overlapping = overlapping

    @property
    def done(self) -> bool:
        """Whether one can."""
        return any(each.ready for each in self._overlapping) or bool(due(self._overlapping))


def due(overlapping: Sequence[Overlapping]) -> list[Overlapping]:
    """The expansions that ended first, all at one time; none while another may still end before or
    with them.

    Args:
        overlapping: those in progress, in the order asked.
    """
    ends = [each.end for each in overlapping if each.end is not None]
    if not ends:
        return []
    first = min(ends)
    if any(each.end is None and each.earliest <= first for each in overlapping):
        return []
    return [each for each in overlapping if each.end == first]
