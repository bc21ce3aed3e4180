"""REBASE: reward-balanced search, whose widths follow the softmax of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion
from .ranking import finished, give_up, is_open_end, read_of_level, repeats


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
        threshold: a thought grows only if its value is above this; the default leaves out what a
            verifier refutes.
        stop_value: the search ends as soon as a finished path is worth this much; None for never.

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
        check_rebase(self.width, self.softmax_temperature)

    def start(self, tree: ThoughtTree, max_depth: int) -> RebaseSearch:
        return RebaseSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """width x max_depth."""
        return self.width * max_depth


def check_rebase(width: int, softmax_temperature: float) -> None:
    """Refuse settings that no search has.

    Raises:
        UsageError: names the setting.
    """
    if width < 1:
        raise UsageError("setting-range", f"width={width}: it must be at least 1.")
    if not 0 < softmax_temperature < math.inf:
        raise UsageError(
            "setting-range", f"softmax_temperature={softmax_temperature}: it must be above 0."
        )


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


class Levels(Protocol):
    """The settings of a search by levels: those of `Rebase`, see there."""

    @property
    def width(self) -> int: ...
    @property
    def softmax_temperature(self) -> float: ...
    @property
    def dedup(self) -> bool: ...
    @property
    def threshold(self) -> float: ...
    @property
    def stop_value(self) -> float | None: ...


class RebaseSearch:
    """The levels of one problem; `_next` is the level with the thoughts each path grows."""

    def __init__(self, settings: Levels, tree: ThoughtTree, max_depth: int) -> None:
        self._settings = settings
        self._tree = tree
        self._max_depth = max_depth
        self._left = settings.width  # minus finished paths
        self._next = [Expansion(tree.root, settings.width)]

    def ask(self, room: int) -> list[Expansion]:
        return list(self._next)

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        return read_of_level(children, self._max_depth)

    def tell(self, children: Sequence[Node]) -> None:
        settings = self._settings
        level = sorted(children, key=lambda child: child.id)
        done = [child for child in level if child.state is NodeState.TERMINAL]
        self._next = []
        if settings.stop_value is not None and any(n.value >= settings.stop_value for n in done):
            return
        self._left -= len(done)
        repeated = repeats(level) if settings.dedup else [False] * len(level)
        able = [
            child
            for child, again in zip(level, repeated, strict=True)
            if not again and is_open_end(child, self._max_depth, settings.threshold)
        ]
        if self._left > 0:
            kept = self.chosen(able, self._left)
            values = [child.value for child in kept]
            widths = rebase_widths(values, self._left, settings.softmax_temperature)
            self._next = [
                Expansion(child, width)
                for child, width in zip(kept, widths, strict=True)
                if width > 0
            ]
        growing = {expansion.leaf.id for expansion in self._next}
        give_up(child for child in level if child.id not in growing)

    def chosen(self, able: Sequence[Node], width: int) -> Sequence[Node]:
        """The thoughts among which the width is shared: all of them.

        Args:
            able: thoughts of the level that may grow, in order of id.
            width: thoughts of the next level.
        """
        return able

    def prospects(self) -> dict[int, float]:
        return {}  # leaves outside the next round are given up

    def best(self) -> list[Node]:
        return finished(self._tree)
