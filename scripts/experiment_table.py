"""Tables of measurements (docs/experiments/*.csv): a script's options for them, and its rows."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options for the file that rows are appended to, and for what they record of the run."""
    parser.add_argument("--csv", type=Path, help="append the rows to this table")
    parser.add_argument("--machine", default="", help="a machine of EXPERIMENTS.md, for the table")
    parser.add_argument("--conditions", default="", help="what else ran, for the table")


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit checked out in a folder, seven digits; empty outside a repository."""
    found = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


class ExperimentTable:
    """A CSV table that one run of a script appends rows to.

    Args:
        given: the script's options (`add_options`); no file without ``--csv``.
        command: of the rows; None: as it was typed, of absolute paths the names.

    Raises:
        SystemExit: a row whose columns are not those of the file.
    """

    def __init__(self, given: argparse.Namespace, command: str | None = None) -> None:
        self._path: Path | None = given.csv
        self._known = {
            "date": datetime.date.today().isoformat(),
            "commit": getattr(given, "commit", None) or commit(),
            "machine": given.machine,
            "conditions": given.conditions,
        }
        given_names = (Path(each).name if each.startswith("/") else each for each in sys.argv[1:])
        typed = shlex.join([Path(sys.argv[0]).name, *given_names])
        self._command = typed if command is None else command

    def show(self, row: Mapping[str, Any], note: str = "") -> None:
        """Print a row, and append it."""
        print(json.dumps(row), flush=True)
        self.add(row, note)

    def add(self, row: Mapping[str, Any], note: str = "") -> None:
        """Append a row with the date, commit, machine, conditions and command in front and after.

        Args:
            row: from column to value; `n` and `n_of` last.
            note: of its last column.
        """
        if self._path is None:
            return
        full = {**self._known, **row, "command": self._command, "note": note}
        new = not self._path.exists()
        with self._path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            columns = list(full) if new else next(csv.reader(file))
            if set(columns) != set(full):
                differ = ", ".join(sorted(set(columns) ^ set(full)))
                raise SystemExit(f"{self._path}: has other columns: {differ}. Name another file.")
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(full)
