"""Rows of data files: equal in every format, read one at a time, errors that name the place."""

from __future__ import annotations

import io
import itertools
import json
import sys
import types
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.errors import ArborError, InputError
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.rows import csv_rows, hub_rows, json_rows, jsonl_rows
from arbor.tasks.base import Task
from arbor.tasks.reasoning import GSM8K, Reasoning

MANY = 1_000_000


def samples(path: str, task: Task, **options: Any) -> list[Sample]:
    given = DatasetOptions(
        **{
            "dataset": path,
            "split": None,
            "input_key": None,
            "target_key": None,
            "encoding": "utf-8",
            "limit": None,
            "sample_id": (),
            **options,
        }
    )
    return read_samples(given, task, stop_on_error=True)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Formats

TABLE = [
    {"problem": 'What is "2+2"?', "answer": "4", "id": "one"},
    {"problem": "Zwei\u2028Zeilen,\tund½", "answer": "1,000", "id": "two"},
    {"problem": "Which\nline?", "answer": "2", "id": "three"},
]


def write_formats(table: list[dict[str, str]]) -> list[str]:
    import csv

    Path("a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in table), "utf-8")
    Path("a.json").write_text(json.dumps(table, indent=1, ensure_ascii=False), "utf-8")
    Path("lines.json").write_text("\n\n".join(json.dumps(each) for each in table), "utf-8")
    names = ["a.jsonl", "a.json", "lines.json"]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with Path(name).open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(table)
        names.append(name)
    return names


def test_every_format_has_the_same_samples() -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))

    names = write_formats(TABLE)
    parquet.write_table(pyarrow.Table.from_pylist(TABLE), "a.parquet")

    for name in (*names, "a.parquet"):
        found = samples(name, Reasoning())
        assert [each.id for each in found] == ["one", "two", "three"], name
        assert [each.expected for each in found] == ["4", "1,000", "2"]
        assert [each.text for each in found] == [each["problem"] for each in TABLE]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32-be", "gb18030"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_file_may_begin_with_a_byte_order_mark(encoding: str, mark: str) -> None:
    mark = "" if encoding == "utf-16" else mark  # which writes one by itself
    for name in ("a.jsonl", "a.csv"):
        text = (
            '{"problem": "½?", "answer": "1"}\n' if name == "a.jsonl" else "problem,answer\n½?,1\n"
        )
        Path(name).write_bytes((mark + text).encode(encoding))
        found = samples(name, Reasoning(), encoding=encoding)
        assert [each.text for each in found] == ["½?"]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (lambda pa: pa.timestamp("ns"), 1),
        (lambda pa: pa.timestamp("us"), 2**62),
        (lambda pa: pa.duration("ns"), 1),
        (lambda pa: pa.date32(), 10**9),
        (lambda pa: pa.list_(pa.timestamp("ns")), [1]),
    ],
)
def test_a_time_that_python_cannot_hold_ends_nothing_unless_it_is_needed(
    type_: Any, value: Any
) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    columns = {"problem": ["1+1"], "answer": ["2"], "made": pyarrow.array([value], type_(pyarrow))}
    parquet.write_table(pyarrow.table(columns), "a.parquet")

    assert [each.text for each in samples("a.parquet", Reasoning())] == ["1+1"]
    with pytest.raises(InputError, match="row 1 has a 'made' that cannot be read") as e:
        samples("a.parquet", Reasoning(), input_key="made")
    assert e.value.code == "dataset-invalid"


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (lambda pa: pa.float16(), np.float16(0.1), "0.1"),
        (lambda pa: pa.float32(), 0.1, "0.1"),
        (lambda pa: pa.float32(), 16777216.0, "16777216.0"),
        (lambda pa: pa.float64(), 0.1, "0.1"),
        (lambda pa: pa.decimal128(9, 2), Decimal("-12.50"), "-12.50"),
        (lambda pa: pa.decimal256(60, 2), Decimal("1.25"), "1.25"),
    ],
)
def test_a_number_of_a_column_is_as_long_as_its_type_needs(
    type_: Any, value: Any, text: str
) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    numbers = pyarrow.array([value, None], type_(pyarrow))
    parquet.write_table(pyarrow.table({"problem": ["?", "!"], "answer": numbers}), "a.parquet")

    (sample,) = samples("a.parquet", Reasoning(), limit="1")
    assert sample.expected == text
    with pytest.raises(InputError, match="row 2: its 'answer' is empty"):
        samples("a.parquet", Reasoning())


# Streaming


class Endless(io.TextIOBase):
    """A text of equal lines that counts what was read of it, and must not be read to its end."""

    def __init__(self, first: str, line: str) -> None:
        self.given = 0
        self._lines = itertools.chain([first], itertools.repeat(line, MANY))

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self.given += 1
        return next(self._lines, "")

    def __next__(self) -> str:
        return self.readline()


@pytest.mark.parametrize(
    ("reader", "first", "line"),
    [
        (jsonl_rows, "", '{"problem": "1+1"}\n'),
        (json_rows, "\n", '{"problem": "1+1"}\n'),
        (csv_rows, "problem,answer\n", "1+1,2\n"),
    ],
)
def test_only_the_rows_that_are_used_are_read(reader: Any, first: str, line: str) -> None:
    stream = Endless(first, line)

    found = list(itertools.islice(reader(stream, "x"), 100))

    assert len(found) == 100
    assert stream.given < 10_000 < MANY


def test_calibration_and_evaluation_share_no_problem_whatever_the_file_looks_like() -> None:
    rows = [{"problem": f"problem {i}", "answer": str(i), "id": str(i)} for i in range(2000)]
    again = [{"answer": "0", "problem": f" {row['problem']}\n"} for row in reversed(rows)]
    found = {}
    for name, table in {"rows": rows, "again": again}.items():
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table), "utf-8")
        for split in ("calibration", "evaluation"):
            read = samples(f"{name}.jsonl", Reasoning(), split=split)
            found[name, split] = {each.text.strip() for each in read}

    assert found["rows", "calibration"] == found["again", "calibration"]
    assert found["rows", "evaluation"] == found["again", "evaluation"]
    assert not found["rows", "calibration"] & found["rows", "evaluation"]
    assert len(found["rows", "calibration"] | found["rows", "evaluation"]) == 2000
    assert 360 < len(found["rows", "calibration"]) < 440, "a fifth"
    few = samples("rows.jsonl", Reasoning(), split="calibration", limit="10")
    assert len(few) == 10 and {each.text for each in few} <= found["rows", "calibration"]


# Data sets as they are published


# Optional packages


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A module in place of ``datasets``; its calls."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str, streaming: bool) -> Iterator[Any]:
        calls.append((path, name, split, streaming))
        if split == "nowhere":
            raise ConnectionError("Couldn't reach the Hub.\nTry again.")
        return ({"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in itertools.count())

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_data_set_of_the_hub_is_streamed(hub: list[tuple[Any, ...]]) -> None:
    found = samples("hf:openai/gsm8k/main:train", GSM8K(), limit="3")

    assert [each.expected for each in found] == ["1", "2", "3"]
    assert hub == [("openai/gsm8k", "main", "train", True)]
    next(hub_rows("hf:openai/gsm8k"))
    assert hub[-1] == ("openai/gsm8k", None, "test", True)


# Any bytes


@settings(max_examples=150)
@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet"]))
def test_any_bytes_are_samples_or_one_error(data: bytes, suffix: str) -> None:
    path = Path(f"x{suffix}")
    path.write_bytes(data)

    try:
        found = samples(str(path), Reasoning())
    except ArborError as error:
        assert str(path) in error.message
    else:
        assert all(each.problem is not None for each in found)
