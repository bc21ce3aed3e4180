"""Shows a run while it happens: a meter that is redrawn on a terminal, or a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arbor.events import Ended, Event
from arbor.metrics import Metrics, MetricsFold
from arbor.trace.numbers import human_bytes
from arbor.trace.replay import Replay

FRAME_S = 0.25  # at most four frames a second
LINE_S = 30.0


def progress_line(metrics: Metrics, held_tokens: int) -> str:
    """A run so far, in one line of a log."""
    return (
        f"{metrics.wall_s:.0f} s, {metrics.blocks:,} blocks, {metrics.expansions:,} expansions, "
        f"{metrics.tok_per_s:.0f} tok/s, "
        f"KV {held_tokens:,} of {metrics.budget_tokens:,} tokens, "
        f"{metrics.tokens_recomputed:,} recomputed"
    )


class LogView:
    """A listener that writes a line to a log, at most every `LINE_S` seconds.

    Args:
        console: where to.
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console = console
        self._clock = clock
        self._fold = MetricsFold(clock)
        self._replay = Replay()
        self._last = clock()

    def __call__(self, event: Event) -> None:
        self._fold(event)
        self._replay(event)
        now = self._clock()
        if now - self._last >= LINE_S and not isinstance(event, Ended):
            self._last = now
            line = progress_line(self._fold.metrics(), self._replay.kv.device)
            self._console.print(f"arbor: {line}", soft_wrap=True, highlight=False, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class LiveView:
    """A listener that redraws a meter, at most every `FRAME_S` seconds, and wipes it at the end.

    It draws when an event arrives and has no thread of its own.

    Args:
        console: a terminal.
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._fold = MetricsFold(clock)
        self._replay = Replay()
        self._last = clock() - FRAME_S
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __call__(self, event: Event) -> None:
        self._fold(event)
        self._replay(event)
        now = self._clock()
        if now - self._last >= FRAME_S:
            self._last = now
            self._live.update(self.frame(), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def frame(self) -> Group:
        """The meter as it stands."""
        metrics, held = self._fold.metrics(), self._replay.kv
        meter = Table.grid(padding=(0, 1))
        limit = max(1, metrics.budget_tokens)
        meter.add_row(
            "KV",
            ProgressBar(total=limit, completed=min(held.device, limit), width=30),
            f"{held.device:,} of {metrics.budget_tokens:,} tokens, "
            f"{human_bytes(held.device * metrics.bytes_per_token)}",
        )
        if held.host or held.compressed:
            meter.add_row("", "", f"{held.host:,} on the host, {held.compressed:,} compressed")
        numbers = Text(
            f"{metrics.blocks:,} blocks  {metrics.expansions:,} expansions  "
            f"{metrics.tok_per_s:.0f} tok/s  {metrics.evictions:,} evictions  "
            f"{metrics.rehydrations:,} rehydrations  {metrics.asked:,} asked  {metrics.wall_s:.1f} s"
        )
        return Group(meter, numbers)
