"""One self-contained HTML page from runs and hand-written assets; a run as the page shows it."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from arbor.errors import UsageError
from arbor.events import Event
from arbor.support.atomic_write import write_atomically
from arbor.trace.read import Trace, records_of
from arbor.trace.write import GZIP, to_record

IDS = "ids"  # token ids are half of a trace's bytes and never shown; their number stays


@dataclass(frozen=True, slots=True)
class PageTrace:
    """A run on a page.

    Attributes:
        name: its title, for example a file name.
        records: its events as JSON objects, in order; a boundary has the number of its tokens
            instead of their ids.
        banner: its damage, in one line; empty for a whole trace.
    """

    name: str
    records: tuple[dict[str, Any], ...]
    banner: str = ""

    def count(self, kind: str) -> int:
        """Number of events of a type."""
        return sum(record["e"] == kind for record in self.records)

    @property
    def ended(self) -> bool:
        """Whether the run has an end."""
        return self.count("end") > 0


def read_page_trace(path: str | os.PathLike[str]) -> PageTrace:
    """Reads a trace, plain or gzip, whole or cut; keeps events of unknown types.

    Raises:
        TraceError: as `read_trace`.
    """
    trace = Trace(Path(path))
    records = tuple(map(shortened, records_of(trace)))
    return PageTrace(trace.path.name, records, trace.banner)


def page_trace_of(name: str, events: Iterable[tuple[float, Event]]) -> PageTrace:
    """A page trace from (seconds, event) pairs in memory."""
    records = [
        shortened({"e": event.name, "i": number, "t": round(seconds, 6)} | to_record(event))
        for number, (seconds, event) in enumerate(events)
    ]
    recording = PageTrace(name, tuple(records))
    return recording if recording.ended else PageTrace(name, tuple(records), "incomplete trace")


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the number of its token ids instead of them."""
    ids = record.get(IDS)
    if not isinstance(ids, list | tuple):
        return record
    return {key: value for key, value in record.items() if key != IDS} | {"tokens": len(ids)}


_TITLE = b"<title>arbor trace</title>"  # by which a page is known, within its first bytes
_HEAD = 1024
MOST_RUNS = 2  # one run, or two side by side
SCRIPTS = (
    "fold.js",
    "describe.js",
    "map.js",
    "timeline.js",
    "inspector.js",
    "panels.js",
    "viewer.js",
)
# CSS pixels in a notebook: the page scrolls below NARROW, and needs more to show its controls
FRAME_HEIGHT = 720
NARROW, NARROW_HEIGHT = 900, 960


def html_page(*recordings: PageTrace) -> str:
    """A page that shows one run, or compares two.

    The same runs give the same page, byte for byte.

    Raises:
        UsageError: no run, or more than `MOST_RUNS`.
    """
    if not 1 <= len(recordings) <= MOST_RUNS:
        raise UsageError(
            "view-count",
            f"a page shows one trace or compares two, not {len(recordings)}.",
            "arbor view TRACE [TRACE2]",
        )
    data = "\n".join(
        f'<script type="application/octet-stream" class="run">{_packed(recording)}</script>'
        for recording in recordings
    )
    page = asset("viewer.html")
    for mark, text in (
        ("/*styles*/", asset("viewer.css")),
        ("/*scripts*/", "\n".join(asset(name) for name in SCRIPTS)),
        ("<!--runs-->", data),
    ):
        before, found, after = page.partition(mark)
        assert found, f"viewer.html has no place for {mark}"
        page = before + text + after
    return page


def refuse_other_file(path: Path) -> None:
    """Refuses a file that holds something other than a page of `html_page`; empty files, devices
    and pipes are written to.

    Raises:
        UsageError: it does.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    head = b""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(_HEAD)
    if _TITLE not in head:
        raise UsageError(
            "output-exists",
            f"{path} exists, and is no page of 'arbor view'.",
            "Name another file for the page.",
            path=str(path),
        )


def write_page(path: str | os.PathLike[str], *recordings: PageTrace) -> Path:
    """Writes `html_page` to a file.

    Raises:
        UsageError: the file cannot be written, or holds something else.
    """
    path = Path(path)
    refuse_other_file(path)
    write_atomically(path, html_page(*recordings))
    return path


def notebook_frame(page: str) -> str:
    """A page as a frame: scripts run, without an origin and without access to the outer page.

    The frame is high enough for the tree and every control of the page at the width it is given.
    """
    height = (
        f"clamp({FRAME_HEIGHT}px,calc({FRAME_HEIGHT}px + ({NARROW}px - 100cqw)*999),"
        f"{NARROW_HEIGHT}px)"
    )
    return (
        '<div style="container-type:inline-size;width:100%">'
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="arbor search trace" '
        f'style="width:100%;height:{NARROW_HEIGHT}px;height:{height};border:0"></iframe></div>'
    )


def _packed(recording: PageTrace) -> str:
    """A run as base64 of gzip of JSON: no byte of it can end the enclosing script."""
    data = {"name": recording.name, "banner": recording.banner, "records": recording.records}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
    # without a time stamp: the same run gives the same bytes
    packer = zlib.compressobj(9, wbits=GZIP)
    return base64.b64encode(packer.compress(text.encode()) + packer.flush()).decode()


def list_style() -> str:
    """The style of pages that list searches: the viewer's colours, light or dark as the system is,
    and rules of their own."""
    light, dark = re.findall(r"^:root[^{]*\{(.*?)\}", asset("viewer.css"), re.DOTALL | re.MULTILINE)
    return (
        f":root {{{light}}}\n@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n"
        f"{asset('evaluation.css')}"
    )


@cache
def asset(name: str) -> str:
    """The text of a hand-written part of a page."""
    return (resources.files("arbor.view") / "assets" / name).read_text(encoding="utf-8")
