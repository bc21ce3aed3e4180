"""Where arbor keeps what outlives a run.

``ARBOR_CACHE``, else ``$XDG_CACHE_HOME/arbor``, else ``~/.cache/arbor``:

    msve/MODEL/REVISION.json        block values fitted by ``arbor calibrate msve`` to a model of the Hub

A model directory keeps its own files; models themselves lie in the Hugging Face cache. Anything here may be deleted.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def cache_dir() -> Path:
    """The folder; it need not exist."""
    named = os.environ.get("ARBOR_CACHE", "").strip()
    if named:
        return Path(named).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", "").strip())
    if not shared.is_absolute():  # XDG: a relative one is ignored
        shared = Path.home() / ".cache"
    return shared / "arbor"


def msve_file(model: str, revision: str | None) -> Path:
    """The block values of a model of the Hub; the file need not exist.

    Args:
        model: its id.
        revision: branch, tag or commit; None = its main branch.
    """
    return (
        cache_dir() / "msve" / quote(model, safe="") / f"{quote(revision or 'main', safe='')}.json"
    )
