"""The page of a run: its accuracy, and the list of its samples.

One HTML file with one script, and no requests.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from urllib.parse import quote

from arbor.measure.evaluation.list_page import (
    RunFacts,
    escaped,
    facts_html,
    list_page,
    list_row,
    number_cell,
    share_bar,
    short,
    words_cell,
)
from arbor.measure.evaluation.results import SampleRow, cost, is_cut, is_guessed, is_right

NUMBERS = ("tokens", "recomputed", "peak KV", "CPU s")
COLUMNS = ("sample", "problem", "answer", "key", "outcome", *NUMBERS, "trace")

OUTCOMES = ("right", "wrong", "no answer", "error")
MARKS = ("guessed", "cut")  # next to an outcome


def index_page(
    title: str,
    lines: Sequence[str],
    rows: Sequence[SampleRow],
    pages: Mapping[str, str] | None = None,
    *,
    accuracy: tuple[float, float, float] | None = None,
    made: RunFacts | None = None,
) -> str:
    """The page.

    Args:
        title, lines: text above the list.
        rows: rows of ``samples.jsonl``.
        pages: trace -> page of its search, both in the run's folder.
        accuracy: of the run, and the ends of its interval.
        made: what the run was made with.
    """
    pages = pages or {}
    bars = "" if accuracy is None else share_bar(*accuracy)
    texts = "\n".join(f"<p>{escaped(line)}</p>" for line in lines)
    return list_page(
        title,
        f"{facts_html([made] if made else [])}{bars}{texts}{_traces_line(rows, pages)}\n",
        [(name, name in NUMBERS) for name in COLUMNS],
        [_row(row, pages) for row in rows],
        (*OUTCOMES, *MARKS),
    )


def _traces_line(rows: Sequence[SampleRow], pages: Mapping[str, str]) -> str:
    """How to look at a sample's search; empty where there is no trace."""
    traces = [str(row["trace"]) for row in rows if row.get("trace")]
    if not traces:
        return ""
    if all(trace in pages for trace in traces):
        return "<p>The name in the last column opens the page of a sample's search.</p>"
    command = escaped(f"arbor view {shlex.quote(traces[0])} --open")
    return (
        "<p>Searches as pages, in this folder: <code>arbor view . --samples --open</code>; "
        f"one of them: <code>{command}</code></p>"
    )


def outcome_of(row: SampleRow) -> str:
    """One of `OUTCOMES`."""
    if row.get("error") is not None:
        return "error"
    if is_right(row):
        return "right"
    return "no answer" if row.get("answer") is None else "wrong"


def marks_of(row: SampleRow) -> list[str]:
    """Those of `MARKS` that a sample has."""
    return [mark for mark, of in zip(MARKS, (is_guessed, is_cut), strict=True) if of(row)]


def marked_outcome(row: SampleRow) -> str:
    """The outcome with its marks: ``right (guessed)``."""
    marks = marks_of(row)
    return f"{outcome_of(row)} ({', '.join(marks)})" if marks else outcome_of(row)


def search_link(row: SampleRow, pages: Mapping[str, str], folder: str = "", text: str = "") -> str:
    """A link to the page of a sample's search; the plain text where there is none.

    Args:
        row: of ``samples.jsonl``.
        pages: trace -> page of its search, both in the run's folder.
        folder: of the run, relative to the page.
        text: of the link, as HTML; by default the name of the file.
    """
    trace = str(row.get("trace") or "")
    target = pages.get(trace)
    if target is None:
        return text or short(PurePath(trace).name)
    address = quote(f"{folder}/{target}" if folder else target, errors="replace")
    return f'<a href="{address}">{text or short(PurePath(target).name)}</a>'


def _row(row: SampleRow, pages: Mapping[str, str]) -> str:
    says = marked_outcome(row)
    if (error := row.get("error")) is not None:
        says = f"error: [{error.get('code')}] {error.get('message')}"
    words = [row.get("id"), row.get("problem"), row.get("answer"), row.get("expected"), says]
    names = ("tokens_generated", "tokens_recomputed", "peak_tokens")
    numbers = [f"{cost(row, name):,.0f}" for name in names] + [f"{row.get('cpu_s', 0):.2f}"]
    cells = [*map(words_cell, words), *map(number_cell, numbers)]
    cells.append(f"<td>{search_link(row, pages)}</td>")
    return list_row(cells, is_right(row), outcome_of(row), *marks_of(row))
