"""Data sets for tests: files of published problems that are not part of the repository.

They lie in the folder `ARBOR_TEST_DATA`, by default ``shared/data`` next to the checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "ARBOR_TEST_DATA"
NEXT_TO_THE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "data"


def data_folder() -> Path | None:
    """The folder with the data sets; None where there is none, and tests that need it skip."""
    found = Path(os.environ.get(VARIABLE) or NEXT_TO_THE_CHECKOUT)
    return found if found.is_dir() else None


def data_file(name: str) -> Path:
    """A file of the data folder, as ``gsm8k-test.jsonl``; skips the test where it is missing."""
    path = (data_folder() or NEXT_TO_THE_CHECKOUT) / name
    if not path.is_file():
        pytest.skip(f"{path} is missing: name the folder that holds it with {VARIABLE}")
    return path


def rows(name: str, n: int) -> list[dict[str, Any]]:
    """The first n rows of a file of JSON lines in the data folder."""
    lines = data_file(name).read_text(encoding="utf-8").splitlines()[:n]
    return [json.loads(line) for line in lines]
