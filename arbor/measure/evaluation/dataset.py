"""Samples: the problems of a task's split, or of a file with one problem per row."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arbor.errors import ArborError, InputError, UsageError
from arbor.support.texts import clipped, surrogate_of
from arbor.tasks.base import Problem, Task
from arbor.tasks.splits import content_id

logger = logging.getLogger(__name__)

INPUT_KEY = "problem"
TARGET_KEY = "answer"
ID_KEY = "id"

LONGEST_SHOWN = 200  # characters of a row's columns in an error

_COUNT = re.compile(r"[1-9][0-9]*")
_RANGE = re.compile(r"([1-9][0-9]*)-([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One problem of a dataset.

    Attributes:
        id: the dataset's own, or a hash of problem and answer key; never the row number, which
            changes with the order.
        text: the problem as the dataset has it.
        expected: the answer key; None without one.
        where: its place, for people: ``line 3``.
        problem: the problem as the task reads it; None if unreadable.
        error: the reason if unreadable.
    """

    id: str
    text: str
    expected: str | None
    where: str
    problem: Problem | None = None
    error: ArborError | None = None


def window(limit: str) -> tuple[int, int]:
    """The part of a dataset: ``100`` (the first hundred) or ``101-200`` (inclusive, from 1).

    Returns:
        Number of samples skipped, and of the last sample taken.

    Raises:
        UsageError: neither form.
    """
    if _COUNT.fullmatch(limit):
        return 0, int(limit)
    match = _RANGE.fullmatch(limit)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(
            "limit",
            f"--limit {limit} is neither a number of samples nor a range of them.",
            "Write 100 for the first hundred, or 101-200 for the second.",
            limit=limit,
        )
    return int(match[1]) - 1, int(match[2])


def of_task(task: Task, split: str, first: int, last: int) -> list[Sample]:
    """Samples of a task's own problems, without repetitions.

    Args:
        split: the task's name for it.
        first, last: number of samples skipped, and of the last sample taken.

    Raises:
        UsageError, InputError: a task without problems, or an unknown split.
    """
    found: dict[str, Sample] = {}
    for number, problem in enumerate(task.problems(split, last), 1):
        if number > first:
            sample = Sample(
                problem.id, problem.text, problem.expected, f"problem {number}", problem
            )
            found.setdefault(sample.id, sample)
    return list(found.values())


def of_rows(
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    task: Task,
    name: str,
    input_key: str = INPUT_KEY,
    target_key: str | None = None,
) -> list[Sample]:
    """Samples of a file's rows, as a task reads them; equal rows are one sample.

    Args:
        rows: line number and columns.
        task: reads the problems; its own answer key counts where a row has none.
        name: the file's name, for errors.
        input_key: the column of the problem.
        target_key: the column of the answer key; by default `TARGET_KEY`, where a row has it.

    Raises:
        InputError: a column is missing, holds no text, or one id names two problems.
    """
    found: dict[str, Sample] = {}
    count = 0
    for count, (line, row) in enumerate(rows, 1):  # noqa: B007, the last number is needed
        where = f"line {line}"
        text = _text(row, input_key, "--input-key", name, where)
        expected = None
        if target_key is not None or row.get(TARGET_KEY) is not None:
            expected = _text(row, target_key or TARGET_KEY, "--target-key", name, where)
        own = row.get(ID_KEY)
        identity = content_id("sample", json.dumps([text, expected])) if own is None else str(own)
        sample = _read(Sample(identity, text, expected, where), task, name)
        before = found.setdefault(identity, sample)
        if (before.text, before.expected) != (sample.text, sample.expected):
            raise InputError(
                "dataset-invalid",
                f"{name}: {before.where} and {where} have the id '{clipped(identity)}' and differ.",
                "Give each problem an id of its own, or none: then it is a hash of the problem.",
                path=name,
                line=line,
            )
    if count > len(found):
        logger.warning("%s: %s duplicate row(s) left out", name, f"{count - len(found):,}")
    return list(found.values())


def _read(sample: Sample, task: Task, name: str) -> Sample:
    """The sample with its problem, or with its error."""
    try:
        problem = task.parse(sample.text)
    except InputError as error:
        message = f"{name}, {sample.where}: {error.message}"
        return replace(sample, error=InputError(error.code, message, error.hint, **error.data))
    expected = problem.expected if sample.expected is None else sample.expected
    if expected is None:
        raise InputError(
            "dataset-invalid",
            f"{name}: {sample.where} has no '{TARGET_KEY}', so answers cannot be graded.",
            "Name the column of the answer key: --target-key NAME.",
            path=name,
        )
    problem = replace(problem, id=sample.id, expected=expected)
    return replace(sample, expected=expected, problem=problem)


def _text(row: Mapping[str, Any], key: str, flag: str, name: str, where: str) -> str:
    """A column's text; of a number its JSON form."""
    value = row.get(key)
    half = surrogate_of(value) if isinstance(value, str) else ""
    if isinstance(value, str) and not half:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    has = ", ".join(str(column) for column in row)[:LONGEST_SHOWN] or "nothing"
    wrong = f"has no text in '{key}'" if key in row else f"has no '{key}'"
    hint = f"Name the column: {flag} NAME."
    if half:
        wrong, hint = f"has {half} in '{key}', half of a character", "Write the text as UTF-8."
    raise InputError(
        "dataset-invalid",
        f"{name}: {where} {wrong}. It has: {has}.",
        hint,
        path=name,
        key=key,
    )


def jsonl_rows(text: str, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and object of every non-blank line.

    Raises:
        InputError: a line is not a JSON object.
    """
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise _no_row(name, number, f"is not JSON ({reason})") from error
        if not isinstance(row, dict):
            raise _no_row(name, number, "is not a JSON object")
        yield number, row


def _no_row(name: str, line: int, what: str) -> InputError:
    return InputError(
        "dataset-invalid",
        f"{name}: line {line} {what}.",
        'Each line is one object, as in {"problem": "4 5 6 10", "answer": "24"}.',
        path=name,
        line=line,
    )


def csv_rows(text: str, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and non-empty cells of every row; the first line names the columns.

    Raises:
        InputError: invalid CSV, or a row with more cells than columns.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if None in row:
                raise InputError(
                    "dataset-invalid",
                    f"{name}: line {reader.line_num} has more cells than the first line has names.",
                    'Put a cell with a comma in quotes: "1,000".',
                    path=name,
                    line=reader.line_num,
                )
            yield reader.line_num, {key: cell for key, cell in row.items() if cell}
    except csv.Error as error:
        raise InputError(
            "dataset-invalid",
            f"{name}: line {reader.line_num} is not CSV ({error}).",
            'The first line names the columns, as in: problem,answer. A quote inside is "".',
            path=name,
            line=reader.line_num,
        ) from error


def chosen(samples: list[Sample], ids: Iterable[str]) -> list[Sample]:
    """The samples with these ids, in the dataset's order; all without ids.

    Raises:
        UsageError: an unknown id.
    """
    wanted = list(ids)
    known = {sample.id for sample in samples}
    for each in wanted:
        if each not in known:
            some = ", ".join(clipped(sample.id) for sample in samples[:3])
            raise UsageError(
                "unknown-sample",
                f"--sample-id {clipped(each)}: none of the {len(samples):,} samples has this id.",
                f"Ids are as in samples.jsonl, here {some} and so on; --limit leaves samples out.",
                id=each,
            )
    return [sample for sample in samples if not wanted or sample.id in wanted]
