"""LiveSearches: the searches in progress and the last ones, as pages of the viewer."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from html import escape

from arbor.events import Event, Header
from arbor.metrics import MetricsFold
from arbor.run.recording import Recording
from arbor.server.public import PublicRecords
from arbor.support.texts import clipped, one_line
from arbor.view import html_page
from arbor.view.page_trace import PageTrace, shortened

MOST = 16  # searches that are kept
MOST_BYTES = 4 * 2**20  # of packed events of each
REFRESH_S = 2  # after which a page of what is in progress is read again

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>arbor: searches</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta http-equiv="refresh" content="{refresh}">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884 }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
:root {{ color-scheme: light dark }}
</style></head><body><h1>Searches</h1><p>{summary}</p>
<table><tr><th>problem<th>status<th class="n">blocks<th class="n">tokens
<th class="n">KV, at most<th class="n">budget<th class="n">seconds</tr>
{rows}</table></body></html>
"""


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
        self._source = source
        self._name = name
        self._metrics = MetricsFold()
        self._recording = Recording(MOST_BYTES)
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
        cells = "".join(f'<td class="n">{number:,}' for number in numbers)
        text = escape(clipped(one_line(self.problem), 80))
        return (
            f'<tr><td><a href="live/{self.id}">{text or "(empty)"}</a><td>{escape(self.status)}'
            f'{cells}<td class="n">{seconds:.1f}</tr>\n'
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
        rows = "".join(each.row() for each in searches)
        return PAGE.format(refresh=REFRESH_S, summary=summary, rows=rows)
