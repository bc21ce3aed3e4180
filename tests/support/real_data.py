"""Data sets for tests: files of published problems that are not part of the repository.

They lie in the folder `ARBOR_TEST_DATA`, by default ``shared/data`` next to the checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

NEXT_TO_THE_CHECKOUT = Path(__file__).parents[3] / "shared" / "data"


def data_file(name: str) -> Path:
    """A file of the data folder, as ``gsm8k-test.jsonl``; skips the test where it is missing."""
    given = os.environ.get("ARBOR_TEST_DATA")
    path = (Path(given) if given else NEXT_TO_THE_CHECKOUT) / name
    if not path.is_file():
        pytest.skip(f"{path} is missing: name the folder that holds it with ARBOR_TEST_DATA")
    return path


def rows(name: str, n: int) -> list[dict[str, Any]]:
    """The first n rows of a file of JSON lines in the data folder."""
    lines = data_file(name).read_text(encoding="utf-8").splitlines()[:n]
    return [json.loads(line) for line in lines]
