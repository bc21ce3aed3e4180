"""Drives a headless Chromium over a pipe, by its DevTools protocol: no port, no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

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
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0

# Chromium reads commands from descriptor 3 and writes to 4: the pipes are put there, by way of higher numbers
PLACE = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for place, pipe in enumerate(pipes, 3):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""

# what a key is called when it is no letter: (code, virtual key)
NAMED_KEYS = {
    " ": ("Space", 32),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowRight": ("ArrowRight", 39),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "Escape": ("Escape", 27),
    "Tab": ("Tab", 9),
    "Enter": ("Enter", 13),
}


def program() -> str | None:
    """Where Chromium is, if it is."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab, and everything it said and asked for.

    Attributes:
        errors: exceptions, console errors and messages of the browser about the page.
        requests: every address the page asked for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for what it returns."""
        return self._browser.send(method, parameters, self._session)

    def open(self, path: Path, hash: str = "", size: tuple[int, int] = (1280, 800)) -> Self:
        """Opens a file and waits until the view is drawn, or says that it cannot be."""
        self.resize(*size)
        self.send("Page.navigate", url=f"{path.resolve().as_uri()}{hash}")
        self.wait("document.documentElement?.dataset.ready !== undefined")
        return self

    def reload(self) -> None:
        """Opens the same page anew; waits for the new one, not for what is left of the old one."""
        self.evaluate("document.documentElement.dataset.old = 'old'")
        self.send("Page.reload")
        new = "document.documentElement?.dataset"
        self.wait(f"{new}?.ready !== undefined && {new}.old === undefined")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Sets the size of the window's inside, CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def emulate(self, **features: str) -> None:
        """Sets media features: ``prefers_color_scheme="dark"``."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression, awaited if it is a promise."""
        done = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}; {self.errors}"
            time.sleep(0.01)

    def settle(self) -> None:
        """Waits until what is to be drawn has been."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def press(self, key: str, shift: bool = False) -> None:
        """Presses and releases a key."""
        code, number = NAMED_KEYS.get(key, (f"Key{key.upper()}", ord(key.upper()[0])))
        settings: dict[str, Any] = {
            "key": key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }
        if len(key) == 1:
            settings["text"] = key
        self.send("Input.dispatchKeyEvent", type="keyDown", **settings)
        settings.pop("text", None)
        self.send("Input.dispatchKeyEvent", type="keyUp", **settings)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Sends a mouse event: ``mousePressed``, ``mouseReleased``, ``mouseMoved``, ``mouseWheel``."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Clicks at a point of the window."""
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Saves what is seen as PNG."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def hear(self, method: str, parameters: dict[str, Any]) -> None:
        """Takes in what the browser reports."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])


class Browser:
    """A running Chromium; `page` opens tabs."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process = process
        self._to, self._back = to, back
        self._rest = b""
        self._calls = 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new tab with a storage of its own."""
        context = self.send("Target.createBrowserContext", {})["browserContextId"]
        target = self.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )["targetId"]
        return self._attach(target)

    def frame(self) -> Page:
        """The one frame that has a process of its own, as sandboxed frames have; waits until it is there."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for target in self.send("Target.getTargets", {})["targetInfos"]:
                if target["type"] == "iframe":
                    return self._attach(target["targetId"])
            time.sleep(0.02)
        raise AssertionError("there is no frame")

    def _attach(self, target: str) -> Page:
        attached = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        page = Page(self, session)
        self._pages[session] = page
        return page

    def send(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        """Calls a method of the protocol and waits for what it returns."""
        self._calls += 1
        call: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            call["sessionId"] = session
        rest = memoryview(json.dumps(call).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._to, rest) :]
        while True:
            message = self._next()
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None:
                page.hear(message["method"], message["params"])

    def _next(self) -> dict[str, Any]:
        """The next message; they end with a zero byte."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], PATIENCE_S)
            assert ready, "Chromium says nothing"
            data = os.read(self._back, 1 << 20)
            assert data, f"Chromium ended with {self._process.poll()}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """Starts Chromium for as long as the block runs."""
    found = program()
    assert found is not None, "there is no Chromium"
    theirs, to = os.pipe()
    back, ours = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [sys.executable, "-c", PLACE, str(theirs), str(ours), found]
        command += [*FLAGS, f"--user-data-dir={profile}", *flags]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs, ours),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(ours)
        try:
            yield Browser(process, to, back)
        finally:
            os.close(to)
            os.close(back)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
