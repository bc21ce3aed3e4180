"""Ctrl-C and SIGTERM: the first signal asks the search to end, the second ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol, Self

EXIT_SIGNAL = 128  # plus the signal's number


class Interrupted(KeyboardInterrupt):
    """A signal that ends the process now."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = EXIT_SIGNAL + number


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
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
            raise Interrupted(number)
        self.received = number
        self._search.stop("interrupted")
        with contextlib.suppress(OSError):
            os.write(2, b"\narbor: stopping after this forward pass; press again to quit\n")
