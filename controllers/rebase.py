"""REBASE: reward-balanced search, whose widths follow the softmax of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion
from .search import Levels, check_at_once, check_settings, without_repeats


@dataclass(frozen=True)
class Rebase:
    """Reward-balanced search (Wu et al., arXiv 2408.00724; thu-wyz/inference_scaling).

        step 1    width thoughts of the root
        step t    W = width - finished paths; of the unfinished thoughts, in order of value r,
                  each grows n = ceil(W e^(r / T) / S) thoughts, S the sum of e^(r / T) over it and
                  those after it; then W -= n

    A level grows in one ask.

    Args:
        width: paths in all; 16 is the least of the source's.
        softmax_temperature: T; 0.2 as released. Small: only the best grow; large: all grow alike.
        dedup: of paths with the same thoughts, only the first may grow.
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.

    Differs from the released code (the paper rounds instead of rounding up in order of value): S is
    added up anew for each thought, so that equal values get equal shares; the depth is the task's
    (released: 25); `dedup`, `threshold` and `stop_value` are new (false, -1 and None for the
    released behaviour). Its final weighted vote is the solver's `aggregate`.
    """

    width: int = 16
    softmax_temperature: float = 0.2
    dedup: bool = True
    threshold: float = 0.0
    stop_value: float | None = 1.0

    def __post_init__(self) -> None:
        check_settings(self, {"width": 1})
        check_at_once(self, "width")
        if not 0 < self.softmax_temperature < math.inf:
            raise UsageError(
                "setting-range",
                f"softmax_temperature={self.softmax_temperature}: it must be above 0.",
            )

    def start(self, tree: ThoughtTree, max_depth: int) -> RebaseSearch[Any]:
        return RebaseSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        return self.width * max_depth


def rebase_widths(values: Sequence[float], width: int, softmax_temperature: float) -> list[int]:
    """Children of each thought, in the order given; their sum is `width`.

    Args:
        values: of the thoughts; equal ones are served in the order given.
        width: children in all.
        softmax_temperature: T of the softmax.
    """
    if not values:
        return []
    order = sorted(range(len(values)), key=lambda place: -values[place])  # stable
    highest = values[order[0]]
    shares = [math.exp((values[place] - highest) / softmax_temperature) for place in order]
    widths = [0] * len(values)
    for rank, place in enumerate(order):
        after = math.fsum(shares[rank:])
        share = shares[rank] / after if after > 0 else 0.0
        widths[place] = min(width, math.ceil(width * share))
        width -= widths[place]
    return widths


Settings = TypeVar("Settings", bound=Rebase)


class RebaseSearch(Levels[Settings]):
    """The levels of one problem; `_next` is the level with the thoughts each path grows."""

    def __init__(self, settings: Settings, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth, settings.width)
        self._left = settings.width  # minus finished paths

    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        self._left -= sum(child.state is NodeState.TERMINAL for child in level)
        if self._left <= 0:
            return []
        fresh = without_repeats(level) if self._settings.dedup else level
        kept = self._kept([child for child in fresh if self._may_grow(child)], self._left)
        values = [child.value for child in kept]
        widths = rebase_widths(values, self._left, self._settings.softmax_temperature)
        return [
            Expansion(child, width) for child, width in zip(kept, widths, strict=True) if width > 0
        ]

    def _kept(self, able: Sequence[Node], width: int) -> Sequence[Node]:
        """The thoughts among which the width is shared: all of them.

        Args:
            able: thoughts of the level that may grow, in order of id.
            width: thoughts of the next level.
        """
        return able
