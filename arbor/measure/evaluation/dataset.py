"""Samples: the problems of a task's split, or of a file with one problem per row."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from arbor.errors import ArborError, InputError, UsageError
from arbor.measure.evaluation.rows import DataRow
from arbor.support.texts import clipped, surrogate_of
from arbor.tasks.base import DataColumns, Problem, ReadsRows, Task
from arbor.tasks.splits import DATASET_SPLITS, content_id, dataset_split_of

BLANK = " \t\r\n"  # an answer key of these alone is empty

logger = logging.getLogger(__name__)

_COUNT = re.compile(r"[1-9][0-9]{0,17}")
_RANGE = re.compile(rf"({_COUNT.pattern})-({_COUNT.pattern})")


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
            f"--limit {clipped(limit)} is neither a number of samples nor a range of them.",
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


def of_split(
    rows: Iterable[DataRow], split: str, task: Task, name: str, input_key: str | None = None
) -> Iterator[DataRow]:
    """The rows of one split of a data set, read as they are needed.

    Args:
        rows: all of them.
        split: of `DATASET_SPLITS`.
        task, name, input_key: as in `of_rows`.

    Raises:
        InputError: another split; while it iterates, a row without the problem's column.
    """
    if split not in DATASET_SPLITS:
        raise InputError(
            "split-unknown",
            f"{name} has no split '{split}'.",
            f"Known: {', '.join(DATASET_SPLITS)}; without --split all rows.",
        )
    reader = _SampleReader(task, name, input_key, None)
    return (row for row in rows if dataset_split_of(reader.text(row)) == split)


def of_rows(
    rows: Iterable[DataRow],
    task: Task,
    name: str,
    input_key: str | None = None,
    target_key: str | None = None,
) -> list[Sample]:
    """Samples of a file's rows, as a task reads them; equal rows are one sample.

    Args:
        rows: the file's.
        task: reads the problems; its own answer key counts where a row has none.
        name: the file's name, for errors.
        input_key: the column of the problem; by default one that the task names.
        target_key: the column of the answer key; by default one that the task names, where a row
            has it.

    Raises:
        InputError: a column is missing, holds no text, or one id names two problems.
    """
    reader = _SampleReader(task, name, input_key, target_key)
    found: dict[str, Sample] = {}
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007, the last number is needed
        sample = reader.sample(row)
        before = found.setdefault(sample.id, sample)
        if (before.text, before.expected) != (sample.text, sample.expected):
            raise InputError(
                "dataset-invalid",
                f"{name}: {before.where} and {sample.where} have the id '{clipped(sample.id)}' and "
                "differ.",
                "Give each problem an id of its own, or none: then it is a hash of the problem.",
                path=name,
                where=sample.where,
            )
    if count > len(found):
        logger.warning("%s: %s duplicate row(s) left out", name, f"{count - len(found):,}")
    return list(found.values())


class _SampleReader:
    """Makes samples of rows; see `of_rows`."""

    def __init__(
        self, task: Task, name: str, input_key: str | None, target_key: str | None
    ) -> None:
        self._task = task
        self._name = name
        self._rows = task if isinstance(task, ReadsRows) else None
        columns = DataColumns() if self._rows is None else self._rows.columns
        self._problem = columns.problem if input_key is None else (input_key,)
        self._answer = columns.answer if target_key is None else (target_key,)
        self._needs_answer = target_key is not None
        self._id = columns.id
        self._lists = columns.lists

    def sample(self, row: DataRow) -> Sample:
        """The sample of a row, with its problem or with its error."""
        text, expected = self.text(row), self._key(row)
        error: InputError | None = None
        if self._rows is not None:
            try:
                text, expected = self._rows.entry(row.columns, text, expected)
            except InputError as raised:
                error = raised
        own = next(
            (row.columns[key] for key in self._id if not _is_missing(row.columns.get(key))), None
        )
        identity = content_id("sample", json.dumps([text, expected])) if own is None else str(own)
        sample = Sample(identity, text, expected, row.where)
        return self._read(sample, row) if error is None else self._unread(sample, error)

    def _read(self, sample: Sample, row: DataRow) -> Sample:
        """The sample with its problem, or with its error."""
        try:
            problem = self._task.parse(sample.text)
        except InputError as error:
            return self._unread(sample, error)
        expected = problem.expected if sample.expected is None else sample.expected
        if expected is None:
            empty = next((key for key in self._answer if key in row.columns), None)
            if empty is not None:
                wrong = f"its '{empty}' is empty, so answers cannot be graded."
                hint = "Write the answer there, or leave the row out."
                return self._unread(sample, InputError("dataset-invalid", wrong, hint))
            raise InputError(
                "dataset-invalid",
                f"{self._name}: {row.where} has no '{self._answer[0]}', so answers cannot be "
                f"graded. It has: {row.named}.",
                "Name the column of the answer key: --target-key NAME.",
                path=self._name,
            )
        problem = replace(problem, id=sample.id, expected=expected)
        return replace(sample, expected=expected, problem=problem)

    def _unread(self, sample: Sample, error: InputError) -> Sample:
        message = f"{self._name}, {sample.where}: {error.message}"
        return replace(sample, error=InputError(error.code, message, error.hint, **error.data))

    def text(self, row: DataRow) -> str:
        """The problem of a row."""
        key = next((each for each in self._problem if each in row.columns), self._problem[0])
        return self._column(row, key, "--input-key")

    def _key(self, row: DataRow) -> str | None:
        """The answer key of a row; None without one, or with an empty one."""
        for key in self._answer:
            absent = self._needs_answer and key not in row.columns
            if absent or not _is_missing(row.columns.get(key)):
                found = self._column(row, key, "--target-key")
                if found.strip(BLANK):
                    return found
        return None

    def _column(self, row: DataRow, key: str, flag: str) -> str:
        """A column's text; of a number its JSON form."""
        value = row.columns.get(key)
        if self._lists and isinstance(value, list) and all(isinstance(x, str) for x in value):
            value = "\n".join(value)
        half = surrogate_of(value) if isinstance(value, str) else ""
        if isinstance(value, str) and not half:
            return value
        if isinstance(value, Decimal) and value.is_finite():
            return f"{value:f}"
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole or (isinstance(value, float) and math.isfinite(value)):
            return json.dumps(value)
        wrong = f"has no text in '{key}'" if key in row.columns else f"has no '{key}'"
        hint = f"Name the column: {flag} NAME."
        if half:
            wrong, hint = f"has {half} in '{key}', half of a character", "Write the text as UTF-8."
        raise InputError(
            "dataset-invalid",
            f"{self._name}: {row.where} {wrong}. It has: {row.named}.",
            hint,
            path=self._name,
            key=key,
        )


def _is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, no text, or NaN, which tables of numbers write."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


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


def sample_seed(seed: int, sample: str) -> int:
    """The seed of a sample's search: a number in [0, 2**32) that both of these determine.

    The random numbers of a block follow from the seed and the block's place in the tree. With one
    seed for all samples, equal places would share their luck, and a rate would vary more between
    seeds than its interval over samples says.

    Args:
        seed: of the run.
        sample: the sample's id, or its text.
    """
    digest = hashlib.blake2b(f"{seed}\n{sample}".encode("utf-8", "surrogatepass"), digest_size=4)
    return int.from_bytes(digest.digest(), "big")
