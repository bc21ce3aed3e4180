"""arbor works without this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_all_else_works_without_the_folder() -> None:
    script = [sys.executable, "scripts/without.py", "--quick", "arbor/papers/rksc"]

    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "without arbor/papers/rksc: 0 of 4 commands failed" in done.stdout


def test_what_is_no_folder_of_arbor_is_refused() -> None:
    script = [sys.executable, "scripts/without.py", "docs"]

    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 2 and "docs is no package of arbor" in done.stderr
