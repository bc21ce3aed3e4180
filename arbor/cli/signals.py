"""Ctrl-C and SIGTERM: the first signal asks the search to end, the second ends the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Protocol, Self

EXIT_SIGNAL = 128  # plus the signal's number
SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
IMPORTER = "<frozen importlib._bootstrap>"  # the file of Python's own importing functions
STOPPED = "[interrupted] stopped at once."


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process now."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number
        self.exit_code = EXIT_SIGNAL + number


def ending_at_once() -> contextlib.AbstractContextManager[None]:
    """A context in which a signal ends the process at once, with a line on stderr."""
    return handled_by(_end)


def end_at_once() -> None:
    """Makes both signals end the process as in `ending_at_once`, until it ends."""
    with contextlib.suppress(ValueError):
        for number in SIGNALS:
            signal.signal(number, _end)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """A context in which a signal raises `Interrupted`, or ends the process where Python would not
    let that through: during an import, in a ``__del__``, in a callback of a weak reference."""
    before = sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if isinstance(ignored.exc_value, Interrupted):
            _end(ignored.exc_value.number, None)
        before(ignored)

    sys.unraisablehook = hook
    try:
        with handled_by(_interrupt):
            yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which `handler` answers both signals; restores the previous handlers."""
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # only the main thread may handle signals
        for number in SIGNALS:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"arbor: error: {STOPPED}\n".encode())
        if "--json" in sys.argv:
            error = {"code": "interrupted", "message": "stopped at once.", "hint": "", "data": {}}
            os.write(1, json.dumps({"error": error}).encode() + b"\n")
    os._exit(EXIT_SIGNAL + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if _importing(frame):
        _end(number, frame)
    raise Interrupted(number)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported, where an exception may be swallowed or become another."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTER:
            return True
        frame = frame.f_back
    return False


class Stoppable(Protocol):
    """A search in progress."""

    def stop(self, status: Any = ..., /) -> None:
        """Asks the search to end after the current forward pass."""
        ...


class StopSignals:
    """Installs both handlers on entry; restores the previous ones on exit.

    A signal outside a search ends the process at once.

    Attributes:
        received: the first signal's number; None before one.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._search: Stoppable | None = None
        self._handled = handled_by(self._handle)

    def __enter__(self) -> Self:
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handled.__exit__(None, None, None)

    @contextlib.contextmanager
    def stopping(self, search: Stoppable) -> Iterator[None]:
        """A context in which the first signal stops this search."""
        self._search = search
        try:
            yield
        finally:
            self._search = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._search is None or self.received is not None:
            _interrupt(number, frame)
        self.received = number
        self._search.stop("interrupted")
        with contextlib.suppress(OSError):
            os.write(2, b"\narbor: stopping after this forward pass; press again to quit\n")
