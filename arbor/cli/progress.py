"""Progress of an evaluation: a redrawn line on a terminal, or a line now and then in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from arbor.events import Ended, Event, Header
from arbor.support.texts import duration_text

if TYPE_CHECKING:
    from rich.console import Console

    from arbor.view.live import Redraw

FRAME_S = 0.25  # at most four frames a second
LINE_S = 30.0
WINDOW = 32  # finished samples that the rate is of, at least 4 for each one in progress


class Progress:
    """Counts finished samples and shows the count, their rate and the time left.

    The rate is that of the samples finished last, as many as `WINDOW`, over the time until now: it
    follows a run whose problems become harder, falls while nothing is finished, and counts what is
    finished together once. It begins with the first event of a search, after the model was loaded.

    Args:
        console: None shows nothing.
        live: redraw one line; else print a line every `LINE_S` seconds.
        total: samples to solve.
        at_once: samples in progress at a time.
        clock: seconds.
    """

    def __init__(
        self,
        console: Console | None,
        live: bool,
        total: int,
        at_once: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console
        self._live: Redraw | None = None
        if live and console is not None:
            from arbor.view.live import Redraw  # here: a finished evaluation shows no progress

            self._live = Redraw(console)
        self._clock = clock
        self._drawn = clock()
        self._begun = False
        # seconds at which the window begins and its samples were finished
        self._finished = deque([self._drawn], maxlen=1 + max(WINDOW, 4 * at_once))
        self.total, self.done, self.right, self.in_progress = total, 0, 0, 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, right: bool) -> None:
        """Counts a finished sample."""
        self.done += 1
        self.right += right
        self._finished.append(self._clock())
        self.tick()

    def hear(self, event: Event) -> None:
        """Takes an event of any search."""
        if not self._begun:
            self._begun = True
            self._finished[0] = self._clock()
        if isinstance(event, Header):
            self.in_progress += 1
        elif isinstance(event, Ended):
            self.in_progress -= 1
        self.tick()

    def show(self, in_progress: int) -> None:
        """Takes the number of samples in progress, where their events are not heard."""
        if in_progress and not self._begun:
            self._begun = True
            self._finished[0] = self._clock()
        self.in_progress = in_progress
        self.tick()

    def tick(self) -> None:
        """Shows the progress if that is due."""
        now = self._clock()
        if self._live is not None:
            if now - self._drawn >= FRAME_S:
                from rich.text import Text

                self._drawn = now
                self._live.update(Text(self.line(), "dim", no_wrap=True))
        elif self._console is not None and now - self._drawn >= LINE_S:
            self._drawn = now
            self._console.print(f"arbor: {self.line()}", soft_wrap=True, markup=False)

    def line(self) -> str:
        """The progress, in one line."""
        parts = [f"{self.done:,} of {self.total:,}"]
        if self.in_progress > 1:
            parts.append(f"{self.in_progress:,} in progress")
        if self.done:
            parts.append(f"{100 * self.right / self.done:.1f} % right")
            seconds = max(self._clock() - self._finished[0], 1e-9)
            each = seconds / (len(self._finished) - 1)
            parts += [_rate(each), f"{duration_text(each * (self.total - self.done))} left"]
        return ", ".join(parts)


def _rate(each: float) -> str:
    """Samples per minute, or per hour where they are fewer, at so many seconds each."""
    unit, seconds = ("minute", 60.0) if each <= 60 else ("hour", 3600.0)
    rate = seconds / each
    return f"{rate:,.0f} per {unit}" if rate >= 100 else f"{rate:.1f} per {unit}"
