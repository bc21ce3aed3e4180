"""Folders of `arbor/papers` and `arbor/integrations` that were taken out, so that the documentation
describes more than there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def folders() -> list[str]:
    """``integrations/ray`` and so on, of those that the table of ARCHITECTURE.md names."""
    house = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `arbor/(papers|integrations)/` \|.*?:(.*)\|$", house, re.MULTILINE)
    named = [f"{group}/{name}" for group, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) > 10, "the table of ARCHITECTURE.md names the folders of both groups"
    return [name for name in named if not (ROOT / "arbor" / name).is_dir()]


TAKEN_OUT = folders()
WHY = f"the documentation describes folders that were taken out: {', '.join(TAKEN_OUT)}"
