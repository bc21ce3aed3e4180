"""``arbor view``: a trace as one HTML page, or as a tree in the terminal."""

from __future__ import annotations

import sys
import webbrowser
from itertools import islice
from pathlib import Path

import click

from arbor.cli.options import TRACE_PATH, Command, option, output_options
from arbor.cli.output import Output
from arbor.cli.output_paths import STDOUT, refuse_nowhere, refuse_overwriting
from arbor.errors import UsageError

SUFFIXES = (".gz", ".jsonl", ".arbor")
PIPED_WIDTH = 120  # columns where stdout is no terminal


@click.command(cls=Command)
@click.argument("traces", nargs=-1, metavar="TRACE [TRACE2]", type=TRACE_PATH)
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    heading="Page",
    help="Where the page goes; '-' is stdout, default the trace's name with .html.",
)
@option("--open", is_flag=True, heading="Page", help="Open it in the browser.")
@option("--term", is_flag=True, heading="Terminal", help="Print the tree instead.")
@option(
    "--event",
    type=click.IntRange(0),
    metavar="N",
    heading="Terminal",
    help="With --term: as it was after the Nth event, from 0.",
)
@output_options
@click.pass_obj
def view(
    voice: Output,
    traces: tuple[Path, ...],
    output: Path | None,
    open: bool,
    term: bool,
    event: int | None,
) -> int:
    """See a trace: one HTML page that needs no server and no network, or a tree in the terminal.

    \b
      arbor view run.arbor.jsonl --open
      arbor view full.arbor.jsonl.gz tenth.arbor.jsonl.gz -o compared.html
      arbor view run.arbor.jsonl --term
    """
    if not 1 <= len(traces) <= 2:
        raise UsageError(
            "view-count",
            f"a page shows one trace or compares two, not {len(traces)}.",
            "arbor view TRACE [TRACE2]",
        )
    if term:
        if len(traces) > 1 or output is not None or open or voice.json:
            raise UsageError(
                "usage",
                "--term prints one trace and takes no -o, --open or --json.",
                f"arbor view {traces[0]} --term",
            )
        return print_tree(voice, traces[0], event)
    if event is not None:
        raise UsageError("usage", "--event belongs to --term.", "A page shows every event.")
    return make_page(voice, traces, output, open)


def make_page(voice: Output, traces: tuple[Path, ...], output: Path | None, show: bool) -> int:
    """Writes the page and says where it is."""
    from arbor.view import html_page, read_page_trace, write_page

    if output is not None and output != STDOUT:
        refuse_overwriting({"-o": output}, traces)
        refuse_nowhere("-o", output)
    recordings = [read_page_trace(path) for path in traces]
    for path, recording in zip(traces, recordings, strict=True):
        if recording.banner:
            voice.warn(f"warning: {path}: {recording.banner}")
    if output == STDOUT:
        if voice.json or show:
            raise UsageError("usage", "-o - is the page itself.", "Name a file: -o page.html.")
        sys.stdout.write(html_page(*recordings))
        return 0
    page = write_page(page_path(traces) if output is None else output, *recordings)
    blocks = [recording.count("node") for recording in recordings]
    if voice.json:
        voice.document(
            {
                "schema": "arbor.view/1",
                "path": str(page),
                "bytes": page.stat().st_size,
                "traces": [
                    {
                        "path": str(path),
                        "events": len(recording.records),
                        "nodes": nodes,
                        "banner": recording.banner,
                    }
                    for path, recording, nodes in zip(traces, recordings, blocks, strict=True)
                ],
            }
        )
    else:
        voice.print(str(page))
        for path, nodes in zip(traces, blocks, strict=True):
            voice.say(f"{path}: {max(0, nodes - 1):,} blocks")
    if show:
        open_page(voice, page)
    return 0


def page_path(traces: tuple[Path, ...]) -> Path:
    """Beside the first trace: ``run.arbor.jsonl.gz`` gives ``run.html``, two give ``a-b.html``."""
    return traces[0].with_name(f"{'-'.join(stem(path) for path in traces)}.html")


def stem(path: Path) -> str:
    """A trace's name without what says that it is a trace."""
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name or path.name


def open_page(voice: Output, page: Path) -> None:
    """Opens a page in the browser, if there is one."""
    if not webbrowser.open(page.resolve().as_uri()):
        voice.warn(f"no browser answers; open {page} in one")


def print_tree(voice: Output, path: Path, event: int | None) -> int:
    """The tree with what each block holds, at the end or after an event."""
    from rich.text import Text

    from arbor.trace import Replay, read_trace
    from arbor.view.draw import NARROW, meter_lines, tree_lines
    from arbor.view.live import glyphs_of

    trace = read_trace(path)
    if trace.banner:
        voice.warn(f"warning: {path}: {trace.banner}")
    replay = Replay()
    last = len(trace.events) - 1
    for _ in islice(replay.steps(trace), last + 1 if event is None else event + 1):
        pass
    console = voice.console(sys.stdout)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = PIPED_WIDTH
    glyphs = glyphs_of(console)
    at = min(last, last if event is None else event)
    where = f"event {at:,} of {last:,}, {trace.events[at].name}"
    if replay.header is not None:
        problem = "".join(c if c.isprintable() else " " for c in replay.header.problem)
        where = f"{problem}  ({where})"
    title = (
        where if console.encoding.startswith("utf") else where.encode("ascii", "replace").decode()
    )
    lines = [Text(title, "bold"), *meter_lines(replay, replay.metrics(), glyphs, console.width)]
    if console.width >= NARROW:
        lines += tree_lines(replay, glyphs, console.width, rows=len(replay.blocks) + 1)
    else:
        voice.warn(
            f"the tree needs {NARROW} columns, and here are {console.width}: COLUMNS={NARROW}"
        )
    for line in lines:
        line.truncate(console.width, overflow="crop")
        console.print(line, soft_wrap=True)
    return 0
