"""Confidences of texts that compete: the two largest, and the gap between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# decimals in which confidences are compared: their last bits depend on the batch
DECIMALS = 4


def leading_two(texts: Sequence[Hashable], confidences: Sequence[float]) -> tuple[float, ...]:
    """The two largest confidences of different texts; of one text one."""
    best: dict[Hashable, float] = {}
    for text, confidence in zip(texts, confidences, strict=True):
        best[text] = max(best.get(text, 0.0), confidence)
    return tuple(sorted(best.values(), reverse=True)[:2])


def relative_gap(first: float, second: float) -> float:
    """(p1 - p2) / p1, to `DECIMALS` decimals: 0.9 - 0.72 over 0.9 is not 0.2 in binary."""
    return round((first - second) / first, DECIMALS) if first else 0.0
