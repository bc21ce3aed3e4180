"""The page of a comparison: the table of its arms, two plots, and its problems arm by arm."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arbor.measure.evaluation.compare import LEAST_DECIDING, ArmRuns, difference_text, percent_text
from arbor.measure.evaluation.folder import linked_pages
from arbor.measure.evaluation.list_page import (
    RunFacts,
    escaped,
    facts_html,
    list_page,
    list_row,
    number_cell,
    share_bar,
    shared_facts,
    short,
    words_cell,
)
from arbor.measure.evaluation.page import marked_outcome, search_link
from arbor.measure.evaluation.results import is_right

OUTCOMES = ("all right", "none right", "arms differ")

# name of a column and of a field of the table, and how it is written
_COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("generated", "tokens_generated", "{:,.0f}".format),
    ("reused", "tokens_reused", "{:,.0f}".format),
    ("shared", "tokens_shared", "{:,.0f}".format),
    ("recomputed", "tokens_recomputed", "{:,.0f}".format),
    ("peak KV", "peak_tokens", "{:,.0f}".format),
    ("largest peak", "largest_peak_tokens", "{:,.0f}".format),
    ("CPU s", "cpu_s", "{:.2f}".format),
    ("wall s", "wall_s", "{:.2f}".format),
    ("ended by the tokens", "reached_tokens", "{:.0%}".format),
    ("guessed", "guessed", "{:.0%}".format),
    ("cut", "cut", "{:.0%}".format),
)
_NOTES = (
    "Costs are means of a search. Intervals cover 95 %: exact (Clopper and Pearson) with one seed, "
    "a bootstrap over problems with several; differences are paired by problem, p is McNemar's. "
    f"Fewer than {LEAST_DECIDING} problems decide nothing, whatever their outcomes.",
    "Reused: tokens above each new block, whose KV its path already had. Shared: tokens of the "
    "prompt that another problem's KV gave. Recomputed: tokens whose KV had been evicted.",
)


def compare_page(found: Mapping[str, Any], runs: Sequence[ArmRuns], path: Path) -> str:
    """The page.

    Args:
        found: the results, as in ``compare.json``.
        runs: of the arms.
        path: of the comparison's folder.
    """
    budgets = ", ".join(
        f"{budget} at {tokens:,} tokens" for tokens, budget in found["budgets"] if tokens
    )
    if len({budget for _, budget in found["budgets"]}) == 1:
        budgets = found["budgets"][0][1]
    about = (
        f"{found['samples']:,} problems of {found['dataset']}; KV budget of a search: {budgets}."
    )
    made = [[RunFacts.read(path / each) for each in row["folders"]] for row in found["table"]]
    every = [each for row in made for each in row]
    shared = shared_facts(every)
    own = [  # what an arm's runs have in common and other arms do not
        ", ".join(f"{n} {text}" for n, text in shared_facts(row).items() if n not in shared)
        for row in made
    ]
    head = "\n".join(
        (
            f"<p>{escaped(about)}</p>",
            facts_html(every),
            _table(found["table"], own),
            *(f'<p class="hint">{escaped(note)}</p>' for note in _NOTES),
            _plots(found["table"]),
            _hint(runs),
        )
    )
    shown = _shown(runs)
    columns = [("sample", False), ("problem", False), ("key", False)]
    for arm in shown:
        columns += [(arm.label, False), (f"{arm.label}: tokens", True)]
    pages = [
        [
            linked_pages(path / folder, rows.values())
            for folder, rows in zip(arm.folders, arm.rows, strict=True)
        ]
        for arm in shown
    ]
    title = f"arbor compare {found['dataset']}"
    common = set.intersection(*(set(arm.samples) for arm in shown)) if shown else set()
    rows = [_row(each, shown, pages) for arm in shown[:1] for each in arm.samples if each in common]
    return list_page(title, head, columns, rows, OUTCOMES)


def _table(table: Sequence[Mapping[str, Any]], made: Sequence[str]) -> str:
    """The table of the arms.

    Args:
        table: as in ``compare.json``.
        made: what only the arm of each row was made with.
    """
    heads = ("arm", "tokens", "n", "success, %", "against the first, points", "any right, %")
    rows = "\n".join(_table_row(row, own) for row, own in zip(table, made, strict=True))
    columns = "".join(
        f'<th scope="col">{escaped(head)}</th>'
        for head in (*heads, *(name for name, _, _ in _COSTS))
    )
    return (
        f'<div class="scroll"><table class="arms"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _table_row(row: Mapping[str, Any], own: str) -> str:
    links = " ".join(
        f'<a href="{quote(folder)}/index.html">seed {seed}</a>'
        for seed, folder in zip(row["seeds"], row["folders"], strict=True)
    )
    success, (low, high) = row["success"], row["success"]["interval"]
    cells = [
        f"<td>{escaped(row['arm'])}<br>{links}<br><small>{escaped(own)}</small></td>",
        number_cell("" if row["tokens"] is None else f"{row['tokens']:,}"),
        number_cell(f"{row['n']:,}"),
        f'<td class="share">{percent_text(success)}{share_bar(success["value"], low, high, "success")}</td>',
        f"<td>{escaped(difference_text(row['difference']))}</td>",
        f'<td class="share">{percent_text(row["any_correct"])}</td>',
        *(number_cell(text(row[name])) for _, name, text in _COSTS),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _plots(table: Sequence[Mapping[str, Any]]) -> str:
    """Success against tokens, and against peak KV."""
    figures = [
        plot(f"Success by {unit}, mean of a search", unit, _series(table, name))
        for name, unit in (
            ("tokens_generated", "tokens generated"),
            ("peak_tokens", "peak KV, tokens"),
        )
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if table else ""


def _series(table: Sequence[Mapping[str, Any]], name: str) -> list[Series]:
    """A series for each arm, a point for each number of tokens."""
    points: dict[str, list[Point]] = {}
    for row in table:
        share, (low, high) = row["success"]["value"], row["success"]["interval"]
        text = f"{row['arm']}: {percent_text(row['success'])} % at {row[name]:,.0f}"
        points.setdefault(row["arm"], []).append(Point(row[name], share, low, high, text))
    return [Series(label, tuple(each)) for label, each in points.items()]


def _shown(runs: Sequence[ArmRuns]) -> list[ArmRuns]:
    """The runs of each arm at its largest number of tokens."""
    last: dict[str, ArmRuns] = {}
    for arm in runs:
        known = last.get(arm.label)
        if known is None or (arm.tokens or 0) >= (known.tokens or 0):
            last[arm.label] = arm
    return list(last.values())


def _hint(runs: Sequence[ArmRuns]) -> str:
    """What the list shows, and how its searches become pages."""
    if not runs:
        return ""
    levels = {arm.tokens for arm in runs}
    at = f" at {max(tokens or 0 for tokens in levels):,} tokens" if len(levels) > 1 else ""
    command = "arbor view . --samples --open"
    return (
        f"<p>Each problem with its outcome and answer under every arm{at}; "
        f"outcomes become links to searches by, in this folder: <code>{command}</code></p>"
    )


def _row(
    sample: str, shown: Sequence[ArmRuns], pages: Sequence[Sequence[Mapping[str, str]]]
) -> str:
    first = shown[0].rows[0][sample]
    cells = [words_cell(first.get(name)) for name in ("id", "problem", "expected")]
    shares = []
    for arm, linked in zip(shown, pages, strict=True):
        links = [
            search_link(rows[sample], known, folder, marked_outcome(rows[sample]))
            for rows, known, folder in zip(arm.rows, linked, arm.folders, strict=True)
        ]
        shares.append(arm.share(sample, is_right))
        answers = dict.fromkeys(short(rows[sample].get("answer")) for rows in arm.rows)
        given = ", ".join(filter(None, answers))
        cells.append(f'<td class="words">{", ".join(links)}<br><b>{given}</b></td>')
        cells.append(number_cell(f"{arm.mean_cost(sample, 'tokens_generated'):,.0f}"))
    best, worst = max(shares), min(shares)
    outcome = OUTCOMES[0] if worst == 1 else OUTCOMES[1] if best == 0 else OUTCOMES[2]
    return list_row(cells, worst == 1, outcome)


# Plots of success against a cost as SVG, in the viewer's colours

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
