"""The page of a comparison: the table of its arms, two plots, and its problems arm by arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from arbor.measure.evaluation.plot import Point, Series, plot
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
