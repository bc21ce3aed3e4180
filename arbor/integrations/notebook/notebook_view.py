"""NotebookView: the progress of searches below the cell of a notebook that runs them."""

from __future__ import annotations

import io
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from arbor.errors import UsageError
from arbor.events import Ended, Event, Header
from arbor.trace.fold import Replay
from arbor.view.draw import draw
from arbor.view.live import FRAME_S, progress_line

COLUMNS, LINES = 100, 24
# of a drawing as HTML; rich escapes the text
FRAME = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    'font-family:ui-monospace,Menlo,monospace">{code}</pre>'
)


class NotebookView:
    """A listener that redraws a search below the cell of a notebook, at most every `FRAME_S`.

        solver = Solver(listeners=[NotebookView()])
        solver.solve("4 5 6 10")

    One search is drawn as on a terminal, with meter and tree, and leaves a line; several at a time
    are counted. It is text drawn by rich, without scripts and without widgets.

    Args:
        show: shows HTML, and when called again replaces it; by default IPython's display.
        clock: seconds.

    Raises:
        UsageError: this is not a notebook, and `show` is not given.
    """

    def __init__(
        self,
        show: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._given = show
        if show is None:
            _display()  # refuses early
        self._clock = clock
        self._show: Callable[[str], None] | None = None
        self._running = self._finished = 0
        self._several = False
        self._replay = Replay()
        self._start = self._last = 0.0  # seconds

    def __call__(self, event: Event) -> None:
        """Takes an event of any search."""
        now = self._clock()
        if isinstance(event, Header):
            self._begin(now)
        elif self._show is None:
            return
        if not self._several:
            self._replay.feed(event, now - self._start)
        if isinstance(event, Ended):
            self._running -= 1
            self._finished += 1
        over = self._running == 0
        if over or now - self._last >= FRAME_S:
            self._last = now
            assert self._show is not None, "a header begins it"
            self._show(_html(self._line() if over else self._frame()))
        if over:
            self._show = None

    def _begin(self, now: float) -> None:
        self._running += 1
        self._several = self._running > 1
        if self._show is None:
            self._show = self._given or _display()
            self._replay, self._finished = Replay(), 0
            self._start, self._last = now, now - FRAME_S

    def _frame(self) -> RenderableType:
        """The state of what is in progress."""
        return self._line() if self._several else draw(self._replay, COLUMNS, LINES)

    def _line(self) -> Text:
        """The same as one line."""
        seconds = self._clock() - self._start
        if self._several or self._finished > 1:
            words = f"{seconds:.0f} s, {self._finished:,} searches finished"
            return Text(f"{words}, {self._running:,} in progress" if self._running else words)
        return Text(progress_line(self._replay.metrics(), self._replay.kv.device))


def _html(drawing: RenderableType) -> str:
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_jupyter=False)
    console.print(drawing)
    return console.export_html(inline_styles=True, code_format=FRAME)


def _display() -> Callable[[str], None]:
    """Shows HTML below the cell that runs, and replaces it.

    Raises:
        UsageError: this is not a notebook.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        raise UsageError(
            "notebook",
            "this is not a notebook.",
            "On a terminal, 'arbor solve' shows a search while it runs.",
        )
    place, shown = f"arbor-{uuid.uuid4().hex}", False

    def show(text: str) -> None:
        nonlocal shown
        put = ipython.display.update_display if shown else ipython.display.display
        put({"text/html": text}, raw=True, display_id=place)
        shown = True

    return show
