"""Plots of success against a cost as SVG, in the viewer's colours."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 12, 40  # margins
COLOURS = ("active", "host", "pick", "budget", "full", "mark", "edge")  # of viewer.css


@dataclass(frozen=True, slots=True)
class Point:
    """A share of successes at a cost.

    Attributes:
        x: the cost, 0 or more.
        share, low, high: the share and its interval, in [0, 1].
        text: shown at the point.
    """

    x: float
    share: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points joined by a line, in the order of their cost.

    Attributes:
        label: in the legend.
        points: in any order.
    """

    label: str
    points: tuple[Point, ...]


def plot(title: str, unit: str, series: Sequence[Series]) -> str:
    """A figure: the shares with their intervals, against the cost.

    Args:
        title: above it.
        unit: of the cost, below the axis.
        series: at least one with points.
    """
    points = [point for each in series for point in each.points]
    most, step = _axis(max((point.x for point in points), default=0.0))
    parts = []
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{10 * tenth} %</text>')
    for number in range(round(most / step) + 1):
        x = _x(number * step, most)
        parts.append(
            f'<text class="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{number * step:,.6g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="middle" x="{middle}" y="{HEIGHT - 6}">{html.escape(unit)}</text>')
    for place, each in enumerate(series):
        parts.append(_drawn(each, place, most))
    legend = "".join(
        f'<li><svg width="14" height="12" aria-hidden="true">'
        f'<g style="{_colour(place)}">{_mark(7, 6, place)}</g></svg>'
        f"{html.escape(each.label)}</li>"
        for place, each in enumerate(series)
    )
    says = html.escape("; ".join(point.text for point in points), quote=True)
    return (
        f'<figure class="plot"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{says}">{"".join(parts)}</svg>'
        f'<ul class="legend">{legend}</ul></figure>\n'
    )


def _drawn(series: Series, place: int, most: float) -> str:
    """A series: its line, intervals and marks."""
    ordered = sorted(series.points, key=lambda point: point.x)
    spots = [(_x(point.x, most), point) for point in ordered]
    line = " ".join(f"{x:.1f},{_y(point.share):.1f}" for x, point in spots)
    parts = [f'<polyline class="line" points="{line}"/>'] if len(spots) > 1 else []
    for x, point in spots:
        low, high = _y(point.low), _y(point.high)
        bar = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"
        parts.append(
            f'<g><title>{html.escape(point.text)}</title><path class="bar" d="{bar}"/>'
            f"{_mark(x, _y(point.share), place)}</g>"
        )
    return f'<g style="{_colour(place)}">{"".join(parts)}</g>'


def _colour(place: int) -> str:
    return f"color:var(--{COLOURS[place % len(COLOURS)]})"


def _mark(x: float, y: float, place: int) -> str:
    """A mark; its shape distinguishes series without colours."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>',
    )
    return shapes[place % len(shapes)]


def _x(cost: float, most: float) -> float:
    return LEFT + cost / most * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _axis(highest: float) -> tuple[float, float]:
    """The end of an axis from 0 that holds a value, and the step between its numbers."""
    if highest <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(
        part * power / 10 for part in (1, 2, 2.5, 5, 10, 20, 25) if highest <= 6 * part * power / 10
    )
    return step * math.ceil(highest / step), step
