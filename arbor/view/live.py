"""Live views of a run: a redrawn meter on a terminal, or occasional lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.text import Text

from arbor.events import Ended, Event, Rehydrated
from arbor.metrics import Metrics
from arbor.support.texts import counted
from arbor.trace.fold import Replay
from arbor.view.draw import ASCII, UNICODE, Glyphs, draw, movement, time_left
from arbor.view.redraw import Redraw

FRAME_S = 0.25  # at most four frames a second
LINE_S = 30.0
# of a show: after each event of a type; a search of 54 blocks takes about eight seconds
PAUSES_S = {"boundary": 0.05, "evict": 0.07, "rehydrate": 0.2, "verify": 0.3, "answer": 0.8}


def progress_line(metrics: Metrics, held_tokens: int, most_blocks: int = 0) -> str:
    """The state of a run as one line of a log.

    Args:
        metrics: so far.
        held_tokens: on the device.
        most_blocks: thoughts that the plan has at most; 0 for unknown.
    """
    left = time_left(metrics, most_blocks)
    return (
        f"{metrics.wall_s:.0f} s, {f'{left}, ' if left else ''}"
        f"{counted(metrics.blocks, 'block')}, {counted(metrics.expansions, 'expansion')}, "
        f"{metrics.tok_per_s:.0f} tok/s, "
        f"KV {held_tokens:,} of {metrics.budget_tokens:,} tokens, "
        f"{metrics.tokens_recomputed:,} recomputed"
    )


class LogView:
    """A listener that writes a line to a log, at most every `LINE_S` seconds.

    Args:
        console: destination.
        clock: seconds.
        most_blocks: thoughts that the plan has at most; 0 for unknown.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        most_blocks: int = 0,
    ) -> None:
        self._console = console
        self._clock = clock
        self._most_blocks = most_blocks
        self._replay = Replay()
        self._start = self._last = clock()

    def __call__(self, event: Event) -> None:
        now = self._clock()
        self._replay.feed(event, now - self._start)
        if now - self._last >= LINE_S and not isinstance(event, Ended):
            self._last = now
            metrics, held = self._replay.metrics(), self._replay.kv.device
            line = progress_line(metrics, held, self._most_blocks)
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
    """A listener that redraws meter and tree, at most every `FRAME_S` seconds; erases them after.

    It draws when an event arrives, without a thread of its own.

    Args:
        console: a terminal.
        clock: seconds.
        most_blocks: thoughts that the plan has at most; 0 for unknown.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        most_blocks: int = 0,
    ) -> None:
        self._console = console
        self._clock = clock
        self._most_blocks = most_blocks
        self._replay = Replay()
        self._start = clock()
        self._last = self._start - FRAME_S
        self._live = Redraw(console)

    def __call__(self, event: Event) -> None:
        now = self._clock()
        self._replay.feed(event, now - self._start)
        if now - self._last >= FRAME_S:
            self._last = now
            self._live.update(self.frame())

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
        """The current state, in characters of the terminal."""
        size = self._console.size
        glyphs = glyphs_of(self._console)
        return draw(self._replay, size.width, size.height, glyphs, self._most_blocks)


class ShowView(LiveView):
    """A `LiveView` slow enough to follow, with the last tokens that left and that came back.

    It waits after each event that changes the tree or the KV, unless the search is slower anyway.

    Args:
        console: a terminal.
        clock: seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(console, clock)
        self._sleep = sleep
        self._due = self._start
        self._left = self._returned = ""

    def __call__(self, event: Event) -> None:
        words = movement(event)
        if isinstance(event, Rehydrated):
            self._returned = words
        elif words:
            self._left = words
        pause = PAUSES_S.get(event.name, 0.0)
        if pause:
            self._last = self._clock() - FRAME_S  # what is waited for is drawn
        super().__call__(event)
        if pause:
            self._due = max(self._clock(), self._due + pause)
            self._sleep(max(0.0, self._due - self._clock()))

    def frame(self) -> Group:
        """The current state, with the last movements of KV below it."""
        size = self._console.size
        moved = [
            Text(words[: size.width], style, no_wrap=True)
            for words, style in ((self._left, "red"), (self._returned, "green"))
        ]
        shown = draw(self._replay, size.width, size.height - len(moved), glyphs_of(self._console))
        return Group(*moved, shown)


def glyphs_of(console: Console) -> Glyphs:
    """The characters that a console can show."""
    try:
        "".join((UNICODE.full, UNICODE.branch, UNICODE.verified)).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE
