"""The picture of the README, docs/view.png: the page of `arbor demo` as it opens.

    python scripts/picture.py             # runs the demo and photographs its page
    python scripts/picture.py --check     # fails where the picture is of another run than today's

The picture carries the figures of its run as a text chunk, which `--check` and the tests compare.
Needs the `test` extra and Chromium; `--check` needs neither.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from arbor.cli.demo import FIRST_SEED, search
from arbor.cli.output import Output
from arbor.view import read_page_trace, write_page

if TYPE_CHECKING:
    from arbor.metrics import Metrics

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "view.png"
SIZE = (1280, 800)  # CSS pixels
SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEY = b"arbor-demo"  # keyword of the text chunk
FIGURES = (
    "blocks",
    "budget_tokens",
    "peak_tokens",
    "evictions",
    "rehydrations",
    "tokens_recomputed",
)


def figures_of(metrics: Metrics) -> dict[str, int]:
    """The figures of a run that its picture carries."""
    return {name: getattr(metrics, name) for name in FIGURES}


def figures_in(picture: bytes) -> dict[str, int]:
    """The figures that a picture carries; none without the text chunk."""
    for kind, data in chunks(picture):
        keyword, _, text = data.partition(b"\0")
        if kind == b"tEXt" and keyword == KEY:
            found: dict[str, int] = json.loads(text)
            return found
    return {}


def with_figures(picture: bytes, figures: dict[str, int]) -> bytes:
    """A picture with the figures of its run, as a text chunk before the pixels."""
    written = [SIGNATURE]
    for kind, data in chunks(picture):
        if kind == b"tEXt":
            continue
        if kind == b"IDAT" and figures:
            written.append(chunk(b"tEXt", KEY + b"\0" + json.dumps(figures).encode()))
            figures = {}
        written.append(chunk(kind, data))
    return b"".join(written)


def chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    """Type and data of each chunk of a PNG."""
    if not picture.startswith(SIGNATURE):
        raise ValueError("not a PNG")
    found, at = [], len(SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        found.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG, with its length and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def photograph(page: Path) -> bytes:
    """The page as it opens, in light colours."""
    sys.path.insert(0, str(ROOT / "tests"))  # the browser's driver is shared with the tests
    from support.chromium import chromium

    with chromium() as browser:
        tab = browser.page().open(page, "#theme=light", SIZE)
        tab.settle()
        assert not tab.errors, tab.errors
        shot = tab.send("Page.captureScreenshot", format="png", optimizeForSpeed=False)
    return base64.b64decode(shot["data"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        solution = search(Output(quiet=True), Path(folder), FIRST_SEED)
        figures = figures_of(solution.metrics)
        if given.check:
            shown = figures_in(given.out.read_bytes())
            if shown == figures:
                return 0
            print(f"{given.out} shows {shown}, the demo has {figures}", file=sys.stderr)
            return 1
        assert solution.trace_path is not None, "the demo writes its trace"
        page = write_page(Path(folder) / "demo.html", read_page_trace(solution.trace_path))
        given.out.write_bytes(with_figures(photograph(page), figures))
    print(f"{given.out}: {json.dumps(figures)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
