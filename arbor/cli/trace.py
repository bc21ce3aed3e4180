"""``arbor trace``: look into a trace, check it, list its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arbor.cli.options import Command, Group, option, voice_options
from arbor.cli.solve import numbers_line
from arbor.cli.voice import Voice
from arbor.errors import TraceError
from arbor.events import EVENTS
from arbor.trace import Replay, read_trace
from arbor.trace.write import to_record

EXIT_GATE = 7
SHOWN_CHARACTERS = 60

_file = click.argument("file", type=click.Path(path_type=Path))


@click.group(cls=Group)
@voice_options
def trace() -> None:
    """Look into a trace.

    \b
      arbor trace info run.arbor.jsonl
      arbor trace check run.arbor.jsonl
      arbor trace events run.arbor.jsonl --type evict --type rehydrate
    """


@trace.command(cls=Command)
@_file
@voice_options
@click.pass_obj
def info(voice: Voice, file: Path) -> int:
    """What was run, how it ended and what it cost."""
    read = read_trace(file)
    replay = Replay.of(read)
    header, metrics = read.header, replay.metrics()
    answer = replay.answered
    status = replay.ended.status if replay.ended else "cut off"
    if voice.json:
        voice.document(
            {
                "schema": "arbor.trace-info/1",
                "path": str(file),
                "header": None if header is None else to_record(header),
                "status": status,
                "answer": None if answer is None else to_record(answer),
                "events": len(read.events),
                "unknown_events": read.unknown,
                "bad_lines": read.bad_lines,
                "complete": not read.banner,
                "metrics": metrics.to_dict(),
            }
        )
        return 0
    if read.banner:
        voice.warn(f"warning: {file}: {read.banner}")
    if header is not None:
        voice.print(f"problem   {header.problem}  ({header.task}, seed {header.seed})")
        voice.print(f"model     {header.model.get('id', '?')}")
        names = (f"{part} {_name(header.config.get(part))}" for part in ("controller", "verifier"))
        voice.print(f"search    {', '.join(names)}, budget {header.config.get('budget', '?')}")
        voice.print(f"run       {header.run}, {header.created}, arbor {header.arbor}")
    if answer is not None:
        path = " > ".join(map(str, answer.path))
        voice.print(f"answer    {answer.text}  (score {answer.score:.3f}, path {path})")
    voice.print(f"end       {numbers_line(status, metrics, answer.correct if answer else None)}")
    voice.print(f"events    {len(read.events):,}")
    return 0


def _name(spec: Any) -> str:
    return str(spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


@trace.command(cls=Command)
@_file
@voice_options
@click.pass_obj
def check(voice: Voice, file: Path) -> int:
    """Whether a trace is whole and agrees with itself; exit code 7 if not.

    Checked: every line is an event, none is lost, time runs forwards, parents exist, what is on the device adds up after
    every event and stays within the budget, and there is an end.
    """
    try:
        read = read_trace(file)
    except TraceError as error:
        if error.code != "trace-corrupt":
            raise
        problems, events, blocks = [error.message], 0, 0
    else:
        replay = Replay.of(read)
        problems, events, blocks = replay.problems, len(read.events), len(replay.blocks)
    if voice.json:
        voice.document(
            {
                "schema": "arbor.trace-check/1",
                "path": str(file),
                "ok": not problems,
                "events": events,
                "blocks": blocks,
                "problems": problems,
            }
        )
    else:
        for problem in problems:
            voice.print(f"{file}: {problem}")
        if not problems:
            voice.print(f"{file}: {events:,} events, {blocks:,} blocks, no contradiction")
    return EXIT_GATE if problems else 0


@trace.command(cls=Command)
@_file
@option(
    "--type",
    "types",
    multiple=True,
    type=click.Choice([kind.name for kind in EVENTS]),
    heading="Selection",
    help="Only events of this type; may be repeated.",
)
@option(
    "--limit", type=click.IntRange(1), heading="Selection", help="Only so many, from the first."
)
@voice_options
@click.pass_obj
def events(voice: Voice, file: Path, types: tuple[str, ...], limit: int | None) -> int:
    """The events, one a line."""
    read = read_trace(file)
    rows = [
        (number, seconds, event)
        for number, seconds, event in zip(read.sequence, read.times, read.events, strict=True)
        if not types or event.name in types
    ][:limit]
    if voice.json:
        voice.document(
            {
                "schema": "arbor.trace-events/1",
                "path": str(file),
                "events": [{"i": i, "t": t, **to_record(event)} for i, t, event in rows],
            }
        )
        return 0
    if read.banner:
        voice.warn(f"warning: {file}: {read.banner}")
    for number, seconds, event in rows:
        record = to_record(event)
        del record["e"]
        facts = " ".join(f"{name}={_short(value)}" for name, value in record.items())
        voice.print(f"{number:>6} {seconds:>10.6f} {event.name:<11}{facts}")
    return 0


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
