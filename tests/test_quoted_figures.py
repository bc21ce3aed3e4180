"""Figures with an interval that the pages for users quote are rows of docs/experiments."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "experiments"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "which.md",
    *sorted((ROOT / "docs/papers").glob("*.md")),
]
# "65.4 % (61.1 to 69.6)", "1.06 times the time (1.03 to 1.09)": a value, some words, its interval
QUOTED = re.compile(
    r"(?<![\d.])(\d[\d,]*(?:\.\d+)?)(?: %| [a-z ]{1,60})? ?\((\d[\d.]*) to (\d[\d.]*)(?:;[^)]*)?\)"
)
Figure = tuple[str, str, str]
# smallest, mean and largest of several rows: of the ratios in peers.csv
SUMMARIES = [("1.26", "1.18", "1.41")]


def rows() -> list[list[float]]:
    """The numbers of every measured row, without their signs."""
    found = []
    for path in sorted(DATA.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as lines:
            found += [numbers(row) for row in csv.reader(lines)]
    return found


def numbers(cells: list[str]) -> list[float]:
    found = []
    for cell in cells:
        try:
            found.append(abs(float(cell)))
        except ValueError:
            continue
    return found


def holds(row: list[float], figure: Figure) -> bool:
    """Whether a row has the value and both ends, rounded as they are quoted."""
    return all(
        any(abs(number - float(text.replace(",", ""))) <= half(text) for number in row)
        for text in figure
    )


def half(text: str) -> float:
    """Half of the last digit, as it is quoted."""
    decimals = len(text.partition(".")[2])
    return 0.5 * 10**-decimals + 1e-9


def quoted(page: Path) -> Iterator[Figure]:
    """The figures of a page; in a table of claims those of the paper are left out."""
    published = False
    for line in page.read_text("utf-8").splitlines():
        cells = line.split(" | ")
        published = line.startswith("|") and (published or cells[1:2] == ["paper"])
        ours = " | ".join([cells[0], *cells[2:]]) if published else line
        for found in QUOTED.finditer(ours):
            figure = (found.group(1), found.group(2), found.group(3))
            if figure not in SUMMARIES:
                yield figure


@pytest.fixture(scope="module")
def measured() -> list[list[float]]:
    return rows()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_figure_with_an_interval_is_a_measured_row(
    page: Path, measured: list[list[float]]
) -> None:
    for figure in quoted(page):
        assert any(holds(row, figure) for row in measured), (
            f"no row of docs/experiments has {figure[0]} ({figure[1]} to {figure[2]})"
        )


def test_figures_are_found_and_a_changed_one_is_noticed(measured: list[list[float]]) -> None:
    found = [figure for page in PAGES for figure in quoted(page)]

    assert len(found) > 40
    assert not any(holds(row, ("65.5", "61.1", "69.6")) for row in measured)
