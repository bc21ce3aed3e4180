"""The list of a run's samples as one HTML page, without scripts and without requests."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from arbor.measure.evaluation.results import Row, cost, is_right

LONGEST = 300  # characters of a cell; samples.jsonl has the whole text

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
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
th, td {{ text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid #8884; overflow-wrap: anywhere; }}
th {{ position: sticky; top: 0; background: Canvas; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }}
.right td:first-child {{ border-left: 4px solid #2a7de1; }}
.wrong td:first-child {{ border-left: 4px dashed #d98a00; }}
#only:checked ~ table tr.right {{ display: none; }}
.scroll {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{lines}
<input type="checkbox" id="only"><label for="only">hide correct</label>
<table>
<thead><tr><th>sample</th><th>problem</th><th>answer</th><th>key</th><th>outcome</th><th class="n">tokens</th><th class="n">recomputed</th><th class="n">peak KV</th><th class="n">CPU s</th><th>trace</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def index_page(title: str, lines: Sequence[str], rows: Sequence[Row]) -> str:
    """The page.

    Args:
        title, lines: text above the list.
        rows: rows of ``samples.jsonl``.
    """
    return _PAGE.format(
        title=html.escape(title),
        lines="\n".join(f"<p>{html.escape(line)}</p>" for line in lines),
        rows="\n".join(map(_row, rows)),
    )


def _row(row: Row) -> str:
    right = is_right(row)
    error: Mapping[str, Any] | None = row.get("error")
    outcome = "right" if right else "no answer" if row.get("answer") is None else "wrong"
    if error is not None:
        outcome = f"error: [{error.get('code')}] {error.get('message')}"
    words = [row.get("id"), row.get("problem"), row.get("answer"), row.get("expected"), outcome]
    names = ("tokens_generated", "tokens_recomputed", "peak_tokens")
    numbers = [f"{cost(row, name):,.0f}" for name in names] + [f"{row.get('cpu_s', 0):.2f}"]
    cells = [f"<td>{_short(word)}</td>" for word in words]
    cells += [f'<td class="n">{number}</td>' for number in numbers]
    trace = row.get("trace")
    link = f'<a href="{quote(str(trace))}">{_short(PurePath(str(trace)).name)}</a>' if trace else ""
    return f'<tr class="{"right" if right else "wrong"}">{"".join(cells)}<td>{link}</td></tr>'


def _short(word: Any) -> str:
    text = "" if word is None else str(word)
    return html.escape(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
