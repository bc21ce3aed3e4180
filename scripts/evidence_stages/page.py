"""The page of a model: settings with the rows behind them, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .tables import NOT_SAFE

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]

TITLES = {
    "controllers": "Which search, at the same tokens and the same KV",
    "paths": "What lost KV costs on one path",
    "trees": "What lost KV costs in a tree",
    "hierarchy": "What destroying a part of the thoughts costs",
    "lossless": "What a smaller budget costs, nothing lost",
    "policies": "Which policy recomputes least, replayed",
    "bits": "What fewer bits cost",
    "gates": "Which verifications can be skipped or left early",
    "layers": "Which layer decides",
    "times": "What skipped or shortened verification saves",
    "attention": "How attention is spread over a chain",
    "sharing": "Which prompts are similar",
    "weights": "What a block's loss depends on",
}
LOST = {
    "search": "search",
    "policy": "policy",
    "budget_fraction": "part of the peak",
    "held_fraction": "held",
    "solved_percent": "solved, %",
    "difference_points": "against full retention, points",
    "lost_at_most_percent": "problems lost, at most, %",
    "errors": "errors",
    "n": "n",
}
COLUMNS = {
    "paths": LOST,
    "trees": LOST,
    "hierarchy": LOST,
    "layers": {
        "rule": "rule",
        "layer": "layer",
        "layers": "of",
        "saved_percent": "saved, %",
        "disagree_percent": "prefer another thought, %",
        "clear_disagreements": "clearly",
        "n": "verifications",
    },
    "times": {
        "verification": "verification",
        "time_ratio": "time, full verification = 1",
        "solved_percent": "solved, %",
        "difference_points": "against full verification, points",
        "n": "n",
    },
    "attention": {
        "threshold": "threshold",
        "recurring_percent": "tokens that recur, %",
        "interval_80th": "80 % of intervals at most",
        "top_fifth_of_thoughts_percent": "attention on the top fifth, %",
        "bottom_half_of_thoughts_percent": "on the bottom half, %",
        "n": "paths",
    },
    "sharing": {
        "similarity_of": "similarity of",
        "second_prompt": "second prompt",
        "threshold": "threshold",
        "shared_percent": "share, %",
        "wrong_of_shared_percent": "wrong of these, %",
        "saved_tokens": "tokens saved",
        "spent_tokens": "spent",
        "n": "pairs",
    },
    "weights": {
        "fitted_to": "fitted to",
        "value": "value",
        "confidence": "confidence",
        "attention": "attention",
        "rank_correlation": "rank correlation with the loss",
        "n": "right answers",
    },
    "controllers": {
        "arm": "search",
        "success_percent": "solved, %",
        "difference_points": "against the first, points",
        "generated": "generated",
        "recomputed": "recomputed",
        "peak_kv_tokens": "peak KV",
        "cpu_s": "CPU s",
    },
    "lossless": {
        "search": "search",
        "arm": "evicted KV goes to",
        "budget_fraction": "part of full retention",
        "held_fraction": "held",
        "time_ratio": "time, full retention = 1",
        "recomputed_per_generated": "recomputed per generated",
        "fetched_per_generated": "fetched per generated",
        "same_tree": "same trees",
        "n": "n",
    },
    "policies": {
        "search": "search",
        "budget_fraction": "part of the peak",
        "policy": "policy",
        "recomputed_per_generated": "recomputed per generated",
        "at_smallest_budget": "at the smallest budget",
        "n": "n",
    },
    "bits": {
        "search": "search",
        "policy": "KV",
        "budget_fraction": "part of the peak",
        "solved_percent": "solved, %",
        "difference_points": "against full retention, points",
        "other_trees_percent": "other trees, %",
        "kv_bytes_per_token": "bytes of KV a token",
    },
    "gates": {
        "level": "level",
        "thresholds": "thresholds",
        "setting": "setting",
        "saved_percent": "saved, %",
        "disagree_percent": "prefer another thought, %",
        "bound_percent": "at most, %",
        "n": "verifications",
    },
}
INTERVALS = {  # column -> its interval's
    "success_percent": ("success_low_percent", "success_high_percent"),
    "solved_percent": ("solved_low_percent", "solved_high_percent"),
    "difference_points": ("difference_low_points", "difference_high_points"),
    "time_ratio": ("time_ratio_low", "time_ratio_high"),
    "recurring_percent": ("recurring_low_percent", "recurring_high_percent"),
    "rank_correlation": ("correlation_low", "correlation_high"),
}
CLAIM = 500  # problems from which a difference of answers is worth a claim
LOSS = 2.0  # percent of the problems that fewer bits may lose


def cell(row: Row, column: str) -> str:
    """A value, with its interval."""
    text = f"{row[column]:,}" if isinstance(row[column], int) else str(row[column])
    low, high = INTERVALS.get(column, ("", ""))
    return f"{text} ({row[low]} to {row[high]})" if low and text else text


def table(name: str, rows: Iterable[Row]) -> list[str]:
    """A table in Markdown."""
    columns = COLUMNS[name]
    lines = [f"| {' | '.join(columns.values())} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(cell(row, each) for each in columns)} |" for row in rows)]


def choices(rows: Rows) -> list[tuple[str, str, str]]:
    """What these rows say to take, by what is wanted, and why.

    A choice is the best row; where its interval does not set it apart from the first row, it
    says so.
    """
    found = []
    if rows.get("controllers"):
        best = max(rows["controllers"], key=lambda row: row["success_percent"])
        first = rows["controllers"][0]
        clear = best is not first and float(best["difference_low_points"]) > 0
        apart = (
            "" if clear or best is first else "; these problems do not set it apart from the first"
        )
        why = f"{cell(best, 'success_percent')} % solved with {best['generated']:,} tokens{apart}"
        found.append(("the most answers for the tokens", best["arm"], why))
    for search in dict.fromkeys(row["search"] for row in rows.get("lossless", ())):
        found += _budget(search, rows)
    for name, what in (("trees", "a tree that may lose KV"), ("paths", "a path that may")):
        every = rows.get(name, ())
        mine = [row for row in every if row["rehydrate"] == "off" and row["budget_fraction"] == 0.5]
        if mine and every[0]["solved_percent"] > 0:  # of full retention
            best = max(mine, key=lambda row: row["solved_percent"])
            why = (
                f"{cell(best, 'solved_percent')} % at {best['budget_fraction']} of the peak, "
                f"{cell(best, 'difference_points')} points against full retention"
            )
            found.append((what, best["policy"], why))
    for row in rows.get("bits", ()):
        if row["policy"] != "full" and row["n"] > row["errors"]:
            most = row["lost_at_most_percent"]
            verdict = "take it" if most < LOSS else "not shown to be safe"
            why = f"at most {most} % of the problems lost, n = {row['n']}"
            found.append((row["policy"], verdict, why))
    for row in rows.get("gates", ()):
        if row["thresholds"].startswith("at most") and row["setting"] != NOT_SAFE:
            why = f"saves {row['saved_percent']} %, at most {row['bound_percent']} % disagree"
            found.append((f"cheaper verification, {row['level']}", row["setting"], why))
    return found


def _budget(search: str, rows: Rows) -> list[tuple[str, str, str]]:
    mine = [row for row in rows["lossless"] if row["search"] == search]
    parts = sorted({row["budget_fraction"] for row in mine if row["budget_fraction"] < 1})
    found = []
    for part in parts:
        arms = [row for row in mine if row["budget_fraction"] == part]
        best = min(arms, key=lambda row: row["time_ratio"])
        others = ", ".join(
            f"{row['arm']} {cell(row, 'time_ratio')}" for row in arms if row is not best
        )
        why = f"{cell(best, 'time_ratio')} times the time of full retention"
        if others:
            why += f"; {others}"
        held = f"{part} of full retention" if part else "one expansion"
        found.append((f"{search} in {held}", best["arm"], why))
    return found


def page(
    title: str, settings: Mapping[str, Any], rows: Rows, notes: Sequence[str], formula: str
) -> str:
    """The whole page.

    Args:
        title: model and dataset.
        settings: of the run.
        rows: by table.
        notes: what could not be measured.
        formula: of the expected cost, as it was printed.
    """
    lines = [f"# {title}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in settings.items() if value), ""]
    fewest = min((int(row["n"]) for each in rows.values() for row in each), default=0)
    if fewest < CLAIM:
        lines += [
            f"{fewest} problems or verifications in the smallest row: an interval of a share is "
            f"{100 / max(1, fewest) ** 0.5:.0f} points to either side; {CLAIM} are enough for a "
            "claim.",
            "",
        ]
    lines += ["| for | take | because |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(choice)} |" for choice in choices(rows)]
    for name, title_of in TITLES.items():
        if rows.get(name):
            lines += ["", f"## {title_of}", "", f"Data: {name}.csv", "", *table(name, rows[name])]
    if notes:
        lines += ["", "## Not measured", "", *(f"- {note}" for note in notes)]
    lines += ["", "## Expected cost", "", "```text", formula, "```", ""]
    return "\n".join(lines)
