"""Data sets of others, found by an environment variable or next to the checkout."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ARBOR_TEST_DATA"


def data_folder() -> Path | None:
    """The folder with the data sets; None where there is none, and tests that need it skip."""
    neighbour = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    found = Path(os.environ.get(VARIABLE, neighbour))
    return found if found.is_dir() else None
