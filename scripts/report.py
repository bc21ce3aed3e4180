"""Verdicts of EXPERIMENTS.md; tables and plots of docs/experiments, rendered from its CSV files.

    python scripts/report.py            writes verdicts and tables into the pages, plots as SVG
    python scripts/report.py --check    writes nothing; exit code 1 if a page or a plot differs
    python scripts/report.py --tables   leaves out the plots, which depend on matplotlib's version

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, the verdicts of the page
docs/experiments/NAME.md between ``<!-- verdicts: NAME -->`` and ``<!-- end -->``. CSV files are
append-only, oldest row first: a cell of a table or a point of a plot shows the last row that fits.
A measurement that is repeated and appended replaces the older one on the page and leaves it in the
file.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "EXPERIMENTS.md"
DATA = ROOT / "docs" / "experiments"
MARKED = re.compile(r"(<!-- (table|verdicts): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
VERDICT = re.compile(r"^Verdict: \[(.+?)\]\((#\S+)\) (.+)$", re.MULTILINE)

Row = Mapping[str, str]
Where = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Column:
    """A column of a table: a value, with its interval where the CSV has one."""

    title: str
    value: str  # name of the CSV column
    low: str = ""  # CSV columns of the interval
    high: str = ""
    half: str = ""  # CSV column of half the width of the interval, where it has that instead
    where: Where = field(
        default_factory=dict
    )  # filters of this column, added to those of the table


@dataclass(frozen=True)
class Table:
    """What a table shows: which rows of which CSV file, and which columns."""

    source: str  # name of the CSV file, without its ending
    by: Mapping[str, str]  # CSV column: title; each combination of their values is one row
    columns: tuple[Column, ...]
    where: Where = field(
        default_factory=dict
    )  # a tuple allows several values, and gives their order


def share(title: str, where: Where | None = None) -> Column:
    """A share of solved problems with its interval."""
    low, high = "solved_low_percent", "solved_high_percent"
    return Column(f"{title}, %", "solved_percent", low, high, where=where or {})


def ratio(title: str, where: Where) -> Column:
    """A ratio with its interval."""
    return Column(title, "ratio", "ratio_low", "ratio_high", where=where)


def recomputed(title: str, search: str) -> Column:
    """Recomputed tokens per generated one, in one kind of search."""
    half = "interval_half_width"
    return Column(title, "recomputed_per_generated", half=half, where={"search": search})


def cost(fraction: str) -> Column:
    """CPU time under a part of the peak, against full retention."""
    where = {"budget_fraction": fraction}
    return Column(f"time at {fraction}", "ratio_to_full", "ratio_low", "ratio_high", where=where)


def microseconds(title: str, name: str) -> Column:
    """A time with its quartiles."""
    return Column(title, f"{name}_us", f"{name}_q1_us", f"{name}_q3_us")


def step(title: str, rows_end: str) -> Column:
    """The engine's own time of a decode step, with its quartiles."""
    where = {"rows_end": rows_end}
    return Column(title, "step_ms", "step_q1_ms", "step_q3_ms", where=where)


def lost(rehydrate: str, fraction: str) -> Column:
    """Problems solved with a part of the KV, which comes back or does not."""
    kind = "comes back" if rehydrate == "selective" else "is lost"
    where = {"rehydrate": rehydrate, "budget_fraction": fraction}
    return share(f"{fraction}, {kind}", where)


BEAM = "beam (5, width 4, own judge, lines of at most 16 tokens)"
REPLAYED: Where = {"n": "60", "rehydrate": "selective", "budget_fraction": "0.25"}
DETERMINISTIC: Where = {"deterministic": "yes"}
SAMPLED: Where = {"deterministic": "no"}

TABLES: dict[str, Table] = {
    "budget_answers": Table(
        "budget_answers",
        {"task": "task", "controller": "search", "budget_fraction": "budget, part of the peak"},
        (
            Column("n", "n"),
            Column("same trees", "same_trees", where=SAMPLED),
            Column("same answers", "same_answers", where=SAMPLED),
            Column("same trees, `--deterministic`", "same_trees", where=DETERMINISTIC),
            Column("recomputed tokens, mean", "recomputed_tokens_mean"),
        ),
        {
            "n": "500",
            "temperature": ("", "2"),
            "task": ("game24, test", "chains of 2 and 3 steps, test"),
            "controller": ("tot (beam 5, width 10, to the end)", "beam (5, width 4)"),
            "budget_fraction": ("0.5", "0.25"),
        },
    ),
    "budget_cost": Table(
        "budget_cost",
        {"controller": "search", "machine": "machine"},
        (Column("n", "n"), cost("0.5"), cost("0.25"), cost("0.125")),
        {"n": "20", "budget_of": "measured peak"},
    ),
    "solved": Table(
        "solved",
        {"controller": "search", "verifier": "verifier", "sampling": "siblings"},
        (
            Column("n", "n"),
            share("solved"),
            Column(
                "against greedy, points",
                "difference_points",
                "difference_low_points",
                "difference_high_points",
            ),
            Column("tokens per problem", "tokens_per_problem"),
        ),
        {
            "model": "Sapling (21a844e)",
            "verifier": ("", "self"),
        },
    ),
    "lossy_trees": Table(
        "lossy_trees",
        {"policy": "policy"},
        (
            lost("selective", "0.5"),
            *(lost("off", fraction) for fraction in ("0.75", "0.5", "0.35", "0.25")),
        ),
        {
            "n": "500",
            "controller": BEAM,
            "policy": ("ends", "uniform", "streaming", "lru", "arborkv", "h2o"),
        },
    ),
    "step_speed": Table(
        "step_speed",
        {"machine": "machine", "dtype": "dtype"},
        tuple(ratio(tree, {"tree": tree}) for tree in ("F8", "T4", "F32", "F32x48")),
        {
            "model": "100M Llama",
            "against": "generate, batched, copied caches",
            "machine": ("epyc", "xeon"),
            "dtype": ("float32", "bfloat16"),
        },
    ),
    "engine_step": Table(
        "engine_step",
        {"rows": "rows", "machine": "machine"},
        (
            step("ms", "no"),
            step("ms while rows end", "one a step"),
        ),
        {"min_saved_reads": "0"},
    ),
    "recomputed": Table(
        "recomputed",
        {"policy": "policy"},
        (
            Column("n", "n"),
            recomputed("breadth-first, at 0.25", "breadth-first tot"),
            recomputed("depth-first, at 0.25", "depth-first tot"),
            recomputed("beam, at 0.25", "beam"),
        ),
        {**REPLAYED, "policy": ("lru", "reentry", "belady")},
    ),
    "largest_search": Table(
        "largest_search",
        {"cap_kv_tokens": "cap (tokens of KV)"},
        tuple(
            Column(title, "rounds_mean", "rounds_low", "rounds_high", where={"arm": arm})
            for title, arm in (
                ("a path for every leaf", "unshared: every leaf with its own path"),
                ("the tree shared", "the tree shared"),
                ("within the cap", "within the cap by recomputing (`reentry`, replayed)"),
            )
        ),
    ),
    "policy_cost": Table(
        "policy_cost",
        {"policy": "policy", "machine": "machine"},
        (
            Column("n", "n"),
            microseconds("decision (µs)", "event"),
            microseconds("carried out (µs)", "carried_out"),
        ),
        {
            "blocks": "10000",
            "machine": "epyc",
            "policy": ("lru", "arborkv", "h2o"),
        },
    ),
}


def read(source: str) -> list[dict[str, str]]:
    """The rows of a CSV file, oldest first."""
    with (DATA / f"{source}.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, strict=True))


def fits(row: Row, where: Where) -> bool:
    """Whether a row has the values asked for."""
    return all(
        row[name] in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in where.items()
    )


def newest(rows: Sequence[Row], where: Where, value: str) -> Row | None:
    """The last row that fits and has the value; None if no row does."""
    return next((row for row in reversed(rows) if fits(row, where) and row[value]), None)


def grouped(number: str) -> str:
    """A number with commas between thousands; other text as it is."""
    return f"{int(number):,}" if re.fullmatch(r"-?\d{4,}", number) else number


def cell(row: Row | None, column: Column) -> str:
    """A cell as the page shows it; empty where nothing was measured."""
    if row is None:
        return ""
    text = grouped(row[column.value])
    if column.low and row[column.low]:
        text += f" ({grouped(row[column.low])} to {grouped(row[column.high])})"
    if column.half and row[column.half]:
        text += f" ± {row[column.half]}"
    return text


def keys(rows: Sequence[Row], table: Table) -> list[tuple[str, ...]]:
    """The values that identify the rows of a table, in the order of its filters or the file."""
    found = dict.fromkeys(tuple(row[name] for name in table.by) for row in rows)

    def place(key: tuple[str, ...]) -> tuple[int, ...]:
        wanted = [table.where.get(name, "") for name in table.by]
        return tuple(
            values.index(value) if isinstance(values, tuple) else 0
            for value, values in zip(key, wanted, strict=True)
        )

    return sorted(found, key=place)


def rendered(table: Table) -> str:
    """A table as Markdown, with a line break at its end."""
    rows = [row for row in read(table.source) if fits(row, table.where)]
    lines = []
    for key in keys(rows, table):
        identity = dict(zip(table.by, key, strict=True))
        shown = [
            cell(newest(rows, {**identity, **column.where}, column.value), column)
            for column in table.columns
        ]
        if any(shown):
            lines.append([grouped(value) for value in key] + shown)
    titles = [*table.by.values(), *(column.title for column in table.columns)]
    marks = ["---"] * len(table.by) + ["--:"] * len(table.columns)
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, marks, *lines))


def verdicts(name: str) -> str:
    """The verdicts of a page as a list, each linked to its section."""
    page = (DATA / f"{name}.md").read_text(encoding="utf-8")
    folder = DATA.relative_to(ROOT).as_posix()
    return "".join(
        f"- [{question}]({folder}/{name}.md{section}) {answer}\n"
        for question, section, answer in VERDICT.findall(page)
    )


def filled(page: str) -> str:
    """The page with every table and every list of verdicts rendered anew."""

    def part(found: re.Match[str]) -> str:
        kind, name = found[2], found[3]
        return (
            found[1] + (verdicts(name) if kind == "verdicts" else rendered(TABLES[name])) + found[4]
        )

    return MARKED.sub(part, page)


# Plots

GREY, BLUE, ORANGE = "#808080", "#2b7bba", "#d9822b"  # seen on light and on dark
GREEN = "#4c9a4a"
COLOURS = {
    "streaming": "#b07aa1",
    "uniform": "#9c755f",
    "arborkv": ORANGE,
    "lru": "#59a14f",
    "reentry": BLUE,
    "belady": "#e15759",
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "arbor",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A transparent figure with panels side by side that share their vertical axis."""
    figure = Figure(figsize=(8.4, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for each in axes:
        each.patch.set_alpha(0)
        each.grid(True)
        each.set_axisbelow(True)
    return figure, list(axes)


def legend(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def solved_by_policy(
    source: str, where: Where, fractions: Sequence[str], policies: Sequence[str]
) -> Figure:
    """Shares solved by policy, one panel for each part of the KV, lost or coming back."""
    rows = read(source)
    figure, axes = panels(len(fractions), 2.9)
    arms = (("off", "what left is lost", ORANGE, 0.15), ("selective", "it comes back", BLUE, -0.15))
    for panel, fraction in zip(axes, fractions, strict=True):
        for rehydrate, label, colour, shift in arms:
            places, values, below, above = [], [], [], []
            for place, policy in enumerate(reversed(policies)):
                asked = {"policy": policy, "rehydrate": rehydrate, "budget_fraction": fraction}
                row = newest(rows, {**where, **asked}, "solved_percent")
                if row is None:
                    continue
                value = float(row["solved_percent"])
                places.append(place + shift)
                values.append(value)
                below.append(value - float(row["solved_low_percent"]))
                above.append(float(row["solved_high_percent"]) - value)
            spread = [below, above]
            panel.errorbar(values, places, xerr=spread, fmt="o", ms=4, color=colour, label=label)
        panel.set_title(f"{fraction} of the peak held")
        panel.set_xlabel("solved (%)")
        panel.set_xlim(-3, 103)
    axes[0].set_yticks(range(len(policies)), list(reversed(policies)))
    legend(figure, axes[0])
    return figure


def recomputed_by_budget() -> Figure:
    """Recomputed tokens per generated one against the budget, one panel per search."""
    rows = read("recomputed")
    searches = ("breadth-first tot", "depth-first tot", "beam")
    fractions = ("0.125", "0.25", "0.5")
    figure, axes = panels(len(searches), 2.9)
    for panel, search in zip(axes, searches, strict=True):
        for policy, colour in COLOURS.items():
            points = []
            for fraction in fractions:
                asked = {"search": search, "policy": policy, "budget_fraction": fraction}
                where = {"n": "60", "rehydrate": "selective", **asked}
                row = newest(rows, where, "recomputed_per_generated")
                assert row is not None, f"recomputed.csv has no row for {asked}"
                points.append(row)
            values = [float(row["recomputed_per_generated"]) for row in points]
            spread = [float(row["interval_half_width"]) for row in points]
            style = "--" if policy == "belady" else "-"
            panel.errorbar(
                fractions, values, spread, ls=style, marker=".", color=colour, label=policy
            )
        panel.set_title(search)
        panel.set_xlabel("budget, part of the peak")
    axes[0].set_ylabel("recomputed per generated token")
    legend(figure, axes[0])
    return figure


def time_by_policy() -> Figure:
    """Time of a decision and of carrying it out, by policy, at 10,000 blocks."""
    rows = [row for row in read("policy_cost") if row["blocks"] == "10000"]
    figure, (panel,) = panels(1, 3.2)
    measured = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        row = newest(rows, {"policy": policy}, "event_us")
        if row is not None:
            measured.append(row)
    measured.sort(key=lambda row: -float(row["event_us"]))
    arms = (("event", "decision", BLUE, 0.2), ("carried_out", "carrying it out", ORANGE, -0.2))
    for name, label, colour, shift in arms:
        places = [place + shift for place in range(len(measured))]
        times = [float(row[f"{name}_us"]) / 1000 for row in measured]
        panel.barh(places, times, height=0.36, color=colour, label=label)
    panel.set_yticks(range(len(measured)), [row["policy"] for row in measured])
    panel.set_xscale("log")
    panel.set_xticks((0.3, 1, 3, 10), ("0.3", "1", "3", "10"))
    panel.minorticks_off()
    panel.set_xlabel("ms an event, 10,000 blocks (median)")
    legend(figure, panel)
    return figure


OVERVIEW_COLOURS = {
    **COLOURS,
    "ends": "#4e79a7",
    "tova": "#7f7f7f",
    "random": "#bab0ac",
    "kkt": "#c49c94",
    "h2o": "#17a2a2",
    "strata": BLUE,
    "snapkv": "#76b7b2",
    "ams": "#e15759",
    "lazyeviction": ORANGE,
    "raas": "#edc948",
}
LOST = {"rehydrate": "off", "n": "500"}
LEAST_GAP = 3.9  # points between two labels


def apart(values: Sequence[float], gap: float) -> list[float]:
    """The values, moved down as far as a gap between any two of them needs; largest first."""
    moved: list[float] = []
    for value in values:
        moved.append(min([value, *(each - gap for each in moved[-1:])]))
    return moved


def success_by_part(
    panel: Axes, source: str, where: Where, policies: Mapping[str, str], full: Row
) -> None:
    """Success where KV is lost against the part of the peak held, a line for each policy."""
    rows = [row for row in read(source) if fits(row, {**LOST, **where})]
    whole = float(full["solved_percent"])
    ends = []
    for name, label in policies.items():
        mine = {}
        for row in rows:
            if row["policy"] == name and not row["note"].startswith("recorded with"):
                mine[float(row["budget_fraction"])] = row
        points = [mine[part] for part in sorted(mine)]
        parts = [float(row["budget_fraction"]) for row in points]
        values = [float(row["solved_percent"]) for row in points]
        spread = [
            [
                value - float(row["solved_low_percent"])
                for value, row in zip(values, points, strict=True)
            ],
            [
                float(row["solved_high_percent"]) - value
                for value, row in zip(values, points, strict=True)
            ],
        ]
        colour = OVERVIEW_COLOURS[label]
        panel.errorbar(parts, values, spread, marker="o", ms=3, lw=1.2, color=colour)
        panel.plot([parts[-1], 1], [values[-1], whole], ls=":", lw=0.8, color=colour)
        ends.append((values[0], parts[0], label, colour))
    ends.sort(reverse=True)
    for (_, part, label, colour), place in zip(
        ends, apart([end[0] for end in ends], LEAST_GAP), strict=True
    ):
        panel.text(part - 0.015, place, label, color=colour, ha="right", va="center", fontsize=7.5)
    panel.plot([1], [whole], marker="*", ms=9, color=GREY)
    panel.set_ylim(-3, 105)
    panel.set_xlabel("part of full retention's peak held")
    panel.set_ylabel("solved (%)")


def searches_at_equal_tokens(panel: Axes) -> None:
    """Success against peak KV of all searches with 300 generated tokens, and of a whole one."""
    rows = read("controllers")
    where = {"task": "game24, test", "tokens": "300", "n": "500"}
    found = {row["arm"]: row for row in rows if fits(row, where)}
    points = [
        (
            float(row["success_percent"]),
            float(row["peak_kv_tokens"]),
            arm.replace("tot,strategy=dfs", "tot, depth-first")
            .replace("chain;temperature=0", "chain, greedy")
            .replace("best-of-n,samples=8", "8 samples"),
        )
        for arm, row in found.items()
        if "aggregate" not in arm and arm != "ets"  # which is what `rebase` is
    ]
    drawn_as = "arithmetic; siblings that have parted draw tokens of their own"
    end = {"controller": "tot (beam 5, width 10)", "verifier": "exact", "sampling": drawn_as}
    whole = newest(read("solved"), end, "solved_percent")
    assert whole is not None, "solved.csv has no row of the whole search"
    tokens = whole["tokens_per_problem"]
    held = float(whole["peak_kv_tokens_per_problem"])
    points.append((float(whole["solved_percent"]), held, f"tot, to the end\n({tokens} tokens)"))
    crowd = sorted(
        (point for point in points if 125 < point[1] < 145 and point[2] != "tot"), reverse=True
    )
    places = apart([value for value, _, _ in crowd], 3)
    for (value, held, label), place in zip(crowd, places, strict=True):
        corner = (held * 0.93, place)
        panel.annotate(label, (held, value), corner, fontsize=7.5, ha="right", va="center")
    for value, held, label in points:
        panel.plot([held], [value], marker="o", ms=4, color=BLUE)
        if (value, held, label) not in crowd:
            up = 1.5 if "\n" in label else 0
            side = "left" if label == "tot" else "right"  # others stand to its left
            away = 1 if up else 1.07 if side == "left" else 0.93
            va = "bottom" if up else "center"
            corner = (held * away, value + up)
            panel.annotate(label, (held, value), corner, fontsize=7.5, ha=side, va=va)
    panel.set_xscale("log")
    panel.set_xticks((30, 50, 100, 200, 400), ("30", "50", "100", "200", "400"))
    panel.minorticks_off()
    panel.set_xlim(26, 480)
    panel.set_ylim(25, 105)
    panel.set_xlabel("peak KV, tokens (mean)")
    panel.set_ylabel("solved (%)")


def cost_where_nothing_is_lost(panel: Axes) -> None:
    """Recomputed tokens by policy against the budget, with the clairvoyant bound."""
    rows = read("recomputed")
    for search, style in (("depth-first tot", "-"), ("breadth-first tot", "--")):
        for policy in ("lru", "reentry", "belady"):
            parts, values = [], []
            for part in ("0.25", "0.5"):  # an eighth is less than one path needs
                asked = {"search": search, "policy": policy, "budget_fraction": part}
                row = newest(
                    rows, {"n": "60", "rehydrate": "selective", **asked}, "recomputed_per_generated"
                )
                assert row is not None, f"recomputed.csv has no row for {asked}"
                parts.append(float(part))
                values.append(float(row["recomputed_per_generated"]))
            label = "belady (clairvoyant bound)" if policy == "belady" else policy
            panel.plot(
                [*parts, 1],
                [*values, 0],
                ls=style,
                marker="o",
                ms=3,
                lw=2.4 if policy == "reentry" else 1.0,
                color=COLOURS[policy],
                label=f"{label}, {search.removesuffix(' tot')}",
            )
    panel.set_xlabel("part of full retention's peak held")
    panel.set_ylabel("recomputed per generated token")
    panel.legend(fontsize=7.5)


def overview() -> Figure:
    """Success against peak KV for all methods, by task, with full retention and the bound."""
    figure = Figure(figsize=(8.4, 7.4), layout="constrained")
    figure.patch.set_alpha(0)
    (trees, paths), (searches, cost) = figure.subplots(2, 2)
    for panel in (trees, paths, searches, cost):
        panel.patch.set_alpha(0)
        panel.grid(True)
        panel.set_axisbelow(True)
    named = ("ends", "uniform", "streaming", "tova", "lru", "random", "arborkv", "h2o")
    game = "game24, test"
    wanted = {"policy": "full", "n": "500", "controller": BEAM}
    full = newest(read("lossy_trees"), wanted, "solved_percent")
    assert full is not None, "lossy_trees.csv has no row of full retention"
    success_by_part(
        trees,
        "lossy_trees",
        {"controller": BEAM, "n": ("60", "500")},
        {each: each for each in named},
        full,
    )
    parts = [1.0]
    for row in read("budget_answers"):
        where = {"task": game, "controller": "beam (5, width 4)", "n": "500"}
        if fits(row, where) and row["same_answers"] == row["n"]:
            mean = re.search(r"on average ([\d.]+)", row["budget_detail"])  # more than asked for
            if mean or not row["budget_detail"]:
                parts.append(float(mean[1] if mean else row["budget_fraction"]))
    whole = [float(full["solved_percent"])] * len(parts)
    trees.plot(sorted(parts), whole, ls="--", marker="D", ms=3.5, color=GREY)
    trees.text(0.31, 102, "lossless: any policy, and the bound", fontsize=7.5, color=GREY)
    trees.set_xlim(-0.04, 1.04)
    trees.set_title("game24, beam search: lost KV")
    chains = "chains of 4 to 6 steps, test; open blocks lose tokens too"
    lines = {name: name.removesuffix("-each") for name in ("lru", "strata", "lazyeviction-each")}
    lines |= {name: name.removesuffix("-each") for name in ("ams-each", "snapkv", "raas")}
    lines |= {name: name for name in ("random", "h2o")}
    full = newest(
        read("lossy_word_problems"),
        {"policy": "full", "task": "chains of 4 to 6 steps, test"},
        "solved_percent",
    )
    assert full is not None, "lossy_word_problems.csv has no row of full retention"
    success_by_part(paths, "lossy_word_problems", {"task": chains}, lines, full)
    paths.axhline(float(full["solved_percent"]), ls="--", lw=1, color=GREY)
    paths.text(0.47, 102, "full retention, the bound", fontsize=7.5, color=GREY)
    paths.set_xlim(0.4, 1.02)
    paths.set_title("word problems, one path: lost KV")
    searches_at_equal_tokens(searches)
    searches.set_title("game24: searches with 300 tokens")
    cost_where_nothing_is_lost(cost)
    cost.set_title("game24: the cost where nothing is lost")
    return figure


GSM8K = "GSM8K, Qwen2.5-Coder 1.5B (Q4_K_M)"
TIMED_ON = "epyc"  # the machine whose seconds are drawn
# Where the names of searches that lie close together stand, in points from theirs.
BESIDE = {
    "best of 8": (-45, -3),
    "beam": (5, -9),
    "dpts": (5, -9),
    "dvts": (-25, -3),
    "mcts": (2, 5),
    "rebase": (-36, -3),
    "tot, bfs": (0, 14),
}
VOTES = re.compile(r"best-of-n,samples=(\d+);aggregate=majority")


def accuracy_against_cost(task: str = GSM8K) -> Figure:
    """Accuracy of chains that vote, by their number, and of other searches on the same 100 problems
    (controllers.csv), against generated tokens, peak KV, and CPU seconds (accuracy_cost.csv).

    Answers at a quarter of the KV are the same; its peak is the part that it was of the full one
    where both were timed."""
    where = {"task": task, "n": "100"}
    rows = [row for row in read("controllers") if fits(row, where)]
    last = {row["arm"]: row for row in rows if not row["note"].startswith("outdated")}
    votes = {arm: int(found[1]) for arm in last if (found := VOTES.fullmatch(arm))}
    votes |= {arm: 1 for arm in last if arm.startswith("chain")}
    chains = sorted(votes, key=votes.__getitem__)
    others = [arm for arm in last if arm not in votes]
    labels = {
        arm: f"majority-{number}" if number > 1 else "greedy" for arm, number in votes.items()
    }
    labels |= {arm: short(arm).replace(", ", "-") for arm in others}
    rows_of = (row for row in read("accuracy_cost") if row["machine"] == TIMED_ON)
    timed = {(row["by"], row["arm"], row["budget"]): row for row in rows_of}

    def cost_of(by: str, budget: str, column: str) -> dict[str, str]:
        found = {arm: timed.get((by, label, budget), {}) for arm, label in labels.items()}
        return {arm: row.get(column, "") for arm, row in found.items()}

    seconds, by_llama = cost_of("arbor", "full", "cpu_s"), cost_of("llama.cpp", "full", "cpu_s")
    peaks = {arm: row["peak_kv_tokens"] for arm, row in last.items()}
    in_full = cost_of("arbor", "full", "peak_kv_tokens")
    in_quarter = cost_of("arbor", "0.25", "peak_kv_tokens")
    quarter_peaks = {
        arm: f"{float(peaks[arm]) * float(each) / float(in_full[arm]):g}" if each else ""
        for arm, each in in_quarter.items()
    }
    quarters = (quarter_peaks, cost_of("arbor", "0.25", "cpu_s"))
    without_bars = (*quarters, by_llama)
    figure, axes = panels(3, 3.6)
    costs: tuple[tuple[Mapping[str, str], str], ...] = (
        ({arm: row["generated"] for arm, row in last.items()}, "generated tokens a problem"),
        (peaks, "peak KV, tokens"),
        (seconds, "CPU seconds a problem, one core"),
    )
    searches = "trees, best of 8"
    for panel, (cost, title) in zip(axes, costs, strict=True):
        series = [("chains that vote", chains, cost, BLUE, "o", "-")]
        series += [(searches, others, cost, ORANGE, "^", "")]
        if cost is not costs[0][0]:
            quarter = quarters[cost is seconds]
            series += [("at a quarter of the KV", [*chains, *others], quarter, GREEN, "D", "")]
        if cost is seconds:
            series += [("llama.cpp, arbor's accuracy", chains, by_llama, GREY, "s", ":")]
        for label, arms, of_arms, colour, marker, line in series:
            mine = [arm for arm in arms if of_arms[arm]]
            bare = any(of_arms is each for each in without_bars)
            held = [float(of_arms[arm]) for arm in mine]
            value, low, high = (
                [float(last[arm][f"success{end}_percent"]) for arm in mine]
                for end in ("", "_low", "_high")
            )
            spread = [
                [one - other for one, other in zip(value, low, strict=True)],
                [one - other for one, other in zip(high, value, strict=True)],
            ]
            panel.errorbar(
                *(held, value),
                yerr=None if bare else spread,
                ls=line,
                marker=marker,
                ms=4,
                lw=1,
                elinewidth=0.6,
                color=colour,
                label=label,
            )
            for arm, place in zip(mine, zip(held, value, strict=True), strict=True):
                if bare:
                    continue
                panel.annotate(
                    str(votes.get(arm) or short(arm)),
                    place,
                    BESIDE.get(short(arm), (4, 3)) if arm in others else (4, 3),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=colour,
                )
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.minorticks_off()
        panel.set_xlabel(title)
    axes[0].set_ylabel("solved (%)")
    legend(figure, axes[-1])
    return figure


def short(arm: str) -> str:
    """The name of a search in a figure."""
    name, _, settings = arm.partition(",")
    if name == "best-of-n":
        return "best of 8"
    if name == "tot":
        return "tot, dfs" if "dfs" in settings else "tot, bfs"
    return "beam of 8" if "beam_size=8" in settings else name


PLOTS: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "accuracy": accuracy_against_cost,
    "lossy_word_problems": lambda: solved_by_policy(
        "lossy_word_problems",
        {"n": "500", "task": "chains of 4 to 6 steps, test"},
        ("0.9", "0.75", "0.6"),
        ("lru", "random", "tova", "uniform", "kkt", "arborkv", "h2o", "streaming"),
    ),
    "lossy_trees": lambda: solved_by_policy(
        "lossy_trees",
        {"n": "500", "controller": BEAM},
        ("0.75", "0.5", "0.35"),
        ("uniform", "streaming", "tova", "lru", "random", "arborkv", "kkt", "h2o"),
    ),
    "recomputed": recomputed_by_budget,
    "policy_cost": time_by_policy,
}


def drawn(name: str) -> str:
    """A plot as SVG, the same text every time."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        PLOTS[name]().savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def main() -> int:
    """Writes what has changed, or says what is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--tables", action="store_true", help="tables only")
    args = parser.parse_args()
    check = args.check
    pages = (INDEX, *sorted(DATA.glob("*.md")))
    wanted = {page: filled(page.read_text(encoding="utf-8")) for page in pages}
    if not args.tables:
        wanted |= {DATA / f"{name}.svg": drawn(name) for name in PLOTS}
    stale = False
    for path, text in wanted.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {'out of date: run python scripts/report.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
