"""EXPERIMENTS.md and its data: every CSV file is whole, and the page shows what the files hold."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "EXPERIMENTS.md"
DATA = ROOT / "docs" / "experiments"
FILES = sorted(DATA.glob("*.csv"))
PAGES = [PAGE, *sorted(DATA.glob("*.md"))]
REQUIRED = ("date", "commit", "machine", "command", "n", "n_of")
UNKNOWN = "not recorded"
# columns with these endings, and these columns, hold a number or nothing
NUMBERS = re.compile(
    r"(^|_)(percent|points|us|ms|s|mb|low|high|ratio|tokens|mean|blocks|events|seeks|trees|answers"
    r"|generated|fraction|width|times_less|value|problem|steps_low|steps_high)$"
)


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """The script that renders the page."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "scripts" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["report"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def lines_of(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as lines:
        header, *rows = csv.reader(lines, strict=True)
    return header, rows


def rows_of(path: Path) -> list[dict[str, str]]:
    header, rows = lines_of(path)
    return [dict(zip(header, row, strict=True)) for row in rows]


def machines() -> set[str]:
    """The names in the page's table of machines."""
    section = PAGE.read_text("utf-8").partition("\n## Machines\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([^|]*?) \|", section, re.MULTILINE)) - {"name"}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_csv_file_is_rectangular_and_says_what_every_row_needs(path: Path) -> None:
    header, rows = lines_of(path)

    assert set(REQUIRED) <= set(header) and len(set(header)) == len(header)
    assert rows and {len(row) for row in rows} == {len(header)}
    for row in rows_of(path):
        assert all(row[name] for name in REQUIRED), row
        assert row["commit"] == UNKNOWN or re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), row
        assert row["n"] == UNKNOWN or int(row["n"]) > 0, row
        assert row["command"] != "same", "every row stands alone"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_csv_file_is_appended_to(path: Path) -> None:
    rows = rows_of(path)
    dates = [datetime.date.fromisoformat(row["date"]) for row in rows]

    assert dates == sorted(dates), "oldest first"
    assert len({tuple(row.values()) for row in rows}) == len(rows), "a row is there twice"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_numbers(path: Path) -> None:
    for row in rows_of(path):
        for name, value in row.items():
            if NUMBERS.search(name) and value:
                float(value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_value_lies_in_its_interval(path: Path) -> None:
    for row in rows_of(path):
        for name, low in row.items():
            if "_low" in name and low:
                high = row[name.replace("_low", "_high")]
                assert float(low) <= float(high), row
                value = row.get(name.replace("_low", ""))
                if value:
                    assert float(low) <= float(value) <= float(high), (name, row)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_machines_of_a_csv_file_are_in_the_table(path: Path) -> None:
    known = machines()

    assert known
    assert {row["machine"] for row in rows_of(path)} <= known | {UNKNOWN}


def test_the_page_is_short_and_its_notes_are() -> None:
    assert len(PAGE.read_text("utf-8").splitlines()) <= 200
    for notes in DATA.glob("*.md"):
        assert len(notes.read_text("utf-8").splitlines()) <= 80, notes.name


def test_the_tables_of_the_page_are_what_the_csv_files_give(report: ModuleType) -> None:
    page = PAGE.read_text("utf-8")

    assert report.filled(page) == page, "run python scripts/report.py"


def test_every_table_is_on_the_page_and_no_longer_than_six_rows(report: ModuleType) -> None:
    named = re.findall(r"<!-- table: (\S+) -->", PAGE.read_text("utf-8"))

    assert sorted(named) == sorted(report.TABLES)
    for name, table in report.TABLES.items():
        rows = report.rendered(table).splitlines()[2:]
        assert 1 <= len(rows) <= 6, name


def test_a_row_that_is_appended_replaces_the_older_one_on_the_page(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "policy,machine,n,event_us,event_q1_us,event_q3_us\n"
    (tmp_path / "times.csv").write_text(
        header + "lru,epyc,30,300,290,310\nh2o,epyc,30,2500,2400,2600\nlru,epyc,40,200,190,1210\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(report, "DATA", tmp_path)
    columns = (report.Column("n", "n"), report.microseconds("time (µs)", "event"))
    table = report.Table("times", {"policy": "policy"}, columns, {"policy": ("h2o", "lru")})

    assert report.rendered(table).splitlines() == [
        "| policy | n | time (µs) |",
        "| --- | --: | --: |",
        "| h2o | 30 | 2,500 (2,400 to 2,600) |",
        "| lru | 40 | 200 (190 to 1,210) |",
    ]


def test_a_table_that_was_changed_by_hand_is_noticed(report: ModuleType) -> None:
    page = PAGE.read_text("utf-8")
    number = re.search(r"<!-- table: solved -->.*?(\d\d\.\d) %", page, re.DOTALL)
    assert number is not None
    changed = page[: number.start(1)] + "99.9" + page[number.end(1) :]

    assert report.filled(changed) == page != changed


def test_the_plots_are_there_and_linked(report: ModuleType) -> None:
    linked = {(page.parent / target).resolve() for page in PAGES for target in links(page)}

    assert {f"{name}.svg" for name in report.PLOTS} <= {path.name for path in DATA.glob("*.svg")}
    assert {path.resolve() for path in DATA.iterdir()} <= linked, "a file no page links to"


def test_a_plot_is_the_same_text_every_time(report: ModuleType) -> None:
    once = report.drawn("policy_cost")

    assert once == report.drawn("policy_cost")
    assert "<svg" in once and "h2o" in once and "dc:date" not in once
