"""The page of a run: its accuracy, its budget over time, and the list of its samples.

Next to another run of the same samples it shows both. One HTML file with one script, and no
requests.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
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
from arbor.measure.evaluation.plot import binned, plot
from arbor.measure.evaluation.results import SampleRow, cost, is_cut, is_guessed, is_right
from arbor.measure.evaluation.run_timeline import RunTimeline, as_attributes

COLUMNS = (
    "sample",
    "problem",
    "answer",
    "key",
    "outcome",
    "tokens",
    "recomputed",
    "peak KV",
    "CPU s",
    "trace",
)
NUMBERS = COLUMNS[5:9]
OTHER_COLUMNS = ("outcome there", "tokens there", "peak KV there")

OUTCOMES = ("right", "wrong", "no answer", "error")
MARKS = ("guessed", "cut")  # next to an outcome
COMPARED = ("only here right", "only there right")  # where there is another run

_TIMELINE = """<section id="run" aria-label="The run over time" {attributes}>
<div id="chart"><canvas id="times" role="img" aria-label="{says}"></canvas></div>
<button type="button" id="whole" hidden>whole run</button>
<p id="at" class="hint">{hint}</p>
</section>
"""
_HINT = (
    "KV slots that all searches held together, and the samples in progress: {opens}the arrow keys go "
    "from bar to bar, a drag above zooms."
)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run of the same samples, shown next to this one.

    Attributes:
        folder: its path, relative to this run's.
        rows: lines of its ``samples.jsonl``, by sample id.
        pages: trace -> page of its search, both in its folder.
        accuracy: over the samples of both, and the ends of its interval.
    """

    folder: str
    rows: Mapping[str, SampleRow]
    pages: Mapping[str, str]
    accuracy: tuple[float, float, float]


def index_page(
    title: str,
    lines: Sequence[str],
    rows: Sequence[SampleRow],
    pages: Mapping[str, str] | None = None,
    *,
    accuracy: tuple[float, float, float] | None = None,
    timeline: RunTimeline | None = None,
    key: str = "",
    other: ComparedRun | None = None,
    made: RunFacts | None = None,
) -> str:
    """The page.

    Args:
        title, lines: text above the list.
        rows: rows of ``samples.jsonl``.
        pages: trace -> page of its search, both in the run's folder.
        accuracy: of the run, and the ends of its interval.
        timeline: the run over time.
        key: of the timeline, see `timeline_key`.
        other: a run to compare with.
        made: what the run was made with.
    """
    pages = pages or {}
    bars = "" if accuracy is None else share_bar(*accuracy)
    if other is not None and accuracy is not None:
        runs = (("this run", accuracy), (other.folder, other.accuracy))
        bars = "".join(f'<p class="name">{escaped(n)}</p>{share_bar(*a)}' for n, a in runs)
    texts = "\n".join(f"<p>{escaped(line)}</p>" for line in lines)
    names = COLUMNS if other is None else (*COLUMNS, *OTHER_COLUMNS)
    return list_page(
        title,
        (facts_html([made]) if made else "")
        + bars
        + texts
        + _traces_line(rows, pages)
        + _plots(rows, other)
        + "\n"
        + _over_time(rows, timeline, key, bool(pages)),
        [(name, name in NUMBERS or name in OTHER_COLUMNS[1:]) for name in names],
        [_row(row, pages, other) for row in rows],
        (*OUTCOMES, *MARKS) if other is None else (*OUTCOMES, *MARKS, *COMPARED),
    )


def _plots(rows: Sequence[SampleRow], other: ComparedRun | None) -> str:
    """Success against tokens and against peak KV; none without a finished search."""
    runs = [("this run", [row for row in rows if row.get("error") is None])]
    if other is not None:
        there = [row for row in other.rows.values() if row.get("error") is None]
        runs.append((other.folder, there))
    if not all(solved for _, solved in runs):
        return ""
    figures = [
        plot(
            f"Right samples by {unit}, in groups of equal size",
            unit,
            [binned(label, those, [cost(row, name) for row in those]) for label, those in runs],
        )
        for name, unit in (("tokens_generated", "tokens generated"), ("peak_tokens", "peak KV"))
    ]
    return f'\n<div class="plots">{"".join(figures)}</div>'


def _over_time(
    rows: Sequence[SampleRow], timeline: RunTimeline | None, key: str, linked: bool
) -> str:
    """The run over time, and how many samples are not part of it."""
    if not rows:
        return ""
    if timeline is None:
        return '<p class="hint">The run over time is drawn from traces; there is none.</p>'
    says = (
        f"{len(timeline.bars):,} samples in {timeline.seconds:,.0f} s, "
        f"at most {max(timeline.used):,} of {max(timeline.budget):,} KV slots"
    )
    missing = len(rows) - len(timeline.bars)
    hint = _HINT.format(opens="a bar opens its search, " if linked else "")
    if missing:
        hint = f"{missing:,} of {len(rows):,} samples have no readable trace and no bar. {hint}"
    return _TIMELINE.format(attributes=as_attributes(key, timeline), says=says, hint=hint)


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


def _row(row: SampleRow, pages: Mapping[str, str], other: ComparedRun | None) -> str:
    outcome = outcome_of(row)
    error: Mapping[str, Any] | None = row.get("error")
    says = (
        marked_outcome(row)
        if error is None
        else f"error: [{error.get('code')}] {error.get('message')}"
    )
    words = [row.get("id"), row.get("problem"), row.get("answer"), row.get("expected"), says]
    names = ("tokens_generated", "tokens_recomputed", "peak_tokens")
    numbers = [f"{cost(row, name):,.0f}" for name in names] + [f"{row.get('cpu_s', 0):.2f}"]
    cells = [*map(words_cell, words), *map(number_cell, numbers)]
    cells.append(f"<td>{search_link(row, pages)}</td>")
    if other is not None:
        there = other.rows.get(str(row.get("id")))
        cells += _cells_there(there, other)
        if there is not None and is_right(row) != is_right(there):
            which = COMPARED[is_right(there)]
            return list_row(cells, is_right(row), outcome, *marks_of(row), which)
    return list_row(cells, is_right(row), outcome, *marks_of(row))


def _cells_there(row: SampleRow | None, other: ComparedRun) -> list[str]:
    """The cells of the other run; empty ones for a sample that it lacks."""
    if row is None:
        return ["<td></td>", number_cell(""), number_cell("")]
    numbers = [f"{cost(row, name):,.0f}" for name in ("tokens_generated", "peak_tokens")]
    link = search_link(row, other.pages, other.folder, marked_outcome(row))
    return [f"<td>{link}</td>", *map(number_cell, numbers)]
