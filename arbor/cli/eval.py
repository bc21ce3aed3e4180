"""``arbor eval``: many problems into one folder, which can stop at any moment and go on later."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from arbor import components, registry
from arbor._version import __version__
from arbor.cli.build import build_solver, parse_settings
from arbor.cli.configure import all_settings
from arbor.cli.encoding import decoded
from arbor.cli.options import (
    EXIT_GATE,
    Command,
    config_option,
    limit_options,
    model_option,
    option,
    output_options,
    sampling_options,
    search_options,
    together,
    trace_detail_options,
)
from arbor.cli.output import Output
from arbor.cli.progress import Progress
from arbor.cli.signals import EXIT_SIGNAL, StopSignals
from arbor.cli.solve import use_threads
from arbor.errors import ArborError, InputError, ModelError, UsageError
from arbor.measure.evaluation.dataset import (
    Sample,
    chosen,
    csv_rows,
    jsonl_rows,
    of_rows,
    of_task,
    window,
)
from arbor.measure.evaluation.folder import CONFIG, PAGE, RESULTS, RunFolder, digest, read_rows
from arbor.measure.evaluation.page import index_page
from arbor.measure.evaluation.results import compare, is_right, results
from arbor.support.units import human_bytes
from arbor.tasks.base import Problem, Task
from arbor.trace.read import read_trace
from arbor.trace.write import TraceWriter, finite

if TYPE_CHECKING:
    from arbor.run.solution import Solution
    from arbor.solver import Solver

FIRST = 100  # samples of a task without --limit; some tasks never run out of problems
STDIN = "-"
ROWS = {".jsonl": jsonl_rows, ".csv": csv_rows}


def _datasets(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completes tasks, then files."""
    tasks = [CompletionItem(name) for name in registry.names("task") if name.startswith(begun)]
    return [*tasks, CompletionItem(begun, type="file")]


_options = together(
    option(
        "--split",
        default="test",
        metavar="NAME",
        heading="Dataset",
        help="Of a task's problems: train, validation, test.",
    ),
    option(
        "--input-key",
        default="problem",
        metavar="NAME",
        heading="Dataset",
        help="Column of a file that holds the problem.",
    ),
    option(
        "--target-key",
        metavar="NAME",
        heading="Dataset",
        help="Column that holds the answer key; 'answer' where there is one.",
    ),
    option(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        heading="Dataset",
        help="Of the file or of stdin.",
    ),
    option(
        "--limit",
        metavar="N|A-B",
        heading="Dataset",
        help="The first N samples, or those from A to B; a task's first 100, all of a file.",
    ),
    option(
        "--sample-id",
        multiple=True,
        metavar="ID",
        heading="Dataset",
        help="Only this sample; may be repeated.",
    ),
    search_options,
    model_option,
    sampling_options,
    limit_options,
    option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        help="The run's folder, or one to go on with; runs/{time}_{dataset}_{id} if none is given.",
    ),
    option(
        "--fresh", is_flag=True, heading="Output", help="Start over in a folder that has a run."
    ),
    option(
        "--on-error",
        type=click.Choice(["stop", "continue"]),
        default="stop",
        heading="Output",
        help="After a sample that cannot be solved; continue counts it as wrong.",
    ),
    option(
        "--fail-under",
        type=click.FloatRange(0, 1),
        metavar="X",
        heading="Output",
        help="Exit code 7 if the accuracy is lower, as in 0.70.",
    ),
    option(
        "--compare",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        help="Pair the samples with those of another run.",
    ),
    option(
        "--trace",
        type=click.Choice(["on", "off"]),
        default="on",
        heading="Output",
        help="A trace per sample, in DIR/traces.",
    ),
    trace_detail_options,
    config_option,
    output_options,
)


@click.command("eval", cls=Command)
@click.argument("dataset", shell_complete=_datasets)
@_options
@click.pass_context
def eval_(ctx: click.Context, /, **given: Any) -> int:
    """Solve many problems; the same command with the same --output goes on where it stopped.

    DATASET is a task with problems of its own (chains, countdown, game24, recall), a .jsonl or .csv file, or '-'
    for JSON lines on stdin.

    \b
      arbor eval game24 --limit 50 --budget 0.25 --output runs/quarter
      arbor eval problems.jsonl --task reasoning --on-error continue
      arbor eval game24 --limit 50 --output runs/full --compare runs/baseline
    """
    voice = ctx.ensure_object(Output)
    own = given["dataset"] in registry.names("task")
    if own:
        _take_task(ctx, given)
    given["set"] = all_settings(given)
    task = components.build("task", given["task"], **parse_settings(given)["task"])
    samples = read_samples(given, task, own)
    theirs = None if given["compare"] is None else _others(given["compare"], samples)
    with StopSignals() as stop, build_solver(given) as solver:
        config = run_config(given, solver, own)
        path = given["output"] or _new_folder(given["dataset"], config)
        if given["on_error"] == "stop" and samples[0].problem is not None:
            solver.plan(samples[0].problem)  # what cannot work leaves no folder behind
        folder = RunFolder(path, config, given["fresh"])
        again = _again(given, path)
        try:
            solve_all(voice, given, solver, folder, samples, stop)
        except KeyboardInterrupt:
            voice.warn(f"to go on: {again}")
            raise
        except ArborError:
            _close(given, folder, samples, theirs)
            voice.warn(f"{len(folder.rows):,} finished sample(s) kept; to go on: {again}")
            raise
        finally:
            folder.close()
        found = _close(given, folder, samples, theirs)
    if voice.json:
        voice.document(found)
    else:
        for line in _lines(found):
            voice.print(line)
    if stop.signal is not None:
        voice.warn(f"interrupted; to go on: {again}")
        return EXIT_SIGNAL + stop.signal
    gate, accuracy = given["fail_under"], found["accuracy"]
    if gate is not None and accuracy is not None and accuracy < gate:
        voice.warn(f"[fail-under] the accuracy is {accuracy:.4g}, which is below {gate:g}.")
        return EXIT_GATE
    return 0


# What is solved


def _take_task(ctx: click.Context, given: dict[str, Any]) -> None:
    """A dataset that is a task is read by that task."""
    if ctx.get_parameter_source("task") is click.core.ParameterSource.DEFAULT:
        given["task"] = given["dataset"]
    elif given["task"] != given["dataset"]:
        raise UsageError(
            "usage",
            f"the problems of {given['dataset']} are not read by --task {given['task']}.",
            "Leave --task out; it is for files.",
        )


def read_samples(given: Mapping[str, Any], task: Task, own: bool) -> list[Sample]:
    """The samples that were asked for, each read by the task.

    Raises:
        UsageError, InputError: there is no such dataset, it cannot be read, or one of its problems cannot and that stops.
    """
    name = given["dataset"]
    first, last = (0, None) if given["limit"] is None else window(given["limit"])
    if own:
        samples = _task_samples(task, given["split"], first, last or FIRST)
    else:
        rows = itertools.islice(_rows(name, given["encoding"]), first, last)
        samples = of_rows(rows, task, _name(name), given["input_key"], given["target_key"])
    if not samples:
        raise InputError(
            "dataset-empty",
            f"{_name(name)} has no samples" + (f" in {given['limit']}." if given["limit"] else "."),
            "Leave --limit out, or give a smaller one.",
        )
    samples = chosen(samples, given["sample_id"])
    if given["on_error"] == "stop":
        for sample in samples:
            if sample.error is not None:
                raise sample.error
    return samples


def _task_samples(task: Task, split: str, first: int, last: int) -> list[Sample]:
    try:
        return of_task(task, split, first, last)
    except UsageError as error:
        if error.code != "no-problems":
            raise
        hint = f"Give a file: arbor eval problems.jsonl --task {task.name}"
        raise UsageError(error.code, error.message, hint) from error


def _rows(dataset: str, encoding: str) -> Any:
    """Line number and columns of each row of a file or of stdin."""
    path, suffix = Path(dataset), Path(dataset).suffix.lower()
    if dataset != STDIN and suffix not in ROWS:
        if suffix or path.exists() or "/" in dataset:
            raise UsageError(
                "dataset-format",
                f"{dataset} is neither a .jsonl nor a .csv file.",
                'Write one JSON object a line, as in {"problem": "4 5 6 10", "answer": "24"}.',
                path=dataset,
            )
        raise UsageError(
            "unknown-dataset",
            f"'{dataset}' is no known dataset.",
            f"Known: {', '.join(_tasks_with_problems())}; or a file: problems.jsonl, problems.csv.",
            name=dataset,
        )
    try:
        data = sys.stdin.buffer.read() if dataset == STDIN else path.read_bytes()
    except OSError as error:
        raise InputError(
            "dataset-unreadable",
            f"{dataset} cannot be read: {error.strerror}.",
            "Name a .jsonl or .csv file, or '-' for stdin.",
            path=dataset,
        ) from error
    return ROWS.get(suffix, jsonl_rows)(decoded(data, encoding, _name(dataset)), _name(dataset))


def _tasks_with_problems() -> list[str]:
    return [name for name in registry.names("task") if name != "reasoning"]


def _name(dataset: str) -> str:
    return "stdin" if dataset == STDIN else dataset


def _others(path: Path, samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """The samples of the run that this one is compared with."""
    theirs, _ = read_rows(path)
    if not any(sample.id in theirs for sample in samples):
        raise UsageError(
            "run-disjoint",
            f"{path} has none of these {len(samples):,} samples.",
            "Compare runs of the same dataset, split and --limit.",
            path=str(path),
        )
    return theirs


# The folder


def run_config(given: Mapping[str, Any], solver: Solver, own: bool) -> dict[str, Any]:
    """Everything that repeats the run, as ``--config`` reads it."""
    source = {"split": given["split"]} if own else {}
    if not own:
        source = {name: given[name] for name in ("input_key", "target_key", "encoding")}
    selection = {
        name: given[name]
        for name in ("limit", "on_error", "trace", "trace_level", "trace_text", "sample_id")
        if given[name] != ()
    }
    run = {name: given[name] for name in ("timeout", "max_tokens")}
    config = {"arbor": __version__, "dataset": given["dataset"], **source, **selection, **run}
    return config | dict(solver.config)


def _new_folder(dataset: str, config: Mapping[str, Any]) -> Path:
    """``runs/{time}_{dataset}_{id}``."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{now}_{Path(_name(dataset)).stem}_{digest(config)[:6]}"


def _again(given: Mapping[str, Any], path: Path) -> str:
    """The command that goes on with this run: its configuration, and what no configuration holds."""
    words = ["arbor", "eval", "--config", str(path / CONFIG), "--output", str(path)]
    if given["device"] != "auto":
        words += ["--device", given["device"]]
    if given["trust_remote_code"]:
        words.append("--trust-remote-code")
    return shlex.join(words)


def _close(
    given: Mapping[str, Any],
    folder: RunFolder,
    samples: list[Sample],
    theirs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Writes what the samples add up to, and the page; both are of everything in the folder."""
    rows = list(folder.rows.values())
    missing = sum(not folder.finished(sample) for sample in samples)
    found = results(rows) | {
        "arbor": __version__,
        "dataset": given["dataset"],
        "digest": digest(folder.config),
        "folder": str(folder.path),
        "missing": missing,
    }
    if theirs is not None and any(each in theirs for each in folder.rows):
        found["comparison"] = {"with": str(given["compare"]), **compare(folder.rows, theirs)}
    folder.write(RESULTS, json.dumps(finite(found), allow_nan=False, indent=1) + "\n")
    folder.write(PAGE, index_page(f"arbor eval {_name(given['dataset'])}", _lines(found), rows))
    return found


# The run


def solve_all(
    voice: Output,
    given: Mapping[str, Any],
    solver: Solver,
    folder: RunFolder,
    samples: list[Sample],
    stop: StopSignals,
) -> None:
    """Solves every sample that is not finished; returns early where a signal asks for it.

    Raises:
        ArborError: of a sample that cannot be solved, where that stops.
    """
    waiting = [sample for sample in samples if not folder.finished(sample)]
    if folder.unreadable:
        voice.warn(f"warning: {folder.unreadable} unreadable line(s) of samples.jsonl are left out")
    if len(waiting) < len(samples):
        voice.say(f"{len(samples) - len(waiting):,} of {len(samples):,} samples are finished")
    if not waiting:
        return
    voice.say(f"loading {given['model']} · seed {given['seed']}")
    use_threads(given["threads"], solver.describe())
    console = None if voice.progress == "none" else voice.console()
    with Progress(console, voice.progress == "live", len(waiting)) as tally:
        for sample in waiting:
            row = solve_one(given, solver, folder, sample, stop, tally)
            if row is None:
                return
            folder.add(row)
            tally.add(is_right(row))
            if stop.signal is not None:
                return


def solve_one(
    given: Mapping[str, Any],
    solver: Solver,
    folder: RunFolder,
    sample: Sample,
    stop: StopSignals,
    tally: Progress,
) -> dict[str, Any] | None:
    """A line of ``samples.jsonl``; None if a signal ended the search.

    Raises:
        ArborError: it cannot be solved, and that stops; or the model is to blame, which the next sample would not change.
    """
    path = folder.trace_path(sample.id) if given["trace"] == "on" else None
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        if sample.problem is None:
            assert sample.error is not None, "a sample has a problem or a reason why not"
            raise sample.error
        solver.plan(sample.problem)  # a budget that cannot work is refused before anything loads
        solver.load()
        began, began_cpu = time.perf_counter(), time.process_time()
        solution = _search(given, solver, sample.problem, path, stop, tally)
    except ArborError as error:
        if given["on_error"] == "stop" or isinstance(error, ModelError):
            error.data["sample"] = sample.id
            raise
        outcome: dict[str, Any] = {"answer": None, "correct": None, "finish_reason": "error"}
        outcome |= {"score": 0.0, "metrics": {}, "error": error.to_dict()}
        if path is not None and not _has_events(path):
            path.unlink(missing_ok=True)
    else:
        if stop.signal is not None and solution.finish_reason == "interrupted":
            return None
        outcome = {
            name: getattr(solution, name)
            for name in ("answer", "correct", "finish_reason", "score")
        }
        outcome |= {"metrics": solution.metrics.to_dict(), "error": None}
    traced = path is not None and path.is_file()
    return {
        "id": sample.id,
        "problem": sample.text,
        "expected": sample.expected,
        **outcome,
        "trace": path.relative_to(folder.path).as_posix() if traced and path else None,
        "cpu_s": round(time.process_time() - began_cpu, 6),
        "wall_s": round(time.perf_counter() - began, 6),
    }


def _has_events(path: Path) -> bool:
    """Whether a search got so far that its trace tells something."""
    try:
        return bool(read_trace(path).events)
    except ArborError:
        return False


def _search(
    given: Mapping[str, Any],
    solver: Solver,
    problem: Problem,
    path: Path | None,
    stop: StopSignals,
    tally: Progress,
) -> Solution:
    writer = None if path is None else TraceWriter(path, text=given["trace_text"])
    with writer or contextlib.nullcontext():
        stream = solver.stream(
            problem,
            timeout=given["timeout"],
            max_tokens=given["max_tokens"],
            trace=writer,
            trace_level=given["trace_level"],
        )
        with stop.ending(stream):
            for _ in stream:
                tally.tick()
    return stream.solution


# What it says


def _lines(found: Mapping[str, Any]) -> list[str]:
    """The results as lines of text."""
    n, (low, high) = found["n"], found["interval"]
    told = {"accuracy": "none: no sample is finished"}
    if n:
        told["accuracy"] = (
            f"{100 * found['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f}), "
            f"{found['right']:,} of {n:,} right"
        )
    for name in ("missing", "no_answer"):
        if found[name]:
            told[name.replace("_", " ")] = f"{found[name]:,}"
    if found["errors"]:
        codes, first = found["error_codes"], found["first_error"]
        counts = ", ".join(f"{count:,} {code}" for code, count in codes.items())
        told["errors"] = f"{counts}; the first: {first['message']} {first['hint']}".rstrip()
    generated, recomputed = found["tokens_generated"], found["tokens_recomputed"]
    told["tokens"] = (
        f"{generated['mean']:,.0f} generated, {recomputed['mean']:,.0f} recomputed, of one sample"
    )
    peak, size = found["peak_tokens"], human_bytes(found["peak_bytes"]["max"])
    told["peak KV"] = (
        f"{peak['mean']:,.0f} tokens of one sample, at most {peak['max']:,.0f}, {size}"
    )
    cpu = found["cpu_s"]
    told["CPU time"] = f"{cpu['mean']:.2f} s of one sample, {cpu['total']:,.1f} s in all"
    told["folder"] = str(found["folder"])
    lines = [f"{name:<12}{text}" for name, text in told.items()]
    return lines + (_comparison(found["comparison"]) if "comparison" in found else [])


def _comparison(pair: Mapping[str, Any]) -> list[str]:
    low, high = pair["interval"]
    lines = [
        f"{'compared':<12}{100 * pair['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) "
        f"against {pair['with']}, {pair['n']:,} samples in both",
        f"{'':<12}right only here {pair['only_first']:,}, only there {pair['only_second']:,}; "
        f"McNemar p = {pair['p']:.3g}",
    ]
    for name, what in (
        ("tokens_recomputed", "recomputed"),
        ("peak_tokens", "peak KV"),
        ("cpu_s", "CPU s"),
    ):
        one = pair[name]
        low, high = one["interval"]
        digits = 2 if name == "cpu_s" else 0
        lines.append(
            f"{'':<12}{what}: {one['here']:,.{digits}f} here, {one['there']:,.{digits}f} there, "
            f"{one['difference']:+,.{digits}f} ({low:+,.{digits}f} to {high:+,.{digits}f})"
        )
    return lines
