"""``arbor trace``: inspect, check, compare, convert and repair traces."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from arbor.cli.command import Command, Group, WholeNumber, option
from arbor.cli.options import EXIT_GATE, TRACE_PATH, output_options
from arbor.cli.output import Output
from arbor.cli.output_paths import STDOUT, refuse_overwriting, refuse_unwritable
from arbor.cli.record_options import options_of, read_options
from arbor.cli.solve import numbers_line
from arbor.errors import TraceError, UsageError
from arbor.events import EVENTS, Event
from arbor.registry import PARTS, part
from arbor.run.config import config_text
from arbor.support.atomic_write import write_atomically
from arbor.support.setting import setting
from arbor.support.texts import clipped, one_line
from arbor.trace import Replay, Trace, read_trace
from arbor.trace.diff import TraceDiff, diff_traces
from arbor.trace.records import trace_schema
from arbor.trace.repair import repair_trace
from arbor.trace.write import to_record, without_words

SHOWN_CHARACTERS = 60
SETTING_CHARACTERS = 200  # of a setting that differs
LEFT_OUT = "(left out)"  # in place of words that a trace was written without

_file = click.argument("file", type=TRACE_PATH)


class Format(click.Choice[str]):
    """A format of another tool; an unknown one is refused when a trace is converted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Its name."""
        return str(value)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``arbor trace convert``, named as on the command line."""

    HEADING = "Conversion"

    file: Path
    format: str = setting(
        "perfetto",
        "A timeline, or spans of OpenTelemetry.",
        shown="short",
        kind=Format(PARTS["format"]),
    )
    output: Path | None = setting(
        None, "The file; default: stdout.", shown="short", metavar="PATH", also=("-o",)
    )


@dataclass(frozen=True, kw_only=True)
class RepairOptions:
    """Options of ``arbor trace repair``, named as on the command line."""

    HEADING = "Repair"

    file: Path
    output: Path | None = setting(
        None,
        "The copy; default: NAME.repaired.arbor.jsonl in the folder of the trace.",
        shown="short",
        metavar="PATH",
        also=("-o",),
    )
    trace_text: Literal["full", "none"] = setting(
        "full", "none omits all words: of problem, thoughts, answer and settings.", shown="short"
    )


@click.group(cls=Group)
@output_options
def trace() -> None:
    """Inspect, check, compare, convert and repair traces.

    \b
      arbor trace info run.arbor.jsonl
      arbor trace check run.arbor.jsonl
      arbor trace events run.arbor.jsonl --type evict --type rehydrate
      arbor trace convert run.arbor.jsonl --output run.perfetto.json
      arbor trace config run.arbor.jsonl > my.toml && arbor solve --config my.toml
    """


@trace.command(cls=Command)
@_file
@output_options
@click.pass_obj
def info(output: Output, file: Path) -> int:
    """Show the settings, result and cost of a run.

    \b
      arbor trace info run.arbor.jsonl
      arbor trace info run.arbor.jsonl.gz --json
      arbor trace info run.arbor.jsonl --json | jq .metrics.peak_tokens
    """
    read = read_trace(file)
    replay = Replay.of(read)
    header, metrics = read.header, replay.metrics()
    answer = replay.answered
    status = replay.ended.status if replay.ended else "cut off"
    if output.json:
        output.document(
            {
                "schema": "arbor.trace-info/1",
                "path": str(file),
                "header": None if header is None else _record(read, header),
                "status": status,
                "limit": replay.ended.limit if replay.ended else None,
                "answer": None if answer is None else _record(read, answer),
                "events": len(read.events),
                "unknown_events": read.unknown,
                "bad_lines": read.bad_lines,
                "complete": not read.banner,
                "metrics": metrics.to_dict(),
            }
        )
        return 0
    warn_if_damaged(output, read)
    if header is not None:
        problem = header.problem if read.words else LEFT_OUT
        output.print(
            f"problem   {one_line(problem)}  ({one_line(header.task)}, seed {header.seed})"
        )
        output.print(f"model     {one_line(str(header.model.get('id', '?')))}")
        names = (f"{part} {_name(header.config.get(part))}" for part in ("controller", "verifier"))
        budget = one_line(str(header.config.get("budget", "?")))
        output.print(f"search    {', '.join(names)}, budget {budget}")
        output.print(
            f"run       {one_line(f'{header.run}, {header.created}, arbor {header.arbor}')}"
        )
    if answer is not None:
        path = " > ".join(map(str, answer.path))
        text = answer.text if read.words or answer.node is None else LEFT_OUT
        shown = "(no answer)" if text is None else one_line(text)
        score = "not judged" if answer.score is None else f"score {answer.score:.3f}"
        output.print(f"answer    {shown}  ({score}, path {path})")
    ended = (replay.ended and replay.ended.limit) or status
    output.print(f"end       {numbers_line(ended, metrics, answer.correct if answer else None)}")
    output.print(f"events    {len(read.events):,}")
    return 0


def _record(read: Trace, event: Event) -> dict[str, Any]:
    """An event as in its trace: without the fields that were left out of it."""
    return to_record(event) if read.words else without_words(to_record(event))


def _name(spec: Any) -> str:
    """The name of a component in a header; ``?`` where there is none."""
    name = spec.get("name") if isinstance(spec, dict) else spec
    return "?" if name is None else one_line(str(name))


@trace.command(cls=Command)
@_file
@output_options
@click.pass_obj
def check(output: Output, file: Path) -> int:
    """Check that a trace is complete and consistent; exit code 7 if not.

    \b
      arbor trace check run.arbor.jsonl
      arbor trace check run.arbor.jsonl --json
      arbor trace check run.arbor.jsonl && echo consistent

    Checked: every line is an event and none is missing, time does not decrease, parents exist, the
    tokens in memory add up after every event and stay within the budget, and the counters of the
    end equal those of the events. The trace of an interrupted run is complete if it has an end.
    """
    status: str | None = None
    try:
        read = read_trace(file)
    except TraceError as error:
        if error.code != "trace-corrupt":
            raise
        problems, events, blocks = [error.message], 0, 0
    else:
        replay = Replay.of(read)
        problems, events, blocks = replay.problems, len(read.events), len(replay.blocks)
        status = replay.ended.status if replay.ended else None
    if output.json:
        output.document(
            {
                "schema": "arbor.trace-check/1",
                "path": str(file),
                "ok": not problems,
                "status": status,
                "events": events,
                "blocks": blocks,
                "problems": problems,
            }
        )
    else:
        for problem in problems:
            output.print(f"{file}: {problem}")
        if not problems:
            ended = f"{status}, {events:,} events, {blocks:,} blocks"
            output.print(f"{file}: {ended}, consistent")
    return EXIT_GATE if problems else 0


@trace.command(cls=Command)
@_file
@option(
    "--type",
    multiple=True,
    type=click.Choice([kind.name for kind in EVENTS]),
    metavar="NAME",
    heading="Selection",
    common=True,
    help="Only events of this type, as in evict; may be repeated.",
)
@option(
    "--limit",
    type=WholeNumber(1),
    metavar="N",
    heading="Selection",
    common=True,
    help="Only the first N.",
)
@output_options
@click.pass_obj
def events(output: Output, file: Path, type: tuple[str, ...], limit: int | None) -> int:
    """Print the events, one per line.

    \b
      arbor trace events run.arbor.jsonl
      arbor trace events run.arbor.jsonl --type evict --type rehydrate
      arbor trace events run.arbor.jsonl --limit 10 --json
    """
    read = read_trace(file)
    rows = [
        (number, seconds, event)
        for number, seconds, event in zip(read.sequence, read.times, read.events, strict=True)
        if not type or event.name in type
    ][:limit]
    if output.json:
        output.document(
            {
                "schema": "arbor.trace-events/1",
                "path": str(file),
                "events": [{"i": i, "t": t, **_record(read, event)} for i, t, event in rows],
            }
        )
        return 0
    warn_if_damaged(output, read)
    for number, seconds, event in rows:
        record = _record(read, event)
        del record["e"]
        facts = " ".join(f"{name}={_short(value)}" for name, value in record.items())
        output.print(f"{number:>6} {seconds:>10.6f} {event.name:<11}{facts}")
    return 0


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


@trace.command(cls=Command)
@_file
@options_of(ConvertOptions)
@output_options
@click.pass_obj
def convert(output: Output, /, **values: Any) -> int:
    """Convert a trace for other tools: a timeline, or spans.

    perfetto is Trace Event JSON, for ui.perfetto.dev and chrome://tracing; otlp is the JSON of
    OpenTelemetry's protocol with the attributes of OpenInference, for collectors.

    \b
      arbor trace convert run.arbor.jsonl --output run.perfetto.json
      arbor trace convert run.arbor.jsonl | gzip > run.perfetto.json.gz
      arbor trace convert run.arbor.jsonl --format otlp -o run.otlp.json
    """
    options = read_options(ConvertOptions, values)
    path = None if options.output == STDOUT else options.output
    refuse_overwriting({"--output": path}, [options.file])
    refuse_unwritable("--output", path)
    converted = part("format", options.format)(refuse_damaged(read := read_trace(options.file)))
    document = json.dumps(converted, allow_nan=False, separators=(",", ":"), default=str)
    if path is None:
        output.print(document)
        return 0
    write_atomically(path, document + "\n")
    if output.json:
        facts = {"path": str(path), "events": len(read.events)}
        output.document({"schema": "arbor.trace-convert/1", **facts})
    else:
        output.print(f"{path}: {len(read.events):,} events")
    return 0


@trace.command(cls=Command)
@click.argument("first", type=TRACE_PATH)
@click.argument("second", type=TRACE_PATH)
@option(
    "--exit-code",
    is_flag=True,
    heading="Gate",
    common=True,
    help="Exit with 7 if the trees differ.",
)
@output_options
@click.pass_obj
def diff(output: Output, first: Path, second: Path, exit_code: bool) -> int:
    """Compare two runs: settings, blocks, first differing event, cost.

    \b
      arbor trace diff full.arbor.jsonl small.arbor.jsonl
      arbor trace diff full.arbor.jsonl small.arbor.jsonl --exit-code
      arbor trace diff a.arbor.jsonl b.arbor.jsonl --json
    """
    traces = refuse_damaged(read_trace(first)), refuse_damaged(read_trace(second))
    for read in traces:
        warn_if_damaged(output, read)
    found = diff_traces(*traces)
    if output.json:
        facts = dataclasses.asdict(found) | {"same_events": found.parting is None}
        output.document({"schema": "arbor.trace-diff/1", **facts})
    else:
        print_diff(output, found, (first, second))
    return EXIT_GATE if exit_code and not found.same_tree else 0


@trace.command(cls=Command)
@_file
@options_of(RepairOptions)
@output_options
@click.pass_obj
def repair(output: Output, /, **values: Any) -> int:
    """Copy the readable lines of a damaged trace, and add an end if it has none.

    \b
      arbor trace repair run.arbor.jsonl
      arbor trace repair run.arbor.jsonl --output clean.arbor.jsonl.gz
      arbor trace repair run.arbor.jsonl --trace-text none -o public.arbor.jsonl

    Missing events stay missing: 'arbor trace check' still reports the gap. The damaged trace is not
    changed.
    """
    options = read_options(RepairOptions, values)
    if options.output == STDOUT:
        raise UsageError(
            "usage",
            "a repaired trace cannot go to stdout.",
            "Name a file: --output clean.arbor.jsonl",
        )
    refuse_unwritable("--output", options.output)
    done = repair_trace(options.file, options.output, options.trace_text)
    if output.json:
        facts = {**dataclasses.asdict(done), "path": str(done.path)}
        output.document({"schema": "arbor.trace-repair/1", **facts})
    else:
        end = "end added" if done.ended else "already had an end"
        output.print(
            f"{done.path}: {done.kept:,} lines kept, {done.dropped:,} unreadable, "
            f"{done.lost:,} events missing, {end}"
        )
    return 0


@trace.command(cls=Command)
@output_options
@click.pass_obj
def schema(output: Output) -> int:
    """Print the JSON Schema of a trace's lines.

    \b
      arbor trace schema
      arbor trace schema > arbor.trace.records.json
      arbor trace schema | jq '."$defs".evict'
    """
    output.print(json.dumps(trace_schema(), indent=2, ensure_ascii=False))
    return 0


@trace.command(cls=Command)
@_file
@output_options
@click.pass_obj
def config(output: Output, file: Path) -> int:
    """Print the configuration that repeats a run, for 'arbor solve --config'.

    \b
      arbor trace config run.arbor.jsonl
      arbor trace config run.arbor.jsonl > my.toml && arbor solve --config my.toml
      arbor trace config run.arbor.jsonl --json
    """
    read = read_trace(file)
    header = read.header
    if header is None:
        raise TraceError(
            "trace-corrupt",
            f"{file} has no header, so its settings are lost. {_readable(read)}",
            "'arbor trace info' shows the readable part.",
            path=str(file),
        )
    settings = dict(header.config) | {"seed": header.seed}
    if read.words:
        settings = {"problem": header.problem, "expected": header.expected} | settings
    if output.json:
        output.document({"schema": "arbor.config/1", **settings})
        return 0
    if not read.words:
        output.warn(
            "warning: the trace was written without its problem and the texts among its settings; "
            "name them to repeat the run."
        )
    output.print(config_text(settings).rstrip())
    return 0


# Damaged traces


def warn_if_damaged(output: Output, read: Trace) -> None:
    """Warns that a trace is incomplete."""
    if read.banner:
        output.warn(f"warning: {read.path}: {read.banner}")


def refuse_damaged(read: Trace) -> Trace:
    """The same trace, if every line is readable.

    Raises:
        TraceError: a line is unreadable, or the trace is cut off.
    """
    if not read.bad_lines and not read.cut:
        return read
    place = str(read.bad[0]) if read.bad else "it is cut off"
    raise TraceError(
        "trace-corrupt",
        f"{read.path}: {place}. {_readable(read)}",
        "'arbor trace repair' writes a clean copy; 'arbor view' shows the readable part.",
        path=str(read.path),
        line=read.first_bad_line,
        readable=len(read.events),
    )


def _readable(read: Trace) -> str:
    return f"{len(read.events):,} events are readable."


def print_diff(output: Output, found: TraceDiff, paths: tuple[Path, Path]) -> None:
    """Prints a comparison of two traces: words left out, settings, tree, events, cost."""
    words = all(found.words)
    if not words:
        without = " and ".join(
            str(path) for path, has in zip(paths, found.words, strict=True) if not has
        )
        output.print(
            f"words     {LEFT_OUT} of {without}: lengths of blocks are compared, not texts"
        )
    for each in found.settings:
        first, second = (_setting(value) for value in (each.first, each.second))
        output.print(f"setting   {one_line(each.name)}: {first} | {second}")
    if found.same_tree:
        output.print(f"tree      the same, block by block{'' if words else ', by length'}")
    else:
        first = ".".join(map(str, found.blocks[0])) or "root"
        output.print(f"tree      {len(found.blocks):,} blocks differ, the first is {first}")
    if found.parting is None:
        output.print("events    the same")
    else:
        output.print(f"events    equal up to {found.parting.at:,}")
        for side, record in (("first", found.parting.first), ("second", found.parting.second)):
            output.print(f"  {side:<8}{_event_line(record, found.parting.fields)}")
    for row in found.metrics:
        if row.first and math.isfinite(row.first) and math.isfinite(row.second):
            times = f"  x {row.second / row.first:.2f}"
        else:
            times = ""
        output.print(f"cost      {row.name}: {_number(row.first)} | {_number(row.second)}{times}")


def _setting(value: Any) -> str:
    return one_line(clipped(str(value), SETTING_CHARACTERS))


def _event_line(record: dict[str, Any] | None, fields: tuple[str, ...]) -> str:
    if record is None:
        return "(no more events)"
    shown = {name: value for name, value in record.items() if name != "e"}
    if fields:
        shown = {name: value for name, value in shown.items() if name in ("node", *fields)}
    return " ".join([record["e"], *(f"{name}={_short(value)}" for name, value in shown.items())])


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
