"""One self-contained HTML page from runs and hand-written assets."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from functools import cache
from importlib import resources
from pathlib import Path

from arbor.errors import UsageError
from arbor.support.atomic_write import write_atomically
from arbor.trace.write import GZIP
from arbor.view.page_trace import PageTrace

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


def write_page(path: str | os.PathLike[str], *recordings: PageTrace) -> Path:
    """Writes `html_page` to a file.

    Raises:
        UsageError: the file cannot be written.
    """
    path = Path(path)
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
