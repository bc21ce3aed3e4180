"""The frame of a page that lists samples: what it was made with, find, filter, sort; one script."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arbor.components import setting_text
from arbor.errors import ArborError
from arbor.measure.evaluation.folder import CONFIG, SAMPLES
from arbor.run.config import read_config
from arbor.support.texts import clipped, visible
from arbor.view.page import asset, list_style

LONGEST = 300  # characters of a cell; samples.jsonl has the whole text
SHOWN = 400  # rows that are drawn at first; the others wait in a template

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
{head}
<div class="tools">
<label>find <input type="search" id="find" autocomplete="off" spellcheck="false"></label>
<select id="outcome" aria-label="outcome"><option value="">every outcome</option>{outcomes}</select>
<label><input type="checkbox" id="only">hide correct</label>
<output id="found" for="find"></output>
</div>
<div class="scroll">
<table id="list">
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


def list_page(
    title: str,
    head: str,
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[str],
    outcomes: Sequence[str],
) -> str:
    """The page.

    Args:
        title: of the page.
        head: HTML above the list.
        columns: names, and whether they are numbers.
        rows: each as HTML: `list_row`.
        outcomes: values of the rows' outcomes, to choose from.
    """
    rest = f'<template id="rest">{"".join(rows[SHOWN:])}</template>' if rows[SHOWN:] else ""
    script = asset("evaluation.js")
    return _PAGE.format(
        title=escaped(title),
        head=head,
        outcomes="".join(f"<option>{escaped(each)}</option>" for each in outcomes),
        rows="\n".join(rows[:SHOWN]),
        rest=rest,
        columns="".join(_column(name, number) for name, number in columns),
        style=list_style(),
        script=script,
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def list_row(cells: Sequence[str], right: bool, *outcomes: str) -> str:
    """A row.

    Args:
        cells: HTML of each cell, ``<td>`` included.
        right: whether it is hidden with the correct ones.
        outcomes: those of `list_page` that choose it.
    """
    kind = "right" if right else "wrong"
    return f'<tr class="{kind}" data-outcome="{"|".join(outcomes)}">{"".join(cells)}</tr>'


def words_cell(word: Any) -> str:
    return f'<td class="words">{short(word)}</td>'


def number_cell(text: str) -> str:
    return f'<td class="n">{text}</td>'


def share_bar(value: float, low: float, high: float, name: str = "accuracy") -> str:
    """A share as a bar, with its interval on it."""
    says = f"{name} {100 * value:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
    return (
        f'<div class="accuracy" role="img" aria-label="{escaped(says)}" title="{escaped(says)}">'
        f'<i class="part" style="width:{100 * value:.2f}%"></i>'
        f'<i class="interval" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></i>'
        "</div>\n"
    )


def short(word: Any) -> str:
    """A text as HTML, cut to `LONGEST` characters; None is empty."""
    return "" if word is None else escaped(clipped(str(word), LONGEST + 1))


def escaped(text: str) -> str:
    """A text as HTML; control characters, which no page may hold, are shown."""
    return html.escape(visible(text))


def _column(name: str, number: bool) -> str:
    numbers = ' class="n"' if number else ""
    return f'<th scope="col"{numbers}><button type="button">{escaped(name)}</button></th>'


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run was made with.

    Attributes:
        facts: name -> text, in the order of a page.
        settings: the text of its ``run.toml``.
        ended: when its last search ended.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    ended: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunFacts:
        """Those of a run's folder; none of a folder without readable settings."""
        try:
            config = read_config(folder / CONFIG)
            text = (folder / CONFIG).read_text(encoding="utf-8")
            written = (folder / SAMPLES).stat().st_mtime
        except (OSError, ArborError):
            return cls()
        ended = f"{datetime.fromtimestamp(written, UTC):%Y-%m-%d %H:%M} UTC"
        return cls(dict(_facts(config)), text, ended)


def shared_facts(runs: Sequence[RunFacts]) -> dict[str, str]:
    """The facts that all runs have; none without a run."""
    if not runs:
        return {}
    first, *others = runs
    return {
        name: text
        for name, text in first.facts.items()
        if all(other.facts.get(name) == text for other in others)
    }


def facts_html(runs: Sequence[RunFacts]) -> str:
    """What all runs were made with, and every setting of the first, folded away; empty for none."""
    facts = shared_facts(runs)
    if not facts:
        return ""
    facts["last search"] = max(run.ended for run in runs)
    rows = "".join(f"<dt>{escaped(n)}</dt><dd>{escaped(text)}</dd>" for n, text in facts.items())
    what = "every setting" if len(runs) == 1 else "every setting of the first run"
    lines = "\n".join(map(escaped, runs[0].settings.splitlines()))
    return (
        f'<dl class="facts">{rows}</dl>'
        f"<details><summary>{what}</summary><pre>{lines}</pre></details>\n"
    )


def _facts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", str(config.get("model") or "builtin:sapling")
    for name in ("controller", "verifier", "policy", "aggregate"):
        if spec := config.get(name):
            yield "search" if name == "controller" else name, _spec(spec)
    if isinstance(task := config.get("task"), Mapping):
        yield "task", str(task.get("name"))
    if isinstance(sampling := config.get("sampling"), Mapping):
        yield "sampling", _spec(sampling)
    for name in ("budget", "mode", "seed"):
        if name in config:
            yield name, str(config[name])
    yield "arbor", str(config.get("arbor", ""))


def _spec(spec: Any) -> str:
    """A component with its own settings: ``tot, beam=2, width=3``; anything else as it is."""
    if not isinstance(spec, Mapping):
        return str(spec)
    settings = (
        f"{name}={setting_text(value)}"
        for name, value in spec.items()
        if name != "name" and not isinstance(value, Mapping)
    )
    name = [str(spec["name"])] if "name" in spec else []
    return ", ".join([*name, *settings])
