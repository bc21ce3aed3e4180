"""Redraw: a live display that leaves no row behind when its terminal becomes narrower."""

from __future__ import annotations

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment


class Redraw:
    """Draws in the place of what it drew before, and erases itself in the end.

    A terminal that becomes narrower breaks the lines on it into more rows, and rich erases only as
    many as it wrote: the rows above them are erased here.

    Args:
        console: a terminal.
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
