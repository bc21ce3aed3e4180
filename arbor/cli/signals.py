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
        """Asks it to end after the current forward."""
        ...


class StopSignals:
    """Handles both signals while it is entered, and what they did before afterwards.

    A signal while no search runs ends the process at once.

    Attributes:
        signal: the first signal's number; None if there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
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
    def ending(self, search: Stoppable) -> Iterator[None]:
        """Within it, the first signal is for this search."""
        self._search = search
        try:
            yield
        finally:
            self._search = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._search is None or self.signal is not None:
            raise Interrupted(number)
        self.signal = number
        self._search.stop("interrupted")
        with contextlib.suppress(OSError):
            os.write(2, b"\narbor: stopping after this forward pass; once more stops at once\n")
