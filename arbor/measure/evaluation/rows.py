"""Rows of data files, read one after another: JSON, CSV, Parquet, and data sets of the Hub.

A reader holds a row at a time (Parquet: a batch of rows; a JSON array: all), so that the first
hundred of a million rows cost no more than a hundred.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from arbor.errors import InputError, UsageError
from arbor.support.texts import one_line

LONGEST_SHOWN = 200  # characters of a row's columns in an error
BATCH = 256  # rows of a Parquet file
LONGEST_CELL = 2**31 - 1  # characters; csv's own limit is 131,072
HUB = "hf:"  # before the name of a data set of the Hub

_SHORTER_FLOATS = {"halffloat": np.float16, "float": np.float32}  # types of Parquet columns
_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.+-]+))?")


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row.

    Attributes:
        where: its place, for people: ``line 3``.
        columns: values by name.
    """

    where: str
    columns: Mapping[str, Any]

    @property
    def named(self) -> str:
        """The names of its columns, for an error."""
        return ", ".join(map(str, self.columns))[:LONGEST_SHOWN] or "nothing"


def jsonl_rows(stream: Iterable[str], name: str) -> Iterator[DataRow]:
    """The object of every line that is not blank.

    Args:
        stream: split at newlines only; other separators of lines are text.

    Raises:
        InputError: a line is not a JSON object.
    """
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_row(name, f"line {number}", f"is not JSON ({_reason(error)})") from error
        if not isinstance(row, dict):
            raise _no_row(name, f"line {number}", "is not a JSON object")
        yield DataRow(f"line {number}", row)


def json_rows(stream: IO[str], name: str) -> Iterator[DataRow]:
    """The objects of an array, which is read as a whole; of a file without one, those of its lines.

    Raises:
        InputError: something else.
    """
    begun: list[str] = []
    for line in stream:
        begun.append(line)
        if line.strip():
            break
    text = "".join(begun)
    if not text.lstrip().startswith("["):
        yield from jsonl_rows(itertools.chain(begun, stream), name)
        return
    try:
        rows = json.loads(text + stream.read())
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "the array"
        raise _no_row(name, where, f"is not JSON ({_reason(error)})") from error
    for place, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _no_row(name, f"row {place}", "is not a JSON object")
        yield DataRow(f"row {place}", row)


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _no_row(name: str, where: str, what: str) -> InputError:
    return InputError(
        "dataset-invalid",
        f"{name}: {where} {what}.",
        'Each row is one object, as in {"problem": "4 5 6 10", "answer": "24"}.',
        path=name,
        where=where,
    )


def csv_rows(stream: Iterable[str], name: str, delimiter: str = ",") -> Iterator[DataRow]:
    """The cells of every row that are not empty; the first line names the columns.

    Args:
        stream: with its line ends as they are.
        delimiter: between cells.

    Raises:
        InputError: invalid CSV, a column named twice, or a row with more cells than columns.
    """
    kind = "TSV" if delimiter == "\t" else "CSV"
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(stream, strict=True, delimiter=delimiter)
    line = 1  # where the row begins: cells may have several
    try:
        names = next(reader, [])
        twice = next((each for each in names if each and names.count(each) > 1), None)
        if twice is not None:
            raise _no_cells(name, 1, f"names the column '{twice}' twice", "Rename one of them.")
        while True:
            line = reader.line_num + 1
            cells = next(reader, None)
            if cells is None:
                return
            if len(cells) > len(names):
                raise _no_cells(
                    name,
                    line,
                    "has more cells than the first line has names",
                    f'Put a cell with a {"tab" if kind == "TSV" else "comma"} in quotes: "1,000".',
                )
            columns = {key: cell for key, cell in zip(names, cells, strict=False) if cell}
            if cells:
                yield DataRow(f"line {line}", columns)
    except csv.Error as error:
        raise _no_cells(
            name,
            line,
            f"is not {kind} ({error})",
            f"The first line names the columns, as in: problem{delimiter}answer. "
            'A quote inside is "".',
        ) from error


def _no_cells(name: str, line: int, what: str, hint: str) -> InputError:
    return InputError("dataset-invalid", f"{name}: line {line} {what}.", hint, path=name, line=line)


def parquet_rows(path: Path, name: str) -> Iterator[DataRow]:
    """The rows of a Parquet file.

    Raises:
        UsageError: pyarrow is not installed.
        InputError: the file is not Parquet.
    """
    _need("pyarrow", "parquet", f"{name} is Parquet, which needs pyarrow")
    import pyarrow
    import pyarrow.parquet

    place = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for at in range(batch.num_rows):
                    place += 1
                    yield DataRow(f"row {place}", _Cells(batch, at, f"{name}: row {place:,}"))
    except pyarrow.ArrowException as error:
        raise InputError(
            "dataset-invalid",
            f"{name}: row {place + 1:,} cannot be read as Parquet ({one_line(str(error))}).",
            "Write the file again; a file of JSON lines ends in .jsonl.",
            path=name,
        ) from error


class _Cells(Mapping[str, Any]):
    """The cells of a row of a Parquet file, each converted when it is asked for.

    Args:
        batch: the pyarrow.RecordBatch that has the row.
        at: its place there.
        where: file and row, for errors.
    """

    def __init__(self, batch: Any, at: int, where: str) -> None:
        self._batch = batch
        self._at = at
        self._where = where

    def __getitem__(self, key: str) -> Any:
        """A cell; a float of fewer than 64 bits as the shortest one that its own type reads so.

        Raises:
            InputError: Python has no such value, as a time before the year 1 or in nanoseconds.
        """
        columns = self._batch.schema.get_all_field_indices(key)
        if not columns:
            raise KeyError(key)
        column = self._batch.column(columns[-1])
        shorter = _SHORTER_FLOATS.get(str(column.type))
        try:
            value = column[self._at].as_py()
            return value if shorter is None or value is None else float(str(shorter(value)))
        except (ValueError, OverflowError) as error:
            raise InputError(
                "dataset-invalid",
                f"{self._where} has a '{key}' that cannot be read ({one_line(str(error))}).",
                "Write that column as text.",
                key=key,
            ) from error

    def __contains__(self, key: object) -> bool:
        return key in self._batch.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)


def hub_rows(name: str) -> Iterator[DataRow]:
    """The rows of a data set of the Hugging Face Hub, read as they arrive.

    Args:
        name: ``hf:OWNER/NAME:SPLIT``, or ``hf:OWNER/NAME/CONFIG:SPLIT``; the split ``test`` where
            none is named.

    Raises:
        UsageError: another form, or the package datasets is not installed.
        InputError: it cannot be read.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise UsageError(
            "dataset-format",
            f"{name} is not the name of a data set of the Hub.",
            "Write hf:OWNER/NAME:SPLIT, or hf:OWNER/NAME/CONFIG:SPLIT, as in "
            "hf:openai/gsm8k/main:test.",
            path=name,
        )
    _need("datasets", "hub", f"{name} is a data set of the Hub, which needs datasets")
    path, config, split = match[1], match[2], match[3] or "test"
    place = 0
    try:
        import datasets

        for columns in datasets.load_dataset(path, config, split=split, streaming=True):
            place += 1
            yield DataRow(f"row {place}", columns)
    except Exception as error:  # the library raises those of the network, the Hub and the file
        reason = one_line(str(error))[:LONGEST_SHOWN] or type(error).__name__
        raise InputError(
            "dataset-unreadable",
            f"{name} cannot be read: {reason.rstrip('.')}.",
            "Without a network give a downloaded file, as in: arbor eval test.parquet --task gsm8k.",
            path=name,
        ) from error


def _need(package: str, extra: str, what: str) -> None:
    """Refuse to go on without an optional package."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec is loaded
        return
    if found is None:
        raise UsageError(
            "extra-missing",
            f"{what}, and it is not installed.",
            f"pip install 'arbor-search[{extra}]', or give the rows as a .jsonl file.",
            extra=extra,
        )
