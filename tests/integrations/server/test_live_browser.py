"""The page of searches in progress, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from support.chromium import MISSING, Page, chromium, program
from support.fake_run import fake_run

from arbor.integrations.server.live import LiveSearches

pytestmark = [pytest.mark.slow, pytest.mark.skipif(program() is None, reason=MISSING)]


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as running:
        yield running.page()


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_of_a_server_needs_no_scrolling_aside(
    tmp_path: Path, page: Page, width: int
) -> None:
    searches = LiveSearches("a", "a")
    search = searches.begin("onlyonelongword" * 20)
    for event in fake_run(1):
        search.feed(event)
    search.end("solved")
    path = tmp_path / "live.html"
    ready = searches.index().replace("<html ", "<html data-ready ")  # it has no script
    path.write_text(ready, encoding="utf-8")

    page.open(path, size=(width, 600))

    assert search.answer and search.answer in page.evaluate("document.body.innerText")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.errors == []
