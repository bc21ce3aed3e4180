"""LiveSearches: the searches in progress and the last ones, as pages of the viewer."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from html import escape

from arbor.events import Answered, Event, Header
from arbor.integrations.server.public import PublicRecords
from arbor.metrics import MetricsFold
from arbor.run.listeners import RecordedEvents
from arbor.support.texts import clipped, one_line
from arbor.view import html_page
from arbor.view.page import PageTrace, list_style, shortened

MOST = 16  # searches that are kept
MOST_BYTES = 4 * 2**20  # of packed events of each
MOST_SHOWN = 80  # characters of a problem or an answer
REFRESH_S = 2  # after which a page of what is in progress is read again

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta http-equiv="refresh" content="{refresh}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>arbor: searches</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<h1>Searches</h1>
<p>{summary}</p>
{table}
</body>
</html>
"""
STYLE = """
@media (max-width: 48rem) {
  thead { display: none; }
  tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  td { display: inline-block; padding: 0 .8rem 0 0; border: 0; }
  td.words { display: block; max-width: none; overflow-wrap: anywhere; }
  td.words:empty { display: none; }
  td[data-name]::before { content: attr(data-name) " "; color: var(--muted); }
}
"""
NUMBERS = ("blocks", "tokens", "peak KV", "budget", "seconds")
NONE_YET = """<p class="hint">No search yet. This page shows requests with the field <code>arbor</code>
and those to <code>/v1/solve</code>.</p>"""


class LiveSearch:
    """One search, as far as it has come.

    Args:
        problem: its text.
        source: name or path of the model.
        name: of the model in requests.
    """

    def __init__(self, problem: str, source: str, name: str) -> None:
        self.id = secrets.token_urlsafe(8)
        self.problem = problem
        self.status = "waiting"
        self.answer: str | None = None
        self.guessed = False
        self._source = source
        self._name = name
        self._metrics = MetricsFold()
        self._recording = RecordedEvents(MOST_BYTES)
        self._began_s: float | None = None
        self._ended_s: float | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended_s is not None

    def feed(self, event: Event) -> None:
        """One more event."""
        if isinstance(event, Header):
            self.status, self._began_s = "running", time.monotonic()
        elif isinstance(event, Answered):
            self.answer, self.guessed = event.text, event.guessed
        self._metrics(event)
        self._recording(event)

    def end(self, status: str) -> None:
        """The search is over."""
        if not self.ended:
            self.status, self._ended_s = status, time.monotonic()
            self._recording.close()

    def row(self) -> str:
        """Its row in the table, as HTML."""
        counts = self._metrics.metrics()
        began, ended = self._began_s, self._ended_s
        seconds = 0.0 if began is None else (time.monotonic() if ended is None else ended) - began
        numbers = (counts.nodes, counts.tokens_generated, counts.peak_tokens, counts.budget_tokens)
        figures = [f"{number:,}" for number in numbers] + [f"{seconds:.1f}"]
        cells = "".join(
            f'<td class="n" data-name="{name}">{figure}'
            for name, figure in zip(NUMBERS, figures, strict=True)
        )
        answer = _shown(self.answer or "") + (" (guessed)" if self.guessed else "")
        problem = _shown(self.problem) or "(empty)"
        if self.events() is not None:
            problem = f'<a href="live/{self.id}">{problem}</a>'
        return (
            f'<tr><td class="words">{problem}<td class="words" data-name="answer">{answer}'
            f"<td>{escape(self.status)}{cells}</tr>\n"
        )

    def events(self) -> Iterator[tuple[float, Event]] | None:
        """(seconds, event) of each event so far; None where there are none, or too many to keep."""
        recording = self._recording
        return iter(recording) if recording.events and recording.whole else None

    def page(self, events: Iterable[tuple[float, Event]]) -> str:
        """The viewer with some events; may be called in another thread."""
        made = PublicRecords(self._source, self._name)
        records = [
            shortened({**made.record(event), "t": round(seconds, 6)}) for seconds, event in events
        ]
        banner = "" if self.ended else "in progress: this page is read again every few seconds"
        name = clipped(one_line(self.problem))
        return html_page(PageTrace(name, tuple(records), banner))


class LiveSearches:
    """The searches in progress and the last ones.

    Args:
        source: name or path of the model.
        name: of the model in requests.
    """

    def __init__(self, source: str, name: str) -> None:
        self._source = source
        self._name = name
        self._searches: OrderedDict[str, LiveSearch] = OrderedDict()

    def begin(self, problem: str) -> LiveSearch:
        """One more search; the oldest that is over is forgotten."""
        search = LiveSearch(problem, self._source, self._name)
        self._searches[search.id] = search
        over = [each.id for each in self._searches.values() if each.ended]
        for identity in over[: max(0, len(self._searches) - MOST)]:
            del self._searches[identity]
        return search

    def find(self, identity: str) -> LiveSearch | None:
        """A search by its id; None: unknown or forgotten."""
        return self._searches.get(identity)

    def index(self) -> str:
        """The table of all, the latest first, as HTML."""
        searches = list(reversed(self._searches.values()))
        running = sum(not each.ended for each in searches)
        summary = f"{escape(self._name)}: {running} in progress, {len(searches) - running} ended"
        names = "".join(f'<th scope="col" class="n">{name}' for name in NUMBERS)
        rows = "".join(each.row() for each in searches)
        table = (
            '<table><thead><tr><th scope="col">problem<th scope="col">answer<th scope="col">status'
            f"{names}</tr></thead>\n<tbody>\n{rows}</tbody></table>"
        )
        return PAGE.format(
            refresh=REFRESH_S,
            style=list_style() + STYLE,
            summary=summary,
            table=table if searches else NONE_YET,
        )


def _shown(text: str) -> str:
    """The beginning of a text in one line, as HTML."""
    return escape(clipped(one_line(text), MOST_SHOWN))
