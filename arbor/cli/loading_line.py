"""LoadingLine: the stage of reading and loading a model, on one line of stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from arbor.cli.output import Output, encodable
from arbor.support.texts import visible

FIRST_S, LINE_S, FRAME_S = 2.0, 30.0, 0.1


class LoadingLine:
    """A listener of stages: redraws a line on a terminal, writes one now and then elsewhere.

    Args:
        output: of the command, whose form of progress is asked for each time.
        clock: seconds.
    """

    def __init__(self, output: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._stream = sys.stderr  # a live display replaces it, to print whole lines above itself
        self._began: float | None = None
        self._due = 0.0
        self._drawn = ""

    def __call__(self, stage: str) -> None:
        now = self._clock()
        if not stage:
            self._began = None
            self._draw("")
        elif self._output.progress == "live":
            if stage.partition(":")[0] != self._drawn.partition(":")[0] or now >= self._due:
                self._due = now + FRAME_S
                self._draw(stage)
        elif self._output.progress == "plain":
            if self._began is None:
                self._began, self._due = now, now + FIRST_S
            if now >= self._due:
                self._due = now + LINE_S
                self._write(f"arbor: {self._shown(stage)}\n")

    def _draw(self, stage: str) -> None:
        """Puts a stage in the place of the one before."""
        if stage == self._drawn:
            return
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[2K{self._shown(stage)[:width]}")
        self._drawn = stage

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _shown(self, stage: str) -> str:
        return encodable(visible(stage), self._stream)
