"""Samples of ``arbor eval``: from a task, a file, stdin or the Hub."""

from __future__ import annotations

import functools
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from arbor import registry
from arbor.cli.build import OF_USERS
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.cli.problem_text import decoded
from arbor.errors import InputError, UsageError
from arbor.measure.evaluation.dataset import (
    Sample,
    chosen,
    of_rows,
    of_split,
    of_task,
    window,
)
from arbor.measure.evaluation.rows import (
    HUB,
    DataRow,
    csv_rows,
    hub_rows,
    json_rows,
    jsonl_rows,
    parquet_rows,
)
from arbor.tasks.base import Task

DEFAULT_LIMIT = 100  # samples of a task without --limit; some tasks have endless problems
STDIN = "-"
TEXTS: Mapping[str, Callable[[IO[str], str], Iterator[DataRow]]] = {
    ".jsonl": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": functools.partial(csv_rows, delimiter="\t"),
}
SUFFIXES = (*TEXTS, ".parquet")


def is_task(dataset: str) -> bool:
    """Whether the samples are a task's own problems: it is a task's name, its path
    ``package.module:Class``, or its file ``mine.py:Class``."""
    if dataset in registry.names("task"):
        return True
    is_file = dataset.lower().endswith(SUFFIXES) or Path(dataset).exists()
    return ":" in dataset and not dataset.startswith(HUB) and not is_file


def name_of(dataset: str) -> str:
    """A dataset's name in messages."""
    return "stdin" if dataset == STDIN else dataset


def read_samples(options: DatasetOptions, task: Task, stop_on_error: bool) -> list[Sample]:
    """The selected samples, read by the task.

    Args:
        options: the dataset and the selection.
        task: reads the problems.
        stop_on_error: raise the error of an invalid problem; else its sample keeps it.

    Raises:
        UsageError, InputError: an unknown, unreadable or empty dataset, or an invalid problem.
    """
    name = name_of(options.dataset)
    first, last = (0, None) if options.limit is None else window(options.limit)
    if is_task(options.dataset):
        split = options.split or "test"
        samples = _task_samples(task, name, split, first, last or DEFAULT_LIMIT)
    else:
        rows = _rows(options.dataset, options.encoding)
        if options.split is not None:
            rows = of_split(rows, options.split, task, name, options.input_key)
        rows = itertools.islice(rows, first, last)
        samples = of_rows(rows, task, name, options.input_key, options.target_key)
    if not samples:
        beyond = bool(first)  # only a window that skips samples can miss those there are
        part = f" in its split {options.split}" if options.split else ""
        raise InputError(
            "dataset-empty",
            f"{name} has no samples{part}" + (f" in {options.limit}." if beyond else "."),
            "Leave --limit out, or give a smaller one." if beyond else "",
        )
    samples = chosen(samples, options.sample_id)
    if stop_on_error:
        for sample in samples:
            if sample.error is not None:
                raise sample.error
    return samples


def _task_samples(task: Task, name: str, split: str, first: int, last: int) -> list[Sample]:
    try:
        return of_task(task, split, first, last)
    except UsageError as error:
        if error.code != "no-problems":
            raise
        hint = f"Give a file: arbor eval problems.jsonl --task {name}"
        raise UsageError(error.code, error.message, hint) from error


def _rows(dataset: str, encoding: str) -> Iterator[DataRow]:
    """The rows of a file, of stdin or of a data set of the Hub, read as they are needed.

    Raises:
        UsageError: an unknown name, suffix or encoding.
        InputError: it cannot be read, or in another encoding.
    """
    if dataset.startswith(HUB):
        return hub_rows(dataset)
    name = name_of(dataset)
    decoded(b"", encoding, name)
    if dataset == STDIN:
        return json_rows(io.StringIO(decoded(sys.stdin.buffer.read(), encoding, name)), name)
    path = Path(dataset)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        if suffix or path.exists() or "/" in dataset:
            raise UsageError(
                "dataset-format",
                f"{dataset} has none of the endings {', '.join(SUFFIXES)}.",
                'Write one JSON object a line, as in {"problem": "4 5 6 10", "answer": "24"}, into '
                "a file problems.jsonl.",
                path=dataset,
            )
        raise UsageError(
            "unknown-dataset",
            f"unknown dataset '{dataset}'.",
            f"Known: {', '.join(_tasks_with_problems())}; or a file: problems.jsonl, "
            "problems.csv; or a task of yours: mine.py:Mine.",
            name=dataset,
        )
    return _file_rows(path, dataset, encoding)


def _file_rows(path: Path, name: str, encoding: str) -> Iterator[DataRow]:
    try:
        if path.suffix.lower() == ".parquet":
            with path.open("rb"):  # a missing file is an error with or without pyarrow
                pass
            yield from parquet_rows(path, name)
            return
        ends = "\n" if path.suffix.lower() in (".jsonl", ".json") else ""
        with path.open("rb") as file:
            mark = "\ufeff".encode(encoding, "ignore")  # with which an editor may begin a file
            if file.peek(len(mark)).startswith(mark):
                file.read(len(mark))
            with io.TextIOWrapper(file, encoding, newline=ends) as stream:
                yield from TEXTS[path.suffix.lower()](stream, name)
    except UnicodeError as error:
        decoded(path.read_bytes(), encoding, name)  # its error names the line
        raise InputError(
            "dataset-unreadable", f"{name} cannot be decoded as {encoding}.", path=name
        ) from error
    except OSError as error:
        raise InputError(
            "dataset-unreadable",
            f"{name} cannot be read: {error.strerror}.",
            "Name a file of rows, such as problems.jsonl, or '-' for stdin.",
            path=name,
        ) from error


def _tasks_with_problems() -> list[str]:
    return [name for name in registry.names("task") if name not in OF_USERS]
