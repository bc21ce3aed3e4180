"""Results of ``arbor compare``: written to the folder, and as lines of text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbor._version import __version__
from arbor.cli.evaluation.eval_report import write_samples
from arbor.measure.evaluation.compare import (
    COMPARE_SCHEMA,
    ArmRuns,
    compare_arms,
    csv_rows,
    difference_text,
    percent_text,
)
from arbor.measure.evaluation.compare_page import compare_page
from arbor.measure.evaluation.folder import read_results, read_rows
from arbor.support.atomic_write import write_atomically
from arbor.trace.write import finite

if TYPE_CHECKING:
    from arbor.measure.evaluation.dataset import Sample

RESULTS, TABLE, PAGE = "compare.json", "compare.csv", "index.html"


def write_comparison(
    path: Path,
    dataset: str,
    budgets: Mapping[int | None, str],
    samples: Sequence[Sample],
    runs: Sequence[ArmRuns],
) -> dict[str, Any]:
    """Write results, table and page of the runs there are.

    Returns:
        The results, as in ``compare.json``.

    Raises:
        UsageError: a file cannot be written.
    """
    found: dict[str, Any] = {
        "schema": COMPARE_SCHEMA,
        "arbor": __version__,
        "dataset": dataset,
        "folder": str(path),
        "samples": len(samples),
        "sample_ids": [sample.id for sample in samples],
        "budgets": [[tokens, budget] for tokens, budget in budgets.items()],
        "table": compare_arms(runs),
    }
    write_atomically(path / RESULTS, json.dumps(finite(found), allow_nan=False, indent=1) + "\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(found["table"]))
    write_atomically(path / TABLE, text.getvalue())
    write_atomically(path / PAGE, compare_page(found, runs, path))
    return found


def write_comparison_samples(path: Path) -> list[str]:
    """Write the pages of a comparison's searches, and its own page with links to them.

    Returns:
        A sentence for each trace that cannot be read.

    Raises:
        InputError: not a comparison's folder, or one that lacks a run.
        UsageError: a page cannot be written.
    """
    unread, runs = [], []
    with read_results(path / RESULTS, "comparison") as found:
        for row in found["table"]:
            rows = []
            for folder in row["folders"]:
                unread += write_samples(path / folder)
                there, _ = read_rows(path / folder)
                rows.append({each: there[each] for each in found["sample_ids"] if each in there})
            seeds, folders = tuple(row["seeds"]), tuple(row["folders"])
            runs.append(ArmRuns(row["arm"], row["tokens"], seeds, folders, tuple(rows)))
        write_atomically(path / PAGE, compare_page(found, runs, path))
    return unread


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """The table as lines of text, then how to read it."""
    heads = (
        *("arm", "tokens", "n", "success, %", "any right", "generated", "reused"),
        *("recomputed", "peak KV", "CPU s", "guessed, %", "cut, %", "against the first, points"),
    )
    cells = [heads, *(_cells(row) for row in found["table"])]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
    lines = []
    for row in cells:
        first, *others, last = (
            cell.ljust(width) if place in (0, len(heads) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others, last)).rstrip())
    lines.append("costs: mean of a search; intervals: 95 %")
    lines.append(f"folder {found['folder']}")
    return lines


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["arm"]),
        "" if row["tokens"] is None else f"{row['tokens']:,}",
        f"{row['n']:,}",
        percent_text(row["success"]),
        f"{100 * row['any_correct']['value']:.1f}",
        *(f"{row[name]:,.0f}" for name in ("tokens_generated", "tokens_reused")),
        *(f"{row[name]:,.0f}" for name in ("tokens_recomputed", "peak_tokens")),
        f"{row['cpu_s']:.2f}",
        *(f"{100 * row[name]:.1f}" for name in ("guessed", "cut")),
        difference_text(row["difference"]),
    )
