"""``arbor view``: a trace as one HTML page, or as a tree in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from arbor.cli.command import Command
from arbor.cli.options import TRACE_PATH, output_options
from arbor.cli.output import Output
from arbor.cli.output_paths import STDOUT, refuse_overwriting, refuse_unwritable
from arbor.cli.record_options import options_of, read_options
from arbor.errors import UsageError
from arbor.support.setting import setting

SUFFIXES = (".gz", ".jsonl", ".arbor")
PAGE = "index.html"  # of an evaluation's folder
TRACE_GLOB = ".arbor.jsonl*"
PIPED_WIDTH = 120  # columns where stdout is not a terminal


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Options of ``arbor view``, named as on the command line."""

    HEADING = "Page"

    traces: tuple[Path, ...]
    output: Path | None = setting(
        None,
        "The page; '-' is stdout, the default the trace's name with .html.",
        shown="short",
        also=("-o",),
    )
    open: bool = setting(False, "Open the page in the browser.", shown="short")
    samples: bool = setting(
        False,
        "Of an evaluation's folder: a page of each sample too, linked from the list.",
        shown="short",
    )
    term: bool = setting(False, "Print the tree instead.", heading="Terminal", shown="short")
    event: int | None = setting(
        None,
        "With --term: the tree after the Nth event, from 0.",
        heading="Terminal",
        shown="short",
        least=0,
    )


@click.command(cls=Command)
@click.argument("traces", nargs=-1, metavar="TRACE [TRACE2]", type=TRACE_PATH)
@options_of(ViewOptions)
@output_options
@click.pass_obj
def view(output: Output, /, **values: Any) -> int:
    """Show a trace as one HTML page, without server or network, or as a tree in the terminal.

    A folder of `arbor eval` or `arbor compare` is shown by its page.

    \b
      arbor view run.arbor.jsonl --open
      arbor view run.arbor.jsonl --term
      arbor view runs/baseline --samples --open
    """
    options = read_options(ViewOptions, values)
    traces = options.traces
    if not 1 <= len(traces) <= 2:
        raise UsageError(
            "view-count",
            f"a page shows one trace or two, not {len(traces)}.",
            "arbor view TRACE [TRACE2]",
        )
    folder = next((path for path in traces if path.is_dir()), None)
    if folder is not None:
        return show_folder(output, folder, options)
    if options.samples:
        raise UsageError(
            "usage", "--samples belongs to a folder of 'arbor eval'.", "arbor view runs/x --samples"
        )
    if options.term:
        if len(traces) > 1 or options.output is not None or options.open or output.json:
            raise UsageError(
                "usage",
                "--term prints one trace and takes no -o, --open or --json.",
                f"arbor view {traces[0]} --term",
            )
        return print_tree(output, traces[0], options.event)
    if options.event is not None:
        raise UsageError("usage", "--event belongs to --term.", "A page shows every event.")
    return make_page(output, traces, options.output, options.open)


def show_folder(output: Output, folder: Path, options: ViewOptions) -> int:
    """Prints the page of an evaluation's folder; with ``--open``, opens it.

    Raises:
        UsageError: the folder has no page, or more than its page is asked for.
    """
    page = folder / PAGE
    found = islice(folder.glob(f"*{TRACE_GLOB}"), 1), islice(folder.glob(f"*/*{TRACE_GLOB}"), 1)
    trace = next(chain(*found), None)
    alone = len(options.traces) == 1 and options.output is None and not options.term
    if not alone or not (page.is_file() or options.samples):
        raise UsageError(
            "usage",
            f"{folder} is a folder, not a trace.",
            f"arbor view {folder / 'NAME.arbor.jsonl' if trace is None else trace}",
            path=str(folder),
        )
    if options.samples:
        from arbor.cli.evaluation.compare_report import RESULTS, write_comparison_samples
        from arbor.cli.evaluation.eval_report import write_samples

        compared = (folder / RESULTS).is_file()
        for sentence in (write_comparison_samples if compared else write_samples)(folder):
            output.warn(f"warning: {sentence}")
    if output.json:
        size = page.stat().st_size
        output.document({"schema": "arbor.view/1", "path": str(page), "bytes": size, "traces": []})
    else:
        output.print(str(page))
        if trace is not None:
            output.say(f"the samples of an evaluation; one of its searches: arbor view {trace}")
            if not options.samples:
                output.say(f"all of its searches as pages: arbor view {folder} --samples")
    if options.open:
        output.open(page)
    return 0


def make_page(output: Output, traces: tuple[Path, ...], path: Path | None, show: bool) -> int:
    """Writes the page to `path`, or next to the first trace; with `show`, opens it."""
    from arbor.view import html_page, read_page_trace, write_page

    if path is not None and path != STDOUT:
        refuse_overwriting({"-o": path}, traces)
        refuse_unwritable("-o", path)
    recordings = [read_page_trace(trace) for trace in traces]
    for trace, recording in zip(traces, recordings, strict=True):
        if recording.banner:
            output.warn(f"warning: {trace}: {recording.banner}")
    if path == STDOUT:
        if output.json or show:
            raise UsageError("usage", "-o - is the page itself.", "Name a file: -o page.html.")
        sys.stdout.write(html_page(*recordings))
        return 0
    page = write_page(page_path(traces) if path is None else path, *recordings)
    blocks = [recording.count("node") for recording in recordings]
    if output.json:
        output.document(
            {
                "schema": "arbor.view/1",
                "path": str(page),
                "bytes": page.stat().st_size,
                "traces": [
                    {
                        "path": str(trace),
                        "events": len(recording.records),
                        "nodes": nodes,
                        "banner": recording.banner,
                    }
                    for trace, recording, nodes in zip(traces, recordings, blocks, strict=True)
                ],
            }
        )
    else:
        output.print(str(page))
        for trace, nodes in zip(traces, blocks, strict=True):
            output.say(f"{trace}: {max(0, nodes - 1):,} blocks")
    if show:
        output.open(page)
    return 0


def page_path(traces: tuple[Path, ...]) -> Path:
    """The default page, next to the first trace: ``run.html`` for one, ``a-b.html`` for two."""
    return traces[0].with_name(f"{'-'.join(stem(path) for path in traces)}.html")


def stem(path: Path) -> str:
    """A trace's name without its suffixes."""
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name or path.name


def print_tree(output: Output, path: Path, event: int | None) -> int:
    """Prints the tree and what each block holds, at the end or after an event."""
    from rich.text import Text

    from arbor.trace import Replay, read_trace
    from arbor.view.draw import NARROW, meter_lines, plain, tree_lines
    from arbor.view.live import glyphs_of

    trace = read_trace(path)
    if trace.banner:
        output.warn(f"warning: {path}: {trace.banner}")
    replay = Replay()
    last = len(trace.events) - 1
    for _ in islice(replay.steps(trace), last + 1 if event is None else event + 1):
        pass
    console = output.console(sys.stdout)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = PIPED_WIDTH
    glyphs = glyphs_of(console)
    at = min(last, last if event is None else event)
    where = f"event {at:,} of {last:,}, {trace.events[at].name}"
    if replay.header is not None:
        problem = replay.header.problem if trace.words else "(left out)"
        where = f"{plain(problem, glyphs)}  ({where})"
    lines = [Text(where, "bold"), *meter_lines(replay, replay.metrics(), glyphs, console.width)]
    if console.width >= NARROW:
        lines += tree_lines(replay, glyphs, console.width, rows=len(replay.blocks) + 1)
    else:
        output.warn(
            f"the tree needs {NARROW} columns; this terminal has {console.width}. Try COLUMNS={NARROW}"
        )
    for line in lines:
        line.truncate(console.width, overflow="crop")
        console.print(line, soft_wrap=True)
    return 0
