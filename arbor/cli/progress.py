"""Progress of an evaluation: a redrawn line on a terminal, or a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

FRAME_S = 0.25  # at most four frames a second
LINE_S = 30.0


class Progress:
    """Counts finished samples and shows the count.

    Args:
        console: None shows nothing.
        live: redraw one line; else print a line every `LINE_S` seconds.
        total: samples to solve.
        clock: seconds.
    """

    def __init__(
        self,
        console: Console | None,
        live: bool,
        total: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console
        self._live: Live | None = None
        if live and console is not None:
            from rich.live import Live  # here: a finished evaluation shows no progress

            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._clock = clock
        self._began = self._drawn = clock()
        self.total, self.done, self.right = total, 0, 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, right: bool) -> None:
        """Counts a finished sample."""
        self.done += 1
        self.right += right
        self.tick()

    def tick(self) -> None:
        """Shows the progress if that is due; called with every event."""
        now = self._clock()
        if self._live is not None:
            if now - self._drawn >= FRAME_S:
                from rich.text import Text

                self._drawn = now
                self._live.update(Text(self.line(), "dim", no_wrap=True), refresh=True)
        elif self._console is not None and now - self._drawn >= LINE_S:
            self._drawn = now
            self._console.print(f"arbor: {self.line()}", soft_wrap=True, markup=False)

    def line(self) -> str:
        """The progress, in one line."""
        if not self.done:
            return f"0 of {self.total:,}"
        each = (self._clock() - self._began) / self.done
        return (
            f"{self.done:,} of {self.total:,}, {100 * self.right / self.done:.1f} % right, "
            f"{each:.1f} s each, {_duration(each * (self.total - self.done))} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
