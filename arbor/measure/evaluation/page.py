"""The page of a run: its accuracy, its budget over time, and the list of its samples.

One HTML file with one script, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from arbor.measure.evaluation.results import Row, cost, is_right
from arbor.measure.evaluation.run_timeline import RunTimeline, as_attributes
from arbor.support.texts import clipped, visible
from arbor.view.page import asset

LONGEST = 300  # characters of a cell; samples.jsonl has the whole text

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

SHOWN = 400  # rows that are drawn at first; the others wait in a template
OUTCOMES = ("right", "wrong", "no answer", "error")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<h1>{title}</h1>
{accuracy}{lines}
{timeline}
<div class="tools">
<label>find <input type="search" id="find" autocomplete="off" spellcheck="false"></label>
<select id="outcome" aria-label="outcome"><option value="">every outcome</option>{outcomes}</select>
<label><input type="checkbox" id="only">hide correct</label>
<output id="found" for="find"></output>
</div>
<div class="scroll">
<table>
<thead><tr>{columns}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{rest}
<button type="button" id="more" hidden>more</button>
</div>
<script>{script}</script>
</body>
</html>
"""

_TIMELINE = """<section id="run" aria-label="The run over time" {attributes}>
<div id="chart"><canvas id="times" role="img" aria-label="{says}"></canvas></div>
<button type="button" id="whole" hidden>whole run</button>
<p id="at" class="hint">{hint}</p>
</section>
"""
_HINT = (
    "KV slots that all searches held together, and the samples in progress: a bar opens its search, "
    "the arrow keys go from bar to bar, a drag above zooms."
)


def index_page(
    title: str,
    lines: Sequence[str],
    rows: Sequence[Row],
    pages: Mapping[str, str] | None = None,
    *,
    accuracy: tuple[float, float, float] | None = None,
    timeline: RunTimeline | None = None,
    key: str = "",
) -> str:
    """The page.

    Args:
        title, lines: text above the list.
        rows: rows of ``samples.jsonl``.
        pages: trace -> page of its search, both in the run's folder; a sample without a page links
            to its trace.
        accuracy: of the run, and the ends of its interval.
        timeline: the run over time.
        key: of the timeline, see `timeline_key`.
    """
    pages = pages or {}
    shown = [_row(row, pages) for row in rows]
    rest = f'<template id="rest">{"".join(shown[SHOWN:])}</template>' if shown[SHOWN:] else ""
    script = asset("evaluation.js")
    return _PAGE.format(
        title=_escaped(title),
        accuracy="" if accuracy is None else _accuracy(*accuracy),
        lines="\n".join(f"<p>{_escaped(line)}</p>" for line in lines) + _traces_line(rows, pages),
        timeline=_over_time(rows, timeline, key),
        outcomes="".join(f"<option>{each}</option>" for each in OUTCOMES),
        rows="\n".join(shown[:SHOWN]),
        rest=rest,
        columns="".join(map(_column, COLUMNS)),
        style=_style(),
        script=script,
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _style() -> str:
    """The viewer's colours, light or dark as the system is, and the page's own rules."""
    light, dark = re.findall(r"^:root[^{]*\{(.*?)\}", asset("viewer.css"), re.DOTALL | re.MULTILINE)
    return (
        f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n"
        f"{asset('evaluation.css')}"
    )


def _accuracy(value: float, low: float, high: float) -> str:
    """The accuracy as a bar, with its interval on it."""
    says = f"accuracy {100 * value:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
    return (
        f'<div class="accuracy" role="img" aria-label="{says}" title="{says}">'
        f'<i class="part" style="width:{100 * value:.2f}%"></i>'
        f'<i class="interval" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></i>'
        "</div>\n"
    )


def _over_time(rows: Sequence[Row], timeline: RunTimeline | None, key: str) -> str:
    """The run over time, and how many samples are not part of it."""
    if not rows:
        return ""
    if timeline is None:
        return '<p class="hint">The run over time is drawn from traces; there is none.</p>'
    says = (
        f"{len(timeline.bars):,} samples in {timeline.seconds:,.0f} s, "
        f"at most {max(timeline.used):,} of {max(timeline.budget):,} KV slots"
    )
    missing, hint = len(rows) - len(timeline.bars), _HINT
    if missing:
        hint = f"{missing:,} of {len(rows):,} samples have no readable trace and no bar. {hint}"
    return _TIMELINE.format(attributes=as_attributes(key, timeline), says=says, hint=hint)


def _column(name: str) -> str:
    numbers = ' class="n"' if name in NUMBERS else ""
    return f'<th scope="col"{numbers}><button type="button">{name}</button></th>'


def _traces_line(rows: Sequence[Row], pages: Mapping[str, str]) -> str:
    """How to look at a sample's search; empty where there is no trace."""
    traces = [str(row["trace"]) for row in rows if row.get("trace")]
    if not traces:
        return ""
    if all(trace in pages for trace in traces):
        return "<p>The name in the last column opens the page of a sample's search.</p>"
    command = _escaped(f"arbor view {shlex.quote(traces[0])} --open")
    return (
        "<p>Searches as pages, in this folder: <code>arbor view . --samples --open</code>; "
        f"one of them: <code>{command}</code></p>"
    )


def _row(row: Row, pages: Mapping[str, str]) -> str:
    right = is_right(row)
    error: Mapping[str, Any] | None = row.get("error")
    outcome = "right" if right else "no answer" if row.get("answer") is None else "wrong"
    if error is not None:
        outcome = f"error: [{error.get('code')}] {error.get('message')}"
    words = [row.get("id"), row.get("problem"), row.get("answer"), row.get("expected"), outcome]
    names = ("tokens_generated", "tokens_recomputed", "peak_tokens")
    numbers = [f"{cost(row, name):,.0f}" for name in names] + [f"{row.get('cpu_s', 0):.2f}"]
    cells = [f'<td class="words">{_short(word)}</td>' for word in words]
    cells += [f'<td class="n">{number}</td>' for number in numbers]
    link = ""
    if row.get("trace"):
        target = pages.get(str(row["trace"]), str(row["trace"]))
        address = quote(target, errors="replace")
        link = f'<a href="{address}">{_short(PurePath(target).name)}</a>'
    return f'<tr class="{"right" if right else "wrong"}">{"".join(cells)}<td>{link}</td></tr>'


def _short(word: Any) -> str:
    return "" if word is None else _escaped(clipped(str(word), LONGEST + 1))


def _escaped(text: str) -> str:
    """A text as HTML; control characters, which no page may hold, are shown."""
    return html.escape(visible(text))
