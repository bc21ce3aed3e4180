"""The list of a run's samples as one HTML page: one script, which sorts, and no requests."""

from __future__ import annotations

import base64
import hashlib
import html
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from arbor.measure.evaluation.results import Row, cost, is_right
from arbor.support.texts import clipped, visible

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

# a click on a column's name sorts by it, a second one the other way round
_SCRIPT = """
const body = document.querySelector("tbody");
for (const name of document.querySelectorAll("th button")) name.addEventListener("click", () => {
  const head = name.parentNode, place = head.cellIndex, number = head.className === "n";
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[place].textContent;
  const order = number
    ? (a, b) => parseFloat(value(a).replaceAll(",", "")) - parseFloat(value(b).replaceAll(",", ""))
    : (a, b) => value(a).localeCompare(value(b), undefined, { numeric: true });
  const rows = [...body.rows].sort(order);
  body.replaceChildren(...(down ? rows.reverse() : rows));
});
"""
_ALLOWED = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

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
:root {{ color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }}
body {{ margin: 1.5rem auto; padding: 0 1rem; max-width: 80rem; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .3rem; }}
p {{ margin: .2rem 0; }}
label {{ margin-left: .3rem; }}
table {{ border-collapse: collapse; width: 100%; margin-top: .8rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid #8884; overflow-wrap: break-word; }}
th {{ position: sticky; top: 0; background: Canvas; }}
th button {{ font: inherit; font-weight: 600; padding: 0; border: 0; background: none; color: inherit; cursor: pointer; white-space: nowrap; }}
th[aria-sort="ascending"] button::after {{ content: " ↑"; }}
th[aria-sort="descending"] button::after {{ content: " ↓"; }}
td.words {{ max-width: 24rem; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }}
.right td:first-child {{ border-left: 4px solid #2a7de1; }}
.wrong td:first-child {{ border-left: 4px dashed #d98a00; }}
#only:checked ~ .scroll tr.right {{ display: none; }}
@media (max-width: 64rem) {{
  .scroll {{ overflow-x: auto; }}
  th {{ position: static; }}
  td.words {{ min-width: 9rem; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{lines}
<input type="checkbox" id="only"><label for="only">hide correct</label>
<div class="scroll">
<table>
<thead><tr>{columns}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<script>{script}</script>
</body>
</html>
"""


def index_page(
    title: str,
    lines: Sequence[str],
    rows: Sequence[Row],
    pages: Mapping[str, str] | None = None,
) -> str:
    """The page.

    Args:
        title, lines: text above the list.
        rows: rows of ``samples.jsonl``.
        pages: trace -> page of its search, both in the run's folder; a sample without a page links
            to its trace.
    """
    pages = pages or {}
    return _PAGE.format(
        title=_escaped(title),
        lines="\n".join(f"<p>{_escaped(line)}</p>" for line in lines) + _traces_line(rows, pages),
        rows="\n".join(_row(row, pages) for row in rows),
        columns="".join(map(_column, COLUMNS)),
        script=_SCRIPT,
        allowed=_ALLOWED,
    )


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
