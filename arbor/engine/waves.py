"""Cutting work of known length into waves that fit the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arbor.tree import Node


def fitting(nodes: Sequence[Node], extra: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Waves of which the union of all paths and the extra tokens are within the budget.

    Args:
        nodes: where each piece of work begins, in depth-first order, so that a wave shares what it
            can.
        extra: tokens each needs beyond its path.
        slots: the budget; no path with its own extra tokens is longer.

    Yields:
        indices into `nodes`.
    """
    wave: list[int] = []
    paths: set[int] = set()
    total = 0
    for index, (node, more) in enumerate(zip(nodes, extra, strict=True)):
        new = [n for n in node.path if n.id not in paths]
        cost = sum(len(n.tokens) for n in new) + more
        if wave and total + cost > slots:
            yield wave
            wave, paths = [], set()
            new, total = node.path, 0
            cost = node.end + more
        wave.append(index)
        paths.update(n.id for n in new)
        total += cost
    if wave:
        yield wave


def halves(extra: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Waves whose extra tokens take at most half of the budget (one piece of work may take more);
    lossy mode leaves the rest to what the policy keeps of the paths. Yields indices into
    `extra`."""
    wave: list[int] = []
    total = 0
    for index, more in enumerate(extra):
        if wave and 2 * (total + more) > slots:
            yield wave
            wave, total = [], 0
        wave.append(index)
        total += more
    if wave:
        yield wave
