"""Output of the command: stdout, stderr and the log."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO

import click

from arbor.errors import UsageError
from arbor.support.texts import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LOG_SETTINGS = ("quiet", "verbose", "log_file")


@dataclass
class Output:
    """The settings every command shares.

    Attributes:
        quiet: only results and errors.
        verbose: number of ``-v``.
        json: one JSON document on stdout instead of text.
        debug: tracebacks with errors.
        color, display, log_file: as on the command line.
    """

    quiet: bool = False
    verbose: int = 0
    json: bool = False
    debug: bool = False
    color: Literal["auto", "always", "never"] = "auto"
    display: Literal["auto", "live", "plain", "none"] = "auto"
    log_file: Path | None = None

    @property
    def detailed(self) -> bool:
        """Whether to print figures about a run: on a terminal, or on request."""
        if self.quiet or self.display == "none":
            return False
        asked = self.display in ("live", "plain") or self.verbose > 0
        return asked or sys.stderr.isatty()

    @property
    def progress(self) -> Literal["live", "plain", "none"]:
        """The form of the progress display."""
        if self.quiet or self.display == "none":
            return "none"
        if self.display != "auto":
            return self.display
        dumb = os.environ.get("TERM") in ("dumb", "unknown")
        return "live" if sys.stderr.isatty() and not dumb else "plain"

    def console(self, stream: IO[str] | None = None) -> Console:
        """A rich console on `stream`; stderr by default."""
        from rich.console import Console  # takes too long to import for --version

        class PipedConsole(Console):
            """Raises the error of a closed pipe instead of ending the process."""

            def on_broken_pipe(self) -> None:
                raise

        settings: dict[str, Any] = {
            "file": stream or sys.stderr,
            "highlight": False,
            "emoji": False,
        }
        if self.color == "always":
            settings["force_terminal"] = True
        elif self.color == "never":
            settings["color_system"] = None
        return PipedConsole(**settings)

    def say(self, text: str) -> None:
        """Prints a line on stderr if `detailed`."""
        if self.detailed:
            shown = encodable(visible(text), sys.stderr)
            console = self.console()
            wrapped = console.is_terminal  # at words; a pipe gets one line
            console.print(shown, soft_wrap=not wrapped, style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Prints a warning on stderr unless `quiet`."""
        if not self.quiet:
            print(encodable(f"arbor: {visible(text)}", sys.stderr), file=sys.stderr)

    def print(self, text: str) -> None:
        """Prints a line of the result on stdout; what a terminal would obey is escaped."""
        click.echo(encodable(visible(text), sys.stdout))

    def document(self, data: Any) -> None:
        """Prints the JSON document of ``--json``, in ASCII, which every stream can encode."""
        from arbor.trace.write import finite

        indent = 2 if sys.stdout.isatty() else None
        click.echo(json.dumps(finite(data), allow_nan=False, indent=indent, default=str))

    def open(self, page: Path) -> None:
        """Opens a page in the browser."""
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            self.warn(f"could not open a browser; the page is {page}")

    def table(self, table: Table) -> None:
        """Prints a table on stdout, 200 columns wide where that is not a terminal."""
        console = self.console(sys.stdout)
        if not console.is_terminal:
            console.width = 200
        console.print(table)


class ClosedStdout(io.TextIOBase):
    """In the place of a stdout that the shell has closed: a result is refused, not lost."""

    encoding = "utf-8"

    def writable(self) -> bool:
        """As a stream that is written to."""
        return True

    def write(self, text: str) -> int:
        """Refuses a text."""
        raise UsageError(
            "output-unwritable",
            "stdout is closed (>&-), and the result would be lost.",
            "Name a file, as in > answer.txt, or /dev/null.",
        )


class Messages(io.TextIOBase):
    """stderr, of which what cannot be written is lost: no message ends a command.

    Args:
        stream: that is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return self._stream.encoding

    def writable(self) -> bool:
        """As a stream that is written to."""
        return True

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes a text, or loses it."""
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or loses it."""
        with self._losing():
            self._stream.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # Python would try again at exit, and end with code 120
            discard(self._stream)


def discard(stream: IO[str]) -> None:
    """Let what a stream has not written, and all that follows, go to the null device."""
    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def encodable(text: str, stream: IO[str]) -> str:
    """The text, with ASCII separators where the stream's encoding lacks its own."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.replace(" · ", " | ").replace("…", "...")
    return text


class LogHandler(logging.Handler):
    """Prints arbor's log on stderr, one line per record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        with contextlib.suppress(OSError, ValueError):
            line = f"arbor: {record.levelname.lower()}: {visible(record.getMessage())}"
            print(line, file=sys.stderr)


class LogFile(logging.FileHandler):
    """Appends arbor's log to a file, one JSON object per line; a full disk stops it."""

    stopped = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        if not self.stopped:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warns that the log stops where the file cannot be written; the command goes on."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.stopped = True
        what = f"{self.baseFilename}: the log stopped ({error.strerror}); the command goes on."
        with contextlib.suppress(OSError, ValueError):
            print(f"arbor: warning: [no-space] {visible(what)}", file=sys.stderr)

    def close(self) -> None:
        """Closes the file; what a full disk refused is lost."""
        with contextlib.suppress(OSError):
            super().close()

    def format(self, record: logging.LogRecord) -> str:
        """A record as JSON, with its traceback if any."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["traceback"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(row)


def configure_log(output: Output) -> None:
    """Sets the level of the log on stderr, and opens the log file.

    Raises:
        UsageError: the file cannot be written.
    """
    logger = logging.getLogger("arbor")
    logger.setLevel(logging.DEBUG)
    shown = next((each for each in logger.handlers if isinstance(each, LogHandler)), None)
    if shown is None:
        shown = LogHandler()
        logger.addHandler(shown)
    level = "error" if output.quiet else ("warning", "info", "debug")[min(output.verbose, 2)]
    shown.setLevel(level.upper())
    if output.log_file is None or any(isinstance(each, LogFile) for each in logger.handlers):
        return
    try:
        logger.addHandler(LogFile(output.log_file, encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            "log-unwritable",
            f"--log-file {output.log_file} cannot be written: {error.strerror}.",
            "Name a file in an existing, writable folder.",
            path=str(output.log_file),
        ) from error


def close_log() -> None:
    """Closes the log file."""
    logger = logging.getLogger("arbor")
    for handler in [each for each in logger.handlers if isinstance(each, LogFile)]:
        logger.removeHandler(handler)
        handler.close()


FIRST_S, LINE_S, FRAME_S = 2.0, 30.0, 0.1


class LoadingLine:
    """A listener of stages: redraws a line on a terminal, writes one now and then elsewhere."""

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
