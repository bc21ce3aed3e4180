"""The system's Chromium, headless, driven by Playwright (without its own browsers)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from playwright.sync_api import Browser as PlaywrightBrowser
from playwright.sync_api import ConsoleMessage, Frame, sync_playwright
from playwright.sync_api import Page as PlaywrightPage

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
TIMEOUT_MS = 60_000
READY = "html[data-ready]"
MISSING = "no Chromium installed (Debian: apt-get install chromium)"


def program() -> str | None:
    """Path of the installed Chromium, if any."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab with a storage of its own.

    Attributes:
        errors: exceptions, console errors and warnings, and the browser's messages about the page;
            those of its frames too.
        requests: every address the page requested.
    """

    def __init__(self, page: PlaywrightPage) -> None:
        self._page = page
        self._protocol = page.context.new_cdp_session(page)
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(error.stack or error.message))
        page.on("console", self._on_console)
        # the protocol's event: Playwright's own leaves out data: addresses
        self._protocol.send("Network.enable")
        self._protocol.on(
            "Network.requestWillBeSent",
            lambda event: self.requests.append(event["request"]["url"]),
        )

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        return self._protocol.send(method, parameters)

    def blank(self) -> None:
        """Leave the page; forget its errors, requests and emulated media."""
        self._page.goto("about:blank")
        self.emulate()
        self.settle()
        self.errors.clear()
        self.requests.clear()

    def open(self, path: Path, hash: str = "", size: tuple[int, int] = (1280, 800)) -> Self:
        """Open a file and wait until the view is drawn, or reports that it cannot be."""
        self._page.set_viewport_size({"width": size[0], "height": size[1]})
        self._page.goto(f"{path.resolve().as_uri()}{hash}", wait_until="commit")
        self._page.wait_for_selector(READY, state="attached")
        return self

    def emulate(self, colours: Literal["light", "dark"] | None = None) -> None:
        """Set the system's preferred colour scheme; None: the browser's default."""
        self._page.emulate_media(color_scheme=colours or "null")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression, awaited if it is a promise."""
        done = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true.

        `wait_for_function` would evaluate it within the page, whose content policy forbids that.
        """
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"still false: {expression}; {self.errors}"
            self._page.wait_for_timeout(10)

    def settle(self) -> None:
        """Wait until everything due has been drawn."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def press(self, key: str) -> None:
        """Press and release a key, for example ``"a"``, ``"Home"`` or ``"Shift+P"``."""
        self._page.keyboard.press(key)
        self.settle()

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        self._page.mouse.click(x, y)
        self.settle()

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel with the mouse at a point of the window."""
        self._page.mouse.move(x, y)
        self._page.mouse.wheel(0, by)

    def frame(self) -> Frame:
        """The page's first frame, once its view is drawn."""
        frame = self._page.frames[1]
        frame.wait_for_selector(READY, state="attached")
        return frame

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


class Browser:
    """A running Chromium."""

    def __init__(self, browser: PlaywrightBrowser) -> None:
        self._browser = browser

    def page(self) -> Page:
        """A new tab with a storage of its own."""
        page = self._browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        return Page(page)


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """Start Chromium for as long as the block runs."""
    found = program()
    assert found is not None, MISSING
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*FLAGS, *flags])
        try:
            yield Browser(browser)
        finally:
            browser.close()
