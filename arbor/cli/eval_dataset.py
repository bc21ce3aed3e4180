"""Samples of ``arbor eval``: from a task, a file or stdin."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arbor import registry
from arbor.cli.encoding import decoded
from arbor.cli.eval_options import DatasetOptions
from arbor.errors import InputError, UsageError
from arbor.measure.evaluation.dataset import (
    Sample,
    chosen,
    csv_rows,
    jsonl_rows,
    of_rows,
    of_task,
    window,
)
from arbor.tasks.base import Task

DEFAULT_LIMIT = 100  # samples of a task without --limit; some tasks have endless problems
STDIN = "-"
OF_USERS = ("aime", "arc", "gsm8k", "math", "reasoning")  # tasks without problems of their own
ROWS = {".jsonl": jsonl_rows, ".csv": csv_rows}


def is_task(dataset: str) -> bool:
    """Whether the samples are a task's own problems."""
    return dataset in registry.names("task")


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
        samples = _task_samples(task, options.split, first, last or DEFAULT_LIMIT)
    else:
        rows = itertools.islice(_rows(options.dataset, options.encoding), first, last)
        samples = of_rows(rows, task, name, options.input_key, options.target_key)
    if not samples:
        beyond = bool(first)  # only a window that skips samples can miss those there are
        raise InputError(
            "dataset-empty",
            f"{name} has no samples" + (f" in {options.limit}." if beyond else "."),
            "Leave --limit out, or give a smaller one." if beyond else "",
        )
    samples = chosen(samples, options.sample_id)
    if stop_on_error:
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


def _rows(dataset: str, encoding: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
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
            f"unknown dataset '{dataset}'.",
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
    return ROWS.get(suffix, jsonl_rows)(decoded(data, encoding, name_of(dataset)), name_of(dataset))


def _tasks_with_problems() -> list[str]:
    return [name for name in registry.names("task") if name not in OF_USERS]
