"""Folders of `arbor/papers` and `arbor/integrations` that were taken out, so that the documentation
describes more than there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def folders() -> list[str]:
    """``integrations/ray`` and so on."""
    house = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("<!-- house: end")[0]
    missing, group = [], ""
    for indent, name in re.findall(r"^( {2,4})(\w+)/ ", house, re.MULTILINE):
        if len(indent) == 2:
            group = name
        elif not (ROOT / "arbor" / group / name).is_dir():
            missing.append(f"{group}/{name}")
    return missing


TAKEN_OUT = folders()
WHY = f"the documentation describes folders that were taken out: {', '.join(TAKEN_OUT)}"
