"""Data and pages of experiments: CSV files are whole, and pages show what the files hold."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "EXPERIMENTS.md"
DATA = ROOT / "docs" / "experiments"
FILES = sorted(DATA.glob("*.csv"))
PAGES = sorted(DATA.glob("*.md"))
QUOTING = [ROOT / "README.md", ROOT / "docs/which.md", *(ROOT / "docs/papers").glob("*.md"), *PAGES]
REQUIRED = ("date", "commit", "machine", "command", "n", "n_of")
UNKNOWN = "not recorded"
# columns with these endings, and these columns, hold a number or nothing
NUMBERS = re.compile(
    r"(^|_)(percent|points|us|ms|s|mb|low|high|ratio|tokens|mean|blocks|events|seeks|trees|answers"
    r"|generated|fraction|width|times_less|value|problem|steps_low|steps_high)$"
)
# "65.4 % (61.1 to 69.6)", "1.06 times the time (1.03 to 1.09)": a value, some words, its interval
QUOTED = re.compile(
    r"(?<![\d.])(\d[\d,]*(?:\.\d+)?)(?: %| [a-z ]{1,60})? ?\((\d[\d.]*) to (\d[\d.]*)(?:;[^)]*)?\)"
)
# smallest, mean and largest of several rows: of the ratios in peers.csv
SUMMARIES = [("1.26", "1.18", "1.41")]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """The script that renders the pages."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "scripts" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["report"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def machines() -> set[str]:
    """The names in the table of machines."""
    section = INDEX.read_text("utf-8").partition("\n## Machines\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([^|]*?) \|", section, re.MULTILINE)) - {"name"}


def table_of(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as lines:
        header, *rows = csv.reader(lines, strict=True)
    return header, rows


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a CSV file of measurements."""
    header, lines = table_of(path)
    if not set(REQUIRED) <= set(header) or len(set(header)) < len(header) or not lines:
        yield "a column is missing or twice, or there is no row"
        return
    if {len(line) for line in lines} != {len(header)}:
        yield "lines of different lengths"
        return
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    if [row["date"] for row in rows] != sorted(row["date"] for row in rows):
        yield "rows are not oldest first"
    if len({tuple(line) for line in lines}) < len(lines):
        yield "a row is there twice"
    for number, row in enumerate(rows, 2):
        yield from (f"line {number}: {fault}" for fault in row_faults(row))


def row_faults(row: dict[str, str]) -> Iterator[str]:
    try:
        datetime.date.fromisoformat(row["date"])
    except ValueError:
        yield "no date"
    if not all(row[name] for name in REQUIRED) or row["command"] == "same":
        yield "every row stands alone"
    if row["commit"] != UNKNOWN and not re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]):
        yield "no commit"
    if row["n"] != UNKNOWN and not (row["n"].isdecimal() and int(row["n"]) > 0):
        yield "no n"
    if row["machine"] not in machines() | {UNKNOWN}:
        yield "a machine that EXPERIMENTS.md does not describe"
    measured = {name: value for name, value in row.items() if NUMBERS.search(name) and value}
    if any(number(value) is None for value in measured.values()):
        yield "a number is text"
        return
    for name in (name for name in row if "_low" in name and row[name]):
        high, value = row[name.replace("_low", "_high")], row.get(name.replace("_low", ""))
        if not float(row[name]) <= float(value or high) <= float(high):
            yield f"{name} is above the value or its upper end"


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def test_every_csv_file_is_whole() -> None:
    assert [f"{path.name}: {fault}" for path in FILES for fault in faults(path)] == []


def test_a_faulty_csv_file_is_noticed(tmp_path: Path) -> None:
    header = [*REQUIRED, "ratio", "ratio_low", "ratio_high"]
    good = ["2026-11-21", "5d3e210", "epyc", "bench.py", "3", "rounds", "2", "1", "3"]
    wrong = {
        "date": "2026-13-01",
        "commit": "main",
        "machine": "laptop",
        "command": "same",
        "n": "0",
        "ratio": "2x",
        "ratio_low": "2.5",
    }

    def found(*rows: list[str]) -> list[str]:
        path = tmp_path / "measured.csv"
        path.write_text("".join(",".join(row) + "\n" for row in (header, *rows)), "utf-8")
        return list(faults(path))

    assert found(good) == []
    for name, value in wrong.items():
        place = header.index(name)
        assert len(found([*good[:place], value, *good[place + 1 :]])) == 1, name
    for rows in ([], [good, good], [good, good[1:]], [good, ["2026-11-20", *good[1:]]]):
        assert len(found(*rows)) == 1


def test_every_question_of_a_page_has_its_verdict(report: ModuleType) -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        asked = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert text.split("\n")[2].startswith("Verdict: "), page.name
        assert [question for question, _, _ in report.VERDICT.findall(text)] == asked, page.name
        assert text.count("\nVerdict: ") == len(asked), page.name


def test_the_pages_are_short_and_complete(report: ModuleType) -> None:
    index = INDEX.read_text("utf-8")
    text = "".join(page.read_text("utf-8") for page in PAGES)

    assert len(index.splitlines()) <= 200 and len(PAGES) <= 14
    listed = re.findall(r"<!-- verdicts: (\S+) -->", index)
    assert sorted(listed) == [page.stem for page in PAGES]
    assert sorted(re.findall(r"<!-- table: (\S+) -->", text)) == sorted(report.TABLES)
    links = set(re.findall(r"\]\((?:docs/experiments/)?([\w.]+)", index + text))
    assert {path.name for path in DATA.iterdir()} <= links, "a file no page links to"


def test_verdicts_and_tables_are_what_the_pages_and_csv_files_give(report: ModuleType) -> None:
    for page in (INDEX, *PAGES):
        text = page.read_text("utf-8")
        assert report.filled(text) == text, f"{page.name}: run python scripts/report.py"


def test_a_table_that_was_changed_by_hand_is_noticed(report: ModuleType) -> None:
    page = (DATA / "controllers.md").read_text("utf-8")
    changed = page.replace("| 94.4 (92.0 to 96.2) | 52.0", "| 99.9 (92.0 to 96.2) | 52.0")

    assert report.filled(changed) == page != changed


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


def test_a_plot_is_the_same_text_every_time(report: ModuleType) -> None:
    once = report.drawn("policy_cost")

    assert once == report.drawn("policy_cost")
    assert "<svg" in once and "h2o" in once and "dc:date" not in once
    assert {f"{name}.svg" for name in report.PLOTS} <= {path.name for path in DATA.iterdir()}


def test_a_plot_of_lossy_trees_shows_one_width_of_beam(report: ModuleType) -> None:
    half = report.PLOTS["lossy_trees"]().axes[1]
    lost, _ = half.get_legend_handles_labels()
    shown = [float(value) for value in lost[0].lines[0].get_xdata()]

    assert 97.6 in shown, "uniform with 5 beams"
    assert 99.8 not in shown, "uniform with 16 beams"


def measured() -> list[list[float]]:
    """The numbers of every measured row, without their signs."""
    rows = [row for path in FILES for row in table_of(path)[1]]
    return [[abs(value) for cell in row if (value := number(cell)) is not None] for row in rows]


def is_measured(figure: tuple[str, str, str], rows: list[list[float]]) -> bool:
    """Whether a row has the value and both ends, rounded as they are quoted."""
    wanted = [(float(text.replace(",", "")), half_of_last_digit(text)) for text in figure]
    return any(
        all(any(abs(value - each) <= half for each in row) for value, half in wanted)
        for row in rows
    )


def half_of_last_digit(text: str) -> float:
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


def quoted(page: Path) -> Iterator[tuple[str, str, str]]:
    """Values with an interval; in a table of claims those of the paper are left out."""
    published = False
    for line in page.read_text("utf-8").splitlines():
        cells = line.split(" | ")
        published = line.startswith("|") and (published or cells[1:2] == ["paper"])
        ours = " | ".join([cells[0], *cells[2:]]) if published else line
        for figure in QUOTED.findall(ours):
            if figure not in SUMMARIES:
                yield figure


def test_a_figure_with_an_interval_is_a_measured_row() -> None:
    rows = measured()
    found = [(page.name, figure) for page in QUOTING for figure in quoted(page)]

    assert len(found) > 500
    assert [each for each in found if not is_measured(each[1], rows)] == []
    assert not is_measured(("65.5", "61.1", "69.6"), rows), "a changed one is noticed"
