"""The script that takes folders out of a copy (`make without` runs it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_is_no_folder_of_arbor_is_refused() -> None:
    script = [sys.executable, "scripts/without.py", "docs"]

    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 2 and "docs is no package of arbor" in done.stderr
