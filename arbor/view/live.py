"""Live views of a run: a redrawn meter on a terminal, or occasional lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from arbor.events import Event, Rehydrated
from arbor.metrics import Metrics
from arbor.support.texts import counted
from arbor.trace.fold import Replay
from arbor.view.draw import ASCII, UNICODE, Glyphs, draw, movement, time_left


class Redraw:
    """Draws in the place of what it drew before, and erases itself in the end.

    A terminal that becomes narrower breaks the lines on it into more rows, and rich erases only as
    many as it wrote: the rows above them are erased here.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = self._new()
        self._size = console.size

    def start(self) -> None:
        """Begins the display."""
        self._size = self._console.size
        self._live.start()

    def update(self, drawing: RenderableType) -> None:
        """Draws."""
        if self._console.size != self._size:
            self.stop()
            self._live = self._new()
            self.start()
        self._live.update(drawing, refresh=True)

    def stop(self) -> None:
        """Erases what was drawn."""
        if not self._live.is_started:
            return
        more = _more_rows(self._console, self._live.get_renderable(), self._size)
        self._live.update("")  # rich draws once more, which would scroll what stands above
        self._live.stop()
        if more:
            up = (ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)
            self._console.control(Control(*up * more))

    def _new(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True)


def _more_rows(console: Console, drawing: RenderableType, before: ConsoleDimensions) -> int:
    """Rows that a drawing takes beyond its lines, where the terminal is narrower than before."""
    now = console.size
    if now.width >= before.width:
        return 0
    options = console.options.update(width=before.width, height=None)
    lines = console.render_lines(drawing, options, pad=False)
    widths = [Segment.get_line_length(line) for line in lines]
    rows = sum(max(1, -(-width // now.width)) for width in widths)
    return max(0, min(rows, now.height) - len(lines))


FRAME_S = 0.25  # at most four frames a second
LINE_S = 30.0
# of a show: after each event of a type; a search of 54 blocks takes about eight seconds
PAUSES_S = {"boundary": 0.05, "evict": 0.07, "rehydrate": 0.2, "verify": 0.3, "answer": 0.8}


def progress_line(metrics: Metrics, held_tokens: int, most_blocks: int = 0) -> str:
    """The state of a run as one line of a log."""
    left = time_left(metrics, most_blocks)
    return (
        f"{metrics.wall_s:.0f} s, {f'{left}, ' if left else ''}"
        f"{counted(metrics.blocks, 'block')}, {counted(metrics.expansions, 'expansion')}, "
        f"{metrics.tok_per_s:.0f} tok/s, "
        f"KV {held_tokens:,} of {metrics.budget_tokens:,} tokens, "
        f"{metrics.tokens_recomputed:,} recomputed"
    )


class LogView:
    """A listener that writes a line to a log, at most every `LINE_S` seconds."""

    every_s = LINE_S

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
        if now - self._last >= self.every_s:
            self._last = now
            self.show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self) -> None:
        """Writes a line, until the run has ended."""
        if not self._replay.ended:
            metrics, held = self._replay.metrics(), self._replay.kv.device
            line = progress_line(metrics, held, self._most_blocks)
            self._console.print(f"arbor: {line}", soft_wrap=True, highlight=False, markup=False)


class LiveView(LogView):
    """A listener that redraws meter and tree, at most every `FRAME_S` seconds; erases them after.

    It draws when an event arrives, without a thread of its own; its console is a terminal.
    """

    every_s = FRAME_S

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        most_blocks: int = 0,
    ) -> None:
        super().__init__(console, clock, most_blocks)
        self._last -= FRAME_S
        self._live = Redraw(console)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Draws."""
        self._live.update(self.frame())

    def frame(self) -> Group:
        """The current state, in characters of the terminal."""
        size = self._console.size
        glyphs = glyphs_of(self._console)
        return draw(self._replay, size.width, size.height, glyphs, self._most_blocks)


class ShowView(LiveView):
    """A `LiveView` slow enough to follow, with the last tokens that left and that came back.

    It waits after each event that changes the tree or the KV, unless the search is slower anyway.
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
