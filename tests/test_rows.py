"""Rows of data files: equal in every format, read one at a time, errors that name the place."""

from __future__ import annotations

import io
import itertools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_cli import Arbor

from arbor.cli.evaluation.eval import new_folder
from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.errors import ArborError, InputError, UsageError
from arbor.measure.evaluation import rows
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.rows import Row, csv_rows, hub_rows, json_rows, jsonl_rows
from arbor.tasks.arc import ARC
from arbor.tasks.base import Task
from arbor.tasks.gsm8k import GSM8K
from arbor.tasks.math import Math
from arbor.tasks.reasoning import Reasoning

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


def test_other_columns_are_named_by_their_options() -> None:
    Path("x.csv").write_text("q;x,a b\n1+1,2\n")

    (sample,) = samples("x.csv", Reasoning(), input_key="q;x", target_key="a b")
    assert (sample.text, sample.expected) == ("1+1", "2")


@settings(max_examples=50)
@given(
    st.lists(st.fixed_dictionaries({"a": st.text(max_size=9), "b": st.integers()}), max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
)
def test_an_array_is_read_in_pieces_of_any_size(
    table: list[dict[str, Any]], chunk: int, indent: int | None
) -> None:
    text = f" \n{json.dumps(table, indent=indent)} "
    before, rows.CHUNK = rows.CHUNK, chunk
    try:
        found = [row.columns for row in json_rows(io.StringIO(text), "x")]
    finally:
        rows.CHUNK = before

    assert found == table


@given(st.text('[]{},:1"a \n', max_size=30))
def test_a_damaged_array_is_one_error_or_its_rows(text: str) -> None:
    try:
        found = [row.columns for row in json_rows(io.StringIO(f"[{text}"), "x")]
    except InputError as error:
        assert error.code == "dataset-invalid" and "row" in error.message
    else:
        decoded, _ = json.JSONDecoder().raw_decode(f"[{text}")
        assert found == decoded


# Streaming


class Endless(io.TextIOBase):
    """A text of equal lines that counts what was read of it, and must not be read to its end."""

    def __init__(self, first: str, line: str) -> None:
        self.given = 0
        self._lines = itertools.chain([first], itertools.repeat(line, MANY))
        self._rest = ""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self.given += 1
        return next(self._lines, "")

    def __next__(self) -> str:
        return self.readline()

    def read(self, size: int | None = -1, /) -> str:
        assert size is not None and size > 0, "it is not read as a whole"
        text = self._rest
        while len(text) < size:
            text += self.readline()
        self._rest = text[size:]
        return text[:size]


@pytest.mark.parametrize(
    ("reader", "first", "line"),
    [
        (jsonl_rows, "", '{"problem": "1+1"}\n'),
        (json_rows, "[\n", '{"problem": "1+1"},\n'),
        (json_rows, "\n", '{"problem": "1+1"}\n'),
        (csv_rows, "problem,answer\n", "1+1,2\n"),
    ],
)
def test_only_the_rows_that_are_used_are_read(reader: Any, first: str, line: str) -> None:
    stream = Endless(first, line)

    found = list(itertools.islice(reader(stream, "x"), 100))

    assert len(found) == 100
    assert stream.given < 10_000 < MANY


def test_a_limit_reads_no_more_of_a_file_than_it_needs() -> None:
    good = '{"problem": "1+1", "answer": "2", "id": %d}\n'
    lines = [good % number for number in range(2000)]
    Path("x.jsonl").write_bytes("".join(lines).encode() + b"\xff\n")

    assert len(samples("x.jsonl", Reasoning(), limit="100")) == 100
    assert [each.id for each in samples("x.jsonl", Reasoning(), limit="101-102")] == ["100", "101"]
    with pytest.raises(InputError, match=r"not-utf8.*\(line 2001\)"):
        samples("x.jsonl", Reasoning())


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


def test_a_parquet_file_is_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))

    table = pyarrow.table(
        {"question": ["1+1?"] * 5000, "answer": [f"#### {n}" for n in range(5000)]}
    )
    parquet.write_table(table, "x.parquet", row_group_size=500)
    taken = []
    own = rows.Row

    def counted(where: str, columns: Any) -> Row:
        taken.append(where)
        return own(where, columns)

    monkeypatch.setattr(rows, "Row", counted)

    assert [each.expected for each in samples("x.parquet", GSM8K(), limit="3")] == ["0", "1", "2"]
    assert taken == ["row 1", "row 2", "row 3"]


# Data sets as they are published


def test_rows_of_the_well_known_data_sets_need_no_options() -> None:
    Path("gsm8k.jsonl").write_text(
        json.dumps({"question": "How many?", "answer": "6*12=<<6*12=72>>72\n#### 72"})
    )
    choices = {"text": ["a magnet", "a mirror"], "label": ["1", "2"]}
    Path("arc.jsonl").write_text(
        json.dumps({"id": "M1", "question": "Which?", "choices": choices, "answerKey": "2"})
    )
    row = {"problem": "x?", "solution": "So\n\\boxed{\\frac12}.", "unique_id": "a/1.json"}
    Path("math.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "3"}) + "\n")

    (gsm,) = samples("gsm8k.jsonl", GSM8K())
    assert (gsm.text, gsm.expected) == ("How many?", "72")
    (arc,) = samples("arc.jsonl", ARC())
    assert (arc.id, arc.text, arc.expected) == ("M1", "Which?\nA. a magnet\nB. a mirror", "B")
    with pytest.raises(InputError, match=r"have the id 'a/1.json' and differ"):
        samples("math.jsonl", Math(grader="exact"))
    (first,) = samples("math.jsonl", Math(grader="exact"), limit="1")
    assert first.expected == "\\frac12"


def test_a_row_without_a_key_names_its_place() -> None:
    Path("x.jsonl").write_text(
        '{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "?"}\n'
    )

    with pytest.raises(InputError, match=r"x.jsonl, line 2: its answer has no number after ####"):
        samples("x.jsonl", GSM8K())


def test_a_row_without_a_key_counts_as_wrong_with_on_error_continue(command: Arbor) -> None:
    Path("x.jsonl").write_text(
        '{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "?"}\n'
    )

    ran = command(
        "eval", "x.jsonl", "--task", "gsm8k", "--on-error", "continue", "--output", "out", "--json"
    )

    assert ran.code == 0
    assert (ran.document["n"], ran.document["errors"]) == (2, 1)
    again = command(
        "eval", "x.jsonl", "--task", "gsm8k", "--on-error", "continue", "--output", "out", "--json"
    )
    assert again.document["n"] == 2


def test_a_cell_of_any_length_is_read_and_a_row_is_named_by_its_first_line() -> None:
    long = "a\n" * 100_000
    table = f'problem,answer\none,1\n\n"{long}",2\nthree,3\n'

    found = list(csv_rows(io.StringIO(table, newline=""), "x.csv"))

    assert [row.columns["answer"] for row in found] == ["1", "2", "3"]
    assert found[1].columns["problem"] == long
    assert [row.where for row in found] == ["line 2", "line 4", "line 100005"]
    for end, words in (('"open\n' + long, "line 4 is not CSV"), ("1,2,3\n", "line 4 has more")):
        with pytest.raises(InputError, match=rf"x.csv: {words}"):
            list(csv_rows(io.StringIO(f"a,b\none,1\n\n{end}", newline=""), "x.csv"))


@pytest.mark.parametrize("nothing", ["null", "NaN", '""'])
def test_what_says_nothing_is_neither_an_id_nor_a_key(nothing: str) -> None:
    both = [
        f'{{"id": {nothing}, "problem": "{name}", "key": {key}}}'
        for name, key in (("one", 1), ("two", 2))
    ]
    Path("x.jsonl").write_text("\n".join(both), encoding="utf-8")
    first, second = samples("x.jsonl", Reasoning(), target_key="key")
    assert first.id != second.id and len(first.id) > 8

    Path("x.jsonl").write_text(f'{{"problem": "one", "key": {nothing}}}', encoding="utf-8")
    with pytest.raises(InputError, match="line 1: its 'key' is empty"):
        samples("x.jsonl", Reasoning(), target_key="key")


# Optional packages


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = rows.importlib.util.find_spec
    monkeypatch.setattr(
        rows.importlib.util, "find_spec", lambda each: None if each == name else find(each)
    )


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without("pyarrow", monkeypatch)
    Path("x.parquet").write_bytes(b"PAR1")

    with pytest.raises(UsageError, match=r"extra-missing.*arbor-search\[parquet\]"):
        samples("x.parquet", Reasoning())


def test_the_hub_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without("datasets", monkeypatch)

    with pytest.raises(UsageError, match=r"extra-missing.*arbor-search\[hub\]"):
        samples("hf:openai/gsm8k/main:test", GSM8K())


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


def test_the_hub_out_of_reach_is_one_error(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InputError, match=r"Couldn't reach the Hub. Try again.*downloaded file"):
        samples("hf:openai/gsm8k/main:nowhere", GSM8K())


@pytest.mark.parametrize("name", ["hf:", "hf:gsm8k", "hf:a/b/c/d", "hf:a/b:", "hf:a/b c"])
def test_another_form_of_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="dataset-format"):
        next(hub_rows(name))


def test_a_run_of_the_hub_has_a_folder_and_a_configuration(
    hub: list[tuple[Any, ...]], command: Arbor
) -> None:
    arguments = ("eval", "hf:a/b:test", "--task", "gsm8k", "--limit", "2", "--json")
    ran = command(*arguments, "--output", "out")

    assert ran.document["n"] == 2
    assert 'dataset = "hf:a/b:test"' in Path("out/run.toml").read_text("utf-8")
    assert command(*arguments, "--output", "out").document["n"] == 2
    assert "_a-b-test_" in new_folder("hf:a/b:test", {}).name


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
