"""The picture of the README, docs/view.png: the page of `arbor demo` as it opens.

    python scripts/picture.py             # runs the demo and photographs its page
    python scripts/picture.py --check     # fails where the picture is of another run than today's

The picture carries the figures of its run as a text chunk, which `--check` compares. Needs the
`test` extra and, without `--check`, Chromium.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from arbor.cli.demo import FIRST_SEED, search
from arbor.cli.output import Output
from arbor.view import read_page_trace, write_page

if TYPE_CHECKING:
    from arbor.metrics import Metrics

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "view.png"
SIZE = (1280, 800)  # CSS pixels
KEY = "arbor-demo"  # keyword of the text chunk
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
            with Image.open(given.out) as picture:
                shown = json.loads(picture.info.get(KEY, "{}"))
            if shown == figures:
                return 0
            print(f"{given.out} shows {shown}, the demo has {figures}", file=sys.stderr)
            return 1
        assert solution.trace_path is not None, "the demo writes its trace"
        page = write_page(Path(folder) / "demo.html", read_page_trace(solution.trace_path))
        about = PngInfo()
        about.add_text(KEY, json.dumps(figures))
        with Image.open(io.BytesIO(photograph(page))) as picture:
            picture.save(given.out, pnginfo=about, optimize=True)
    print(f"{given.out}: {json.dumps(figures)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
